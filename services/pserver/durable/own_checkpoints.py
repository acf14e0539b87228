"""Checkpoints that a pserver writes for itself, beside its log: they keep the log short, and are no part of any other.

log/000000000128.checkpoint    16 bytes XXH3-128 of the rest, and the shard after round 128
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path

import xxhash

from ps_protocol.vocabulary import Round
from services.runtime.places import read_file, write_file
from services.runtime.sealed import DamagedFile

from .records import Buffer

_DIGEST_BYTES = 16
_NAME = re.compile(r"(\d{12})\.checkpoint")


class OwnCheckpoints:
    """The checkpoints in one pserver's folder. Every method but `rounds` blocks on the disk and may raise OSError."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        self._rounds = {int(found[1]) for name in names if (found := _NAME.fullmatch(name))}

    @property
    def rounds(self) -> Collection[Round]:
        """The rounds of the checkpoints that are whole, as far as is known."""
        return tuple(self._rounds)

    def write(self, round_: Round, chunks: Sequence[Buffer]) -> None:
        """Write the shard after a round; it is on the disk when this returns."""
        digest = xxhash.xxh3_128()
        for chunk in chunks:
            digest.update(chunk)
        write_file(self._path(round_), [digest.digest(), *chunks])
        self._rounds.add(round_)

    def read(self, round_: Round) -> memoryview:
        """Return the bytes of a shard. Raises DamagedFile."""
        path = self._path(round_)
        data = read_file(path)
        if xxhash.xxh3_128_digest(data[_DIGEST_BYTES:]) != data[:_DIGEST_BYTES]:
            raise DamagedFile.wrong_digest(path)
        return data[_DIGEST_BYTES:]

    def forget(self, round_: Round) -> None:
        """Do not use this one any more: it is damaged."""
        self._rounds.discard(round_)

    def keep(self, rounds: Collection[Round]) -> None:
        """Delete all others."""
        for round_ in self._rounds - set(rounds):
            self._path(round_).unlink(missing_ok=True)
            self._rounds.discard(round_)

    def resume(self, round_: Round) -> None:
        """Delete those behind this round, and what an earlier life of this pserver had begun to write."""
        self.keep([own for own in self._rounds if own <= round_])
        for path in self._folder.glob(".*.checkpoint.*"):
            path.unlink(missing_ok=True)

    def _path(self, round_: Round) -> Path:
        return self._folder / f"{round_:012}.checkpoint"
