"""From flat float32 values to the bytes of a reply, with one copy."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ps_protocol.vocabulary import DTYPE_BYTES

from .layout import BlockPlace
from .tensors import TORCH_DTYPES, view_bytes

CHUNK_BYTES = 1 << 20


class ChunkEncoder:
    """Turns blocks of `values`, the shard's flat float32 tensor, into chunks of about 1 MiB. Keeps one as scratch."""

    def __init__(self, values: Tensor) -> None:
        self._values = values
        self._value_bytes = view_bytes(values)
        self._scratch = torch.empty(CHUNK_BYTES, dtype=torch.uint8)
        self._scratch_bytes = view_bytes(self._scratch)

    def encode(self, places: Iterable[BlockPlace]) -> list[bytes]:
        """Data of these blocks in the given order, each in its dtype on the wire, little-endian, without holes.

        Large blocks are cut and small ones joined.
        """
        chunks: list[bytes] = []
        pieces: list[memoryview] = []  # of the next chunk, not copied yet
        size = 0
        for place in places:
            width = DTYPE_BYTES[place.dtype]
            begin = place.begin
            while begin < place.end:
                end = min(place.end, begin + (CHUNK_BYTES - size) // width)
                if begin == end:
                    chunks.append(b"".join(pieces))
                    pieces, size = [], 0
                    continue
                pieces.append(self._piece(place.dtype, begin, end, size))
                size += width * (end - begin)
                begin = end
        if pieces:
            chunks.append(b"".join(pieces))
        return chunks

    def _piece(self, dtype: str, begin: int, end: int, offset: int) -> memoryview:
        """Bytes of the values [begin, end); converted ones lie in the scratch, at their offset in the chunk."""
        if dtype == "F32":
            return self._value_bytes[4 * begin : 4 * end]
        stop = offset + DTYPE_BYTES[dtype] * (end - begin)
        self._scratch[offset:stop].view(TORCH_DTYPES[dtype]).copy_(self._values[begin:end])
        return self._scratch_bytes[offset:stop]
