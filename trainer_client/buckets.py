"""Buckets: several blocks of one pserver that travel in one request, in a send buffer that is kept.

A bucket is only packaging and may differ between tries; what counts is the blocks in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ps_protocol.frames import encode_header
from ps_protocol.plan import SlicePlan
from ps_protocol.vocabulary import DTYPE_BYTES, Block, PserverIndex

from .tensors import TORCH_DTYPES

METADATA_SLACK_BYTES = 256  # numbers change their length from step to step
# Many small blocks fill a frame's header before its data: half of what a pserver accepts by default.
MAX_HEADER_BYTES = 512 * 1024
ENTRY_HEADER_BYTES = 100  # of one block without its name: dtype, shape and offsets as JSON


@dataclass(frozen=True, slots=True)
class BlockSlot:
    """Where one block lies in a bucket's buffer: a view of shape (num_elements,) in the wire's dtype."""

    block: Block
    destination: Tensor


class Bucket:
    """One frame in a buffer of its own: filled from tensors, then handed to the network as it is.

    The buffer belongs to the request from `frame()` until the request has ended; only then may it be filled again.
    """

    def __init__(self, pserver: PserverIndex, entries: Sequence[tuple[Block, str]], min_header_bytes: int) -> None:
        self.pserver = pserver
        self._tensors = [(block.name, dtype, (block.num_elements,)) for block, dtype in entries]
        self._header_bytes = len(encode_header(self._tensors, min_bytes=min_header_bytes))
        sizes = [block.num_elements * DTYPE_BYTES[dtype] for block, dtype in entries]
        self._buffer = bytearray(self._header_bytes + sum(sizes))
        self.slots: list[BlockSlot] = []
        offset = self._header_bytes
        for (block, dtype), size in zip(entries, sizes, strict=True):
            view = torch.frombuffer(self._buffer, dtype=TORCH_DTYPES[dtype], count=block.num_elements, offset=offset)
            self.slots.append(BlockSlot(block, view))
            offset += size

    def fill(self, flat: Mapping[str, Tensor]) -> None:
        """Copy the blocks out of flattened parameters or gradients (parameter name -> shape (numel,))."""
        for slot in self.slots:
            slot.destination.copy_(flat[slot.block.parameter][slot.block.begin : slot.block.end])

    def frame(self, metadata: Mapping[str, str] | None = None) -> memoryview:
        """The encoded frame with this metadata. Grows the buffer if the metadata does not fit any more."""
        header = encode_header(self._tensors, metadata, min_bytes=self._header_bytes)
        if len(header) > self._header_bytes:
            return memoryview(header + bytes(memoryview(self._buffer)[self._header_bytes :]))
        self._buffer[: len(header)] = header
        return memoryview(self._buffer)


def make_buckets(
    plan: SlicePlan, parameters: Iterable[str], *, bucket_bytes: int, metadata_bytes: int = 0
) -> list[list[Bucket]]:
    """Buckets of each pserver that together carry the blocks of `parameters`, about `bucket_bytes` each.

    Every pserver has at least one bucket, maybe an empty one, because every pserver must learn that a contribution
    is complete. The last one of each has room for `metadata_bytes` of metadata.
    """
    wanted = set(parameters)
    result = []
    for pserver, shard in enumerate(plan.shards):
        groups: list[list[tuple[Block, str]]] = [[]]
        size = header_size = 0
        for block in shard:
            if block.parameter not in wanted:
                continue
            header = len(block.name) + ENTRY_HEADER_BYTES
            if groups[-1] and (
                size + plan.block_bytes(block) > bucket_bytes or header_size + header > MAX_HEADER_BYTES
            ):
                groups.append([])
                size = header_size = 0
            groups[-1].append((block, plan.parameter[block.parameter].dtype))
            size += plan.block_bytes(block)
            header_size += header
        room = [0] * (len(groups) - 1) + [metadata_bytes]
        result.append(
            [Bucket(pserver, group, _header_room(group, extra)) for group, extra in zip(groups, room, strict=True)]
        )
    return result


def _header_room(entries: Sequence[tuple[Block, str]], metadata_bytes: int) -> int:
    bare = len(encode_header([(block.name, dtype, (block.num_elements,)) for block, dtype in entries]))
    return bare + metadata_bytes + METADATA_SLACK_BYTES if metadata_bytes else bare
