"""Buckets: several blocks of one pserver that travel in one request, from memory that is kept.

A bucket is only packaging and may differ between tries; what counts is the blocks in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import TypeAlias

import torch
from torch import Tensor

from ps_protocol.encodings import TORCH_DTYPES, is_finite
from ps_protocol.frames import encode_header
from ps_protocol.plan import SlicePlan
from ps_protocol.requests import Completion
from ps_protocol.vocabulary import DTYPE_BYTES, Block, PserverIndex
from ps_protocol.wire_types import WireTensor, sparse

from ..transport.tensors import has_wire_layout, writable_bytes
from .error_feedback import ErrorFeedback, Remainder

FrameParts: TypeAlias = tuple[memoryview, ...]  # the body of one request, in parts that are sent in order

MIN_LENT_BYTES = 64 * 1024  # smaller blocks are copied, which costs less than a write for each
# Many small blocks fill a frame's header before its data: half of what a pserver accepts by default.
MAX_HEADER_BYTES = 512 * 1024
MAX_ROWS_BYTES = 128 * 1024 * 1024  # in a bucket, if a gradient touches all rows: half of what a pserver accepts
ENTRY_HEADER_BYTES = 100  # dtype, shape and offsets of one block as JSON


@dataclass(slots=True)
class BucketEntry:
    """One block of a bucket: its tensors on the wire, and the memory that they are sent from."""

    block: Block
    tensors: list[WireTensor]
    remainder: Remainder | None  # what the encoding loses, if it does
    own: tuple[Tensor, ...] = ()  # memory of the bucket, allocated when it is first needed
    filled: tuple[Tensor, ...] = ()  # the tensors that are sent: `own`, or the caller's tensor
    num_bytes: int = field(init=False)  # the size of the block on the wire
    is_small: bool = field(init=False)
    dtype: torch.dtype | None = field(init=False)  # of the only tensor on the wire; None if there are several

    def __post_init__(self) -> None:
        self.num_bytes = sum(DTYPE_BYTES[dtype] * count for _, dtype, (count,) in self.tensors)
        self.is_small = self.num_bytes < MIN_LENT_BYTES
        self.dtype = TORCH_DTYPES[self.tensors[0][1]] if len(self.tensors) == 1 else None

    def fill(self, source: Tensor, *, borrow: bool) -> None:
        """Fill the block from a flat parameter or gradient."""
        if borrow and source.dtype == self.dtype and has_wire_layout(source):
            self.filled = (source,)
            return
        if not self.own:
            self.place_in(bytearray(self.num_bytes), 0)
        self.filled = self.own
        if self.remainder is None:
            self.own[0].copy_(source)
        else:
            self.remainder.encode(source, self.own)

    def place_in(self, buffer: bytearray, offset: int) -> None:
        """Place the block's tensors in this memory, from the offset on."""
        views = []
        for _, dtype, (count,) in self.tensors:
            views.append(torch.frombuffer(buffer, dtype=TORCH_DTYPES[dtype], count=count, offset=offset))
            offset += views[-1].nbytes
        self.own = self.filled = tuple(views)

    def parts(self) -> list[memoryview]:
        """Return the bytes that are sent, as views of the bucket's memory."""
        return [writable_bytes(tensor) for tensor in self.filled]


@dataclass(slots=True)
class RowsEntry(BucketEntry):
    """A block of a sparse parameter: the rows that a gradient touches, and their number."""

    width: int = 1

    def __post_init__(self) -> None:
        self.num_bytes, self.is_small, self.dtype = 0, False, None

    def fill(self, source: Tensor, *, borrow: bool) -> None:
        """Fill the block from a sparse gradient of the whole parameter, which is coalesced."""
        indices, values = source.indices()[0], source.values()
        first, last = self.block.begin // self.width, self.block.end // self.width
        begin, end = torch.searchsorted(indices, torch.tensor([first, last])).tolist()
        name, dtype, _ = self.tensors[-1]
        rows = values[begin:end].reshape(-1).to(TORCH_DTYPES[dtype], copy=not borrow)
        self.filled = ((indices[begin:end] - first).int(), rows)
        self.tensors = sparse(name, dtype, end - begin, self.width)


class Bucket:
    """One frame, which is filled from tensors and then sent.

    The parts that `frame()` returned must not change until the request has ended and the round was pulled from all
    pservers. Only then may the bucket be filled again. Small blocks lie together in memory of its own.
    """

    def __init__(self, pserver: PserverIndex, entries: list[BucketEntry]) -> None:
        self.pserver = pserver
        self.entries = entries
        self.parameters = frozenset(entry.block.parameter for entry in entries)
        self.present = entries  # the filled entries
        small = bytearray(sum(entry.num_bytes for entry in entries if entry.is_small))
        dtypes = {entry.dtype for entry in entries if entry.is_small}
        dtype = dtypes.pop() if small and len(dtypes) == 1 else None
        # All small blocks, some of them of an earlier step; None if their dtypes differ.
        self._small = None if dtype is None else torch.frombuffer(small, dtype=dtype)
        self._has_rows = any(isinstance(entry, RowsEntry) for entry in entries)
        self._header: memoryview | None = None  # of the newest frame, if all entries were filled
        self._announced: Completion | None = None  # the completion in it
        self._segments: list[BucketEntry | memoryview] = []  # in order: large blocks, and ranges of small blocks
        offset = begin = 0
        for entry in entries:
            if entry.is_small:
                entry.place_in(small, offset)
                offset += entry.num_bytes
                continue
            self._segments += [memoryview(small)[begin:offset], entry]
            begin = offset
        self._segments.append(memoryview(small)[begin:offset])

    def fill(self, flat: Mapping[str, Tensor], *, borrow: bool = False) -> None:
        """Encode the blocks of flattened parameters or gradients (parameter name -> shape (numel,)).

        With `borrow`, large tensors that have the same form on the wire are not copied. They must not change then for
        as long as the bucket's own memory must not.
        """
        self.present = [entry for entry in self.entries if entry.block.parameter in flat]
        copied: list[tuple[Tensor, Tensor]] = []  # in one call, because each takes more time than a small block
        for entry in self.present:
            source = flat[entry.block.parameter]
            if entry.block.num_elements != source.numel() and not source.is_sparse:
                source = source[entry.block.begin : entry.block.end]
            if entry.is_small and entry.remainder is None:
                copied.append((entry.own[0], source))
            else:
                entry.fill(source, borrow=borrow and not entry.is_small)
        if copied:
            torch._foreach_copy_([own for own, _ in copied], [source for _, source in copied])

    def find_nonfinite(self) -> str | None:
        """Return a parameter whose filled blocks hold NaN or infinity as they are sent, if there is one."""
        is_small_finite = self._small is not None and is_finite(self._small)  # one call takes less time than many
        for entry in self.present:
            unknown = () if entry.is_small and is_small_finite else entry.filled
            if not all(is_finite(tensor) for tensor in unknown if tensor.is_floating_point()):
                return entry.block.parameter
        return None

    def frame(self, completion: Completion | None = None) -> FrameParts:
        """Return the frame of the filled blocks, in parts; the last one of a contribution has its completion."""
        is_full = len(self.present) == len(self.entries)
        if not is_full or self._header is None or completion != self._announced:
            tensors = [tensor for entry in self.present for tensor in entry.tensors]
            header = memoryview(encode_header(tensors, None if completion is None else completion.to_metadata()))
            self._header, self._announced = header if is_full and not self._has_rows else None, completion
        else:
            header = self._header
        parts = [header]
        for segment in self._segments if is_full else self.present:
            parts += segment.parts() if isinstance(segment, BucketEntry) else [segment]
        if sum(map(len, parts)) < MIN_LENT_BYTES:  # one write costs less than several
            return (memoryview(b"".join(parts)),)
        return tuple(part for part in parts if len(part))


class PushBuckets:
    """The buckets of one step."""

    def __init__(self, shards: list[list[Bucket]]) -> None:
        self.shards = shards  # by pserver
        # In the order of sending: one of each pserver in turn, so that all are busy.
        self.in_order = [bucket for turn in zip_longest(*shards) for bucket in turn if bucket is not None]
        self.holding: dict[str, list[Bucket]] = {}  # the buckets that hold a parameter's blocks, by its name
        for bucket in self.in_order:
            for name in bucket.parameters:
                self.holding.setdefault(name, []).append(bucket)


def count_blocks(shard: Sequence[Bucket], completion: Completion, num_loaded: int = 0) -> Completion:
    """Return the completion of a contribution to one pserver, whose buckets are filled.

    `num_loaded`: the number of slots and step states in other frames.
    """
    return replace(completion, num_blocks=sum(len(bucket.present) for bucket in shard) + num_loaded)


def make_buckets(plan: SlicePlan, *, bucket_bytes: int, feedback: ErrorFeedback | None = None) -> list[list[Bucket]]:
    """Return each pserver's buckets of about `bucket_bytes` for all blocks, in the order of backward: last layer first.

    With `feedback` they contain gradients in the plan's wire type, without it unchanged values. Every
    pserver has at least one bucket, maybe an empty one, because every pserver must learn that a contribution is
    complete.
    """
    result = []
    for pserver, shard in enumerate(plan.shards):
        groups: list[list[BucketEntry]] = [[]]
        size = header_size = most = 0
        for block in reversed(shard):
            values: list[WireTensor] = [(block.name, plan.parameter[block.parameter].dtype, (block.num_elements,))]
            tensors = values if feedback is None else plan.pushed(block)
            spec = plan.parameter[block.parameter]
            if feedback is not None and spec.is_sparse:
                entry: BucketEntry = RowsEntry(block, tensors, None, width=spec.width)
            else:
                lossy = feedback if len(tensors) > 1 else None
                entry = BucketEntry(block, tensors, None if lossy is None else lossy.of(block, plan.wire.push))
            header = sum(len(name) + ENTRY_HEADER_BYTES for name, _, _ in tensors)
            at_most = sum(DTYPE_BYTES[dtype] * count for _, dtype, (count,) in tensors)
            is_full = size + entry.num_bytes > bucket_bytes or most + at_most > max(bucket_bytes, MAX_ROWS_BYTES)
            if groups[-1] and (is_full or header_size + header > MAX_HEADER_BYTES):
                groups.append([])
                size = header_size = most = 0
            groups[-1].append(entry)
            size += entry.num_bytes
            most += at_most
            header_size += header
        result.append([Bucket(pserver, group) for group in groups])
    return result
