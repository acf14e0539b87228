"""The snapshots of a shard in the folder of its pserver.

log/000000000128-1f0c….safetensors    the shard after round 128; the name has the XXH3-128 of the file

A file is never changed, so that the shared storage of checkpoints may have a link to it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path

import xxhash

from ps_protocol.vocabulary import Round
from services.runtime.storage import Buffer, DamagedFile, digest_chunks, read_file, write_file

_NAME = re.compile(r"(\d{12})-([0-9a-f]{32})\.safetensors")


class Snapshots:
    """The snapshots in one folder. Every method blocks on the disk and may raise OSError."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        paths = sorted(folder.iterdir()) if folder.is_dir() else []
        self._paths = {int(found[1]): path for path in paths if (found := _NAME.fullmatch(path.name))}

    @property
    def rounds(self) -> list[Round]:
        """The rounds of the snapshots, newest first."""
        return sorted(self._paths, reverse=True)

    def write(self, round_: Round, chunks: Sequence[Buffer]) -> Path:
        """Write the shard after a round; it is on the disk when this returns."""
        path = self._folder / f"{round_:012}-{digest_chunks(chunks).hexdigest()}.safetensors"
        write_file(path, chunks)
        self._paths[round_] = path
        return path

    def read(self, round_: Round) -> memoryview:
        """Return the bytes of a snapshot. Raises DamagedFile."""
        path = self._paths[round_]
        data = read_file(path)
        if xxhash.xxh3_128_hexdigest(data) != read_digest(path):
            raise DamagedFile.wrong_digest(path)
        return data

    def discard(self, round_: Round) -> None:
        """Stop using a damaged snapshot."""
        del self._paths[round_]

    def delete_others(self, rounds: Collection[Round]) -> None:
        """Delete all other snapshots."""
        for round_ in self.rounds:
            if round_ not in rounds:
                self._paths[round_].unlink(missing_ok=True)
                self.discard(round_)

    def resume(self, round_: Round) -> None:
        """Delete the snapshots after this round, and files that an earlier incarnation had begun to write."""
        self.delete_others([kept for kept in self.rounds if kept <= round_])
        for path in [*self._folder.glob("*.safetensors"), *self._folder.glob(".*.safetensors.*")]:
            if path not in self._paths.values():
                path.unlink(missing_ok=True)


def read_digest(path: Path) -> str:
    """Return the digest in the name of a snapshot.

    >>> read_digest(Path("log/000000000128-0123456789abcdef0123456789abcdef.safetensors"))
    '0123456789abcdef0123456789abcdef'
    """
    return path.stem.partition("-")[2]
