"""The log: every update of a shard, written before it is applied.

A segment `000000000128.log` holds the updates after round 128, one record each, in the order of rounds; a new one
begins with every checkpoint. A shard is restored from a checkpoint and the updates behind it. In asynchronous modes
the round of an update is its number: how many contributions this pserver has taken with it.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ps_protocol.frames import encode_header
from ps_protocol.optimizers import HyperParameters
from ps_protocol.vocabulary import Durability, Incarnation, Rank, Round
from services.runtime.failpoints import reach_failpoint
from services.runtime.logs import get_logger
from services.runtime.places import map_file, sync_folder

from .records import Buffer, Ending, Record, append_record, read_records

log = get_logger()

SUFFIX = ".log"


@dataclass(frozen=True, slots=True)
class Update:
    """One update without its gradient. `present` names the blocks that it steps, None all of them.

    An asynchronous one is one trainer's contribution: `origin` is the life that took the step, and the step.
    """

    round: Round
    ranks: tuple[Rank, ...]
    hyper_parameters: list[HyperParameters]
    present: tuple[str, ...] | None
    nonfinite: tuple[Rank, ...] = ()  # for whose gradients the round stepped nothing
    origin: tuple[Incarnation, Round] | None = None

    def to_metadata(self) -> dict[str, str]:
        """As it stands in a record."""
        return {
            "round": str(self.round),
            "ranks": json.dumps(self.ranks),
            "hyper_parameters": json.dumps(self.hyper_parameters),
            "present": json.dumps(self.present),
            "nonfinite": json.dumps(self.nonfinite),
            "origin": json.dumps(self.origin),
        }

    @classmethod
    def from_record(cls, record: Record) -> Update:
        """The same back."""
        values = record.frame.metadata
        present, origin = json.loads(values["present"]), json.loads(values["origin"])
        return cls(
            round=int(values["round"]),
            ranks=tuple(json.loads(values["ranks"])),
            hyper_parameters=json.loads(values["hyper_parameters"]),
            present=None if present is None else tuple(present),
            nonfinite=tuple(json.loads(values["nonfinite"])),
            origin=None if origin is None else (origin[0], origin[1]),
        )


class UpdateLog:
    """One pserver's log of one run. Synchronous; used by one thread at a time. Every method may raise OSError."""

    def __init__(self, folder: Path, durability: Durability) -> None:
        self.num_bytes = 0  # since the newest segment began
        self._folder = folder
        self._durability = durability
        self._fd: int | None = None
        folder.mkdir(parents=True, exist_ok=True)

    def append(self, update: Update, gradient: Sequence[Buffer]) -> None:
        """Write an update; `gradient` are the float32 elements of the present blocks, in the order of the layout.

        With durability `fsync` it is on the disk when this returns, with `log` in the kernel's memory, which
        outlives the process. On an OSError nothing of it was written.
        """
        assert self._fd is not None
        reach_failpoint("log.append.before")
        num_elements = sum(map(len, gradient)) // 4
        header = encode_header([("gradient", "F32", (num_elements,))], update.to_metadata())
        written = append_record(self._fd, [header, *gradient])
        if self._durability == "fsync":
            self._sync(self._fd, written)
        self.num_bytes += written
        reach_failpoint("log.append.after")

    def _sync(self, fd: int, newest_bytes: int) -> None:
        try:
            os.fdatasync(fd)
        except OSError:
            # The kernel may have dropped what it could not write, and say nothing of it the next time.
            os.ftruncate(fd, os.fstat(fd).st_size - newest_bytes)
            raise

    def begin_segment(self, round_: Round) -> None:
        """Write what comes after this round into a file of its own; if there can be none, go on with the one before."""
        try:
            fd = self._create_segment(round_)
        except OSError as error:
            if self._fd is None:
                raise
            log.warning("the log gets no new file and goes on in the old one", round=round_, error=str(error))
            return
        self.close()
        self._fd = fd
        self.num_bytes = 0

    def _create_segment(self, round_: Round) -> int:
        path = self._path(round_)
        is_open = path.exists()  # and empty: nothing was applied since it was begun
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            sync_folder(self._folder)
        except OSError:
            os.close(fd)
            if not is_open:
                path.unlink()  # what stands behind this round would be looked for in it
            raise
        return fd

    def resume(self, round_: Round) -> None:
        """Go on after this round: cut off whatever stands behind it, such as a torn tail."""
        self.close()
        bases = self._bases()
        for base in [base for base in bases if base > round_]:
            self._path(base).unlink()
        bases = [base for base in bases if base <= round_]
        if not bases:
            self.begin_segment(round_)
            return
        path = self._path(bases[-1])
        end = 0
        for item in self._read_segment(bases[-1]):
            if isinstance(item, Ending) or Update.from_record(item).round > round_:
                break
            end = item.end
        if (surplus := path.stat().st_size - end) > 0:
            log.warning("cutting off the end of the log", file=path.name, round=round_, bytes=surplus)
        self._fd = os.open(path, os.O_WRONLY)
        os.ftruncate(self._fd, end)
        os.fsync(self._fd)
        self.num_bytes = end

    def read_after(self, round_: Round) -> Iterator[tuple[Update, memoryview]]:
        """The updates behind a round with their gradients, without a gap; ends where the log does, or is damaged."""
        bases = self._bases()
        newest_start = max((base for base in bases if base <= round_), default=None)
        for base in bases:
            if newest_start is None or base < newest_start:
                continue
            for item in self._read_segment(base):
                if isinstance(item, Ending):
                    self._say(item, base)
                    break
                update = Update.from_record(item)
                if update.round == round_ + 1:
                    yield update, item.data
                    round_ += 1
                elif update.round > round_:
                    return

    def _read_segment(self, base: Round) -> Iterator[Record | Ending]:
        return read_records(map_file(self._path(base)))

    def _say(self, ending: Ending, base: Round) -> None:
        if ending.kind != "clean":
            log.warning(f"the log is {ending.kind}", file=self._path(base).name, at=ending.at)

    def prune(self, oldest: Round) -> None:
        """Delete the segments that only reach back to before the checkpoint of this round."""
        bases = self._bases()
        for base, following in itertools.pairwise(bases):
            if following <= oldest:
                self._path(base).unlink()

    def close(self) -> None:
        """Close the file; what was appended stays."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _path(self, base: Round) -> Path:
        return self._folder / f"{base:012}{SUFFIX}"

    def _bases(self) -> list[Round]:
        return sorted(int(path.stem) for path in self._folder.glob(f"*{SUFFIX}"))
