"""Values that an administrator has set, on the coordinator's disk until every pserver has got past their round."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import xxhash

from ps_protocol.frames import encode_header
from ps_protocol.plan import SlicePlan
from ps_protocol.vocabulary import DTYPE_BYTES, PserverIndex
from services.runtime.places import write_file


class Replacements:
    """Whole parameters as they are on the wire, each in a file that is called by their digest. All methods block."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, values: bytes) -> str:
        """Keep them; returns their digest. Raises OSError."""
        digest = xxhash.xxh3_128_hexdigest(values)
        write_file(self._folder / digest, [values])
        return digest

    def read(self, digest: str) -> bytes | None:
        """None if they are needed no more. Raises OSError."""
        with suppress(FileNotFoundError):
            return (self._folder / digest).read_bytes()
        return None

    def keep_only(self, digests: set[str]) -> None:
        """All others belong to changes that came about, or never did, without anybody here to see it."""
        for path in self._folder.iterdir() if self._folder.is_dir() else ():
            if path.name not in digests:
                path.unlink(missing_ok=True)

    def forget(self, digests: set[str]) -> None:
        """They are not needed any more."""
        for digest in digests:
            (self._folder / digest).unlink(missing_ok=True)


def frame_blocks(plan: SlicePlan, parameter: str, pserver: PserverIndex, values: bytes) -> bytes:
    """A frame of the blocks that a pserver has of a parameter, cut out of its values."""
    blocks = [block for block in plan.blocks_of[parameter] if block.pserver == pserver]
    dtype = plan.parameter[parameter].dtype
    width = DTYPE_BYTES[dtype]
    header = encode_header([(block.name, dtype, (block.num_elements,)) for block in blocks])
    return header + b"".join(values[width * block.begin : width * block.end] for block in blocks)
