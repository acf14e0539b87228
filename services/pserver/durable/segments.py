"""The files of a log: segments, and a spare one.

    000000000128-9f3c5e2a7b1d4c60.log    the updates after round 128
    spare                                a segment that is not needed any more, and becomes the next one

To write over a file takes a fraction of the time of writing a new one: the kernel has its pages already, and the disk
its blocks. What is left in it of its former life does not count, since every record begins with its segment's **mark**,
which is drawn by chance and stands in the file's name: with the new name the old records are void.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from ps_protocol.vocabulary import Round
from services.runtime.places import sync_folder

from .records import MARK_BYTES

_SPARE = "spare"


@dataclass(frozen=True, slots=True, order=True)
class Segment:
    """A file with the updates after round `base`."""

    base: Round
    path: Path

    @property
    def mark(self) -> bytes:
        """With which its records begin."""
        return bytes.fromhex(self.path.stem.partition("-")[2])


def list_segments(folder: Path) -> list[Segment]:
    """Those that are there, by their bases."""
    return sorted(Segment(int(path.stem.partition("-")[0]), path) for path in folder.glob("*-*.log"))


def create_segment(folder: Path, base: Round) -> tuple[Segment, int]:
    """A segment without records, out of the spare one if there is one, and its open file. Raises OSError.

    The name is on the disk when this returns; if it does not get there, there is no such segment.
    """
    segment = Segment(base, folder / f"{base:012}-{secrets.token_hex(MARK_BYTES)}.log")
    with contextlib.suppress(FileNotFoundError):
        (folder / _SPARE).rename(segment.path)
    fd = -1
    try:
        fd = os.open(segment.path, os.O_WRONLY | os.O_CREAT, 0o600)
        sync_folder(folder)
    except OSError:
        if fd >= 0:
            os.close(fd)
        segment.path.unlink(missing_ok=True)  # what stands behind its base would be looked for in it
        raise
    return segment, fd


def retire_segment(segment: Segment) -> None:
    """It is not needed any more. The file may be a later segment; of several the last one is kept."""
    segment.path.replace(segment.path.with_name(_SPARE))


def delete_spare(folder: Path) -> None:
    """Delete the spare file: no further segment is needed."""
    (folder / _SPARE).unlink(missing_ok=True)
