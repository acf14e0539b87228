"""Flat float32 values as the bytes of a reply, with one copy or none."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ps_protocol.vocabulary import DTYPE_BYTES

from .layout import BlockPlace
from .tensors import TORCH_DTYPES, view_bytes

CHUNK_BYTES = 1 << 20


class ChunkEncoder:
    """Encodes blocks of `values`, the shard's flat float32 tensor, in chunks of about 1 MiB."""

    def __init__(self, values: Tensor) -> None:
        self._values = values
        self._value_bytes = view_bytes(values)
        self._scratch = torch.empty(CHUNK_BYTES, dtype=torch.uint8)
        self._converted = torch.empty(0, dtype=torch.uint8)  # borrowed blocks of other dtypes

    def encode(self, places: Iterable[BlockPlace], *, pulled: bool = False) -> list[bytes]:
        """Return the data of these blocks in the given order, little-endian, without holes.

        The dtype is the parameter's, or the one that is `pulled`. Large blocks are split and small ones joined.
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
                pieces.append(self._encode_piece(dtype, begin, end, self._scratch, size))
                size += width * (end - begin)
                begin = end
        if pieces:
            chunks.append(b"".join(pieces))
        return chunks

    def borrow(self, places: Iterable[BlockPlace]) -> list[memoryview]:
        """Return the pulled data of each block: views of the values, or of a tensor that the next call overwrites."""
        places = list(places)
        num_bytes = sum(DTYPE_BYTES[p.pulled] * p.block.num_elements for p in places if p.pulled != "F32")
        if len(self._converted) < num_bytes:
            self._converted = torch.empty(num_bytes, dtype=torch.uint8)
        pieces = []
        offset = 0
        for place in places:
            pieces.append(self._encode_piece(place.pulled, place.begin, place.end, self._converted, offset))
            offset += len(pieces[-1]) if place.pulled != "F32" else 0
        return pieces

    def _encode_piece(self, dtype: str, begin: int, end: int, converted: Tensor, offset: int) -> memoryview:
        """Return the bytes of the values [begin, end); another dtype than float32 is written to `converted`."""
        if dtype == "F32":
            return self._value_bytes[4 * begin : 4 * end]
        target = converted[offset : offset + DTYPE_BYTES[dtype] * (end - begin)]
        target.view(TORCH_DTYPES[dtype]).copy_(self._values[begin:end])
        return view_bytes(target)
