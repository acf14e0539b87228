"""From flat float32 values to the bytes of a reply, with one copy or none."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ps_protocol.vocabulary import DTYPE_BYTES

from .layout import BlockPlace
from .tensors import TORCH_DTYPES, view_bytes

CHUNK_BYTES = 1 << 20


class ChunkEncoder:
    """Turns blocks of `values`, the shard's flat float32 tensor, into chunks of about 1 MiB."""

    def __init__(self, values: Tensor) -> None:
        self._values = values
        self._value_bytes = view_bytes(values)
        self._scratch = torch.empty(CHUNK_BYTES, dtype=torch.uint8)
        self._converted = torch.empty(0, dtype=torch.uint8)  # what was lent in another dtype

    def encode(self, places: Iterable[BlockPlace], *, pulled: bool = False) -> list[bytes]:
        """Data of these blocks in the given order, as they are or `pulled`, little-endian, without holes.

        Large blocks are cut and small ones joined.
        """
        chunks: list[bytes] = []
        pieces: list[memoryview] = []  # of the next chunk, not copied yet
        size = 0
        for place in places:
            dtype = place.pulled if pulled else place.dtype
            width = DTYPE_BYTES[dtype]
            begin = place.begin
            while begin < place.end:
                end = min(place.end, begin + (CHUNK_BYTES - size) // width)
                if begin == end:
                    chunks.append(b"".join(pieces))
                    pieces, size = [], 0
                    continue
                pieces.append(self._piece(dtype, begin, end, self._scratch, size))
                size += width * (end - begin)
                begin = end
        if pieces:
            chunks.append(b"".join(pieces))
        return chunks

    def borrow(self, places: Iterable[BlockPlace]) -> list[memoryview]:
        """Data of each block as pulled: views of the values, or of a tensor that is written again next time."""
        places = list(places)
        others = sum(DTYPE_BYTES[place.pulled] * place.block.num_elements for place in places if place.pulled != "F32")
        if len(self._converted) < others:
            self._converted = torch.empty(others, dtype=torch.uint8)
        pieces = []
        offset = 0
        for place in places:
            pieces.append(self._piece(place.pulled, place.begin, place.end, self._converted, offset))
            offset += len(pieces[-1]) if place.pulled != "F32" else 0
        return pieces

    def _piece(self, dtype: str, begin: int, end: int, converted: Tensor, offset: int) -> memoryview:
        """Bytes of the values [begin, end); those of another dtype are written to `converted`."""
        if dtype == "F32":
            return self._value_bytes[4 * begin : 4 * end]
        target = converted[offset : offset + DTYPE_BYTES[dtype] * (end - begin)]
        target.view(TORCH_DTYPES[dtype]).copy_(self._values[begin:end])
        return view_bytes(target)
