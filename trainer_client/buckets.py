"""Buckets: several blocks of one pserver that travel in one request, in a send buffer that is kept.

A bucket is only packaging and may differ between tries; what counts is the blocks in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from ps_protocol.frames import encode_header
from ps_protocol.plan import SlicePlan
from ps_protocol.vocabulary import DTYPE_BYTES, Block, PserverIndex
from ps_protocol.wire_types import PushType, WireTensor

from .encoding import ErrorFeedback, encode_gradient
from .tensors import TORCH_DTYPES

BlockTensors: TypeAlias = tuple[Block, list[WireTensor]]  # a block, and the tensors that it is on the wire

METADATA_SLACK_BYTES = 256  # numbers change their length from step to step
# Many small blocks fill a frame's header before its data: half of what a pserver accepts by default.
MAX_HEADER_BYTES = 512 * 1024
ENTRY_HEADER_BYTES = 100  # of one block without its name: dtype, shape and offsets as JSON


@dataclass(frozen=True, slots=True)
class BlockSlot:
    """Where one block lies in a bucket's buffer, as the tensors that it is on the wire; `error` has what they lack."""

    block: Block
    destinations: tuple[Tensor, ...]
    error: Tensor | None


class Bucket:
    """One frame in a buffer of its own: filled from tensors, then handed to the network as it is.

    The buffer belongs to the request from `frame()` until the request has ended; only then may it be filled again.
    """

    def __init__(
        self,
        pserver: PserverIndex,
        entries: Sequence[BlockTensors],
        min_header_bytes: int,
        kind: PushType = "float32",
        feedback: ErrorFeedback | None = None,
    ) -> None:
        self.pserver = pserver
        self._kind = kind
        self._tensors = [tensor for _, tensors in entries for tensor in tensors]
        self._header_bytes = len(encode_header(self._tensors, min_bytes=min_header_bytes))
        self._buffer = bytearray(self._header_bytes + sum(map(_num_bytes, self._tensors)))
        self.slots: list[BlockSlot] = []
        offset = self._header_bytes
        for block, tensors in entries:
            views = []
            for _, dtype, (size,) in tensors:
                views.append(torch.frombuffer(self._buffer, dtype=TORCH_DTYPES[dtype], count=size, offset=offset))
                offset += views[-1].nbytes
            has_error = feedback is not None and len(tensors) > 1
            self.slots.append(BlockSlot(block, tuple(views), feedback.of(block) if feedback and has_error else None))

    def fill(self, flat: Mapping[str, Tensor]) -> None:
        """Encode the blocks of flattened parameters or gradients (parameter name -> shape (numel,))."""
        for slot in self.slots:
            block = slot.block
            encode_gradient(self._kind, flat[block.parameter][block.begin : block.end], slot.error, slot.destinations)

    def frame(self, metadata: Mapping[str, str] | None = None) -> memoryview:
        """The encoded frame with this metadata. Grows the buffer if the metadata does not fit any more."""
        header = encode_header(self._tensors, metadata, min_bytes=self._header_bytes)
        if len(header) > self._header_bytes:
            return memoryview(header + bytes(memoryview(self._buffer)[self._header_bytes :]))
        self._buffer[: len(header)] = header
        return memoryview(self._buffer)


def make_buckets(
    plan: SlicePlan,
    parameters: Iterable[str],
    *,
    bucket_bytes: int,
    metadata_bytes: int = 0,
    feedback: ErrorFeedback | None = None,
) -> list[list[Bucket]]:
    """Buckets of each pserver that together carry the blocks of `parameters`, about `bucket_bytes` each.

    With `feedback` they carry gradients, as the plan has them on the wire, without it values as they are. Every
    pserver has at least one bucket, maybe an empty one, because every pserver must learn that a contribution is
    complete. The last one of each has room for `metadata_bytes` of metadata.
    """
    wanted = set(parameters)
    kind = plan.wire.push if feedback is not None else "float32"
    result = []
    for pserver, shard in enumerate(plan.shards):
        groups: list[list[BlockTensors]] = [[]]
        size = header_size = 0
        for block in shard:
            if block.parameter not in wanted:
                continue
            dtype = plan.parameter[block.parameter].dtype
            values: list[WireTensor] = [(block.name, dtype, (block.num_elements,))]
            tensors = values if feedback is None else plan.pushed(block)
            num_bytes = sum(map(_num_bytes, tensors))
            header = sum(len(name) + ENTRY_HEADER_BYTES for name, _, _ in tensors)
            if groups[-1] and (size + num_bytes > bucket_bytes or header_size + header > MAX_HEADER_BYTES):
                groups.append([])
                size = header_size = 0
            groups[-1].append((block, tensors))
            size += num_bytes
            header_size += header
        room = [0] * (len(groups) - 1) + [metadata_bytes]
        result.append(
            [
                Bucket(pserver, group, _header_room(group, extra), kind, feedback)
                for group, extra in zip(groups, room, strict=True)
            ]
        )
    return result


def _num_bytes(tensor: WireTensor) -> int:
    _, dtype, (size,) = tensor
    return DTYPE_BYTES[dtype] * size


def _header_room(entries: Sequence[BlockTensors], metadata_bytes: int) -> int:
    bare = len(encode_header([tensor for _, tensors in entries for tensor in tensors]))
    return bare + metadata_bytes + METADATA_SLACK_BYTES if metadata_bytes else bare
