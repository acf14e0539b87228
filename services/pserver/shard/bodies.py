"""Large bodies in buffers that are reused, because page faults are half the cost of receiving a large body.

A buffer belongs to one `Body`, referenced by its request and then by the blocks staged from it. It returns to the pool
when the last reference is released. Staged blocks are views of bodies, never copies, and are decoded range by range.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from operator import attrgetter

import numpy as np
import torch
from starlette.types import Receive, Scope
from torch import Tensor

from ps_http2.asgi import receive_into
from ps_protocol.encodings import TORCH_DTYPES, Part, Rows, SparsePart, check_increasing, decode_part
from ps_protocol.errors import BadInput, TryAgain
from ps_protocol.frames import Frame, FrameLimits, TensorEntry, parse_frame
from ps_protocol.vocabulary import Rank

PAGE_BYTES = 4 * 1024  # sizes of buffers are multiples of it,
GRAIN_BYTES = 64 * 1024  # or of this: bodies with the same blocks have headers of different lengths
LARGE_BYTES = 1024 * 1024
_PIECE_BYTES = 1 << 18  # compared at once


class BufferPool:
    """Buffers of the sizes that recur every round. They are acquired on the event loop, and released on any thread."""

    def __init__(self) -> None:
        self._idle: defaultdict[int, list[memoryview]] = defaultdict(list)
        self.idle_bytes = 0
        self.used_bytes = 0
        self._peak_bytes = 0

    def acquire(self, num_bytes: int) -> memoryview:
        """Return a buffer of this size or a little more, with undefined content.

        A new one takes memory only where it is written: a body that is announced and never sent costs nothing.
        """
        grain = GRAIN_BYTES if num_bytes >= LARGE_BYTES else PAGE_BYTES
        num_bytes += -num_bytes % grain
        if same_size := self._idle[num_bytes]:
            self.idle_bytes -= num_bytes
            buffer = same_size.pop()
        else:
            buffer = np.empty(num_bytes, np.uint8).data
        self.used_bytes += num_bytes
        self._peak_bytes = max(self._peak_bytes, self.used_bytes)
        return buffer

    def release(self, buffer: memoryview) -> None:
        """Keep the buffer, unless more bytes would be idle than were ever in use at a time."""
        self.used_bytes -= len(buffer)
        if self.idle_bytes + len(buffer) <= self._peak_bytes:
            self.idle_bytes += len(buffer)
            self._idle[len(buffer)].append(buffer)

    def free(self, buffer: memoryview) -> None:
        """Free a buffer whose size will not be needed again."""
        self.used_bytes -= len(buffer)
        self._peak_bytes -= len(buffer)

    def free_idle(self) -> None:
        """Free the idle buffers, since other sizes will be needed from now on."""
        self._idle.clear()
        self.idle_bytes = 0
        self._peak_bytes = self.used_bytes


class Body:
    """One received frame: its parsed header, and its buffer in memory of a pool, from which it is made on the loop.

    Views of the buffer are valid while this object is referenced.
    """

    frame: Frame

    def __init__(self, pool: BufferPool, num_bytes: int) -> None:
        self.is_recurring = True  # a body of this size comes in every round
        self._pool = pool
        self._memory = pool.acquire(num_bytes)
        self.buffer = self._memory[:num_bytes]

    def __del__(self) -> None:
        if self.is_recurring:
            self._pool.release(self._memory)
        else:
            self._pool.free(self._memory)

    @property
    def data(self) -> memoryview:
        """The data section, without a copy."""
        return self.buffer[self.frame.data_begin :]

    def view(self, entry: TensorEntry) -> memoryview:
        """Return the bytes of one tensor, without a copy."""
        return self.data[entry.begin : entry.end]


def content_length(headers: dict[str, str], limits: FrameLimits) -> int:
    """Return the announced length of a body, checked before anything is allocated. Raises BadInput."""
    text = headers.get("content-length", "")
    if not (text.isascii() and text.isdigit()):
        raise BadInput("a tensor body needs a Content-Length header", code="length_required")
    if len(text) > 18 or int(text) > limits.max_body_bytes:
        raise BadInput(
            "the body is too large",
            code="body_too_large", expected=f"<= {limits.max_body_bytes} bytes", actual=text[:40],
        )  # fmt: skip
    return int(text)


async def receive_body(scope: Scope, receive: Receive, num_bytes: int, limits: FrameLimits, pool: BufferPool) -> Body:
    """Receive exactly `num_bytes` and parse them. Waits for the client. Raises BadInput if the body ends early."""
    body = Body(pool, num_bytes)
    filled = 0
    more = True
    while more:
        try:
            received, more = await receive_into(body.buffer[filled:], scope, receive)
        except ValueError:
            raise BadInput(
                "the body is longer than its Content-Length", code="malformed_frame", expected=f"{num_bytes} bytes"
            ) from None
        filled += received
    if filled != num_bytes:
        raise BadInput("the body ended early", code="malformed_frame", expected=f"{num_bytes} bytes", actual=filled)
    body.frame = parse_frame(body.buffer, limits)
    return body


# ---------------------------------------------------------------------- staged blocks


def view_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous 1-D tensor, not copied; they are valid, and change, with the tensor."""
    return tensor.view(torch.uint8).numpy().data


def view_tensors(body: Body, entries: Iterable[TensorEntry]) -> list[Tensor]:
    """Return a view of each of these 1-D tensors, each of which follows the other.

    A run of one dtype is viewed at once and then split, which takes less time than a view for each tensor.
    """
    views: list[Tensor] = []
    for dtype, run in groupby(entries, key=attrgetter("dtype")):
        first, *others = run
        sizes = [first.shape[0], *(entry.shape[0] for entry in others)]
        offset = body.frame.data_begin + first.begin
        of_dtype = TORCH_DTYPES[dtype]
        if any(sizes):  # else rows, of which there are none
            flat = torch.frombuffer(body.buffer, dtype=of_dtype, count=sum(sizes), offset=offset)
        else:
            flat = torch.empty(0, dtype=of_dtype)
        views += flat.split_with_sizes(sizes)
    return views


class StagedBlock:
    """One block of a received body. While it is referenced, the body's buffer is not reused.

    `views` are its tensors on the wire, and `part` its elements, which are decoded when a range of them is read. They
    are valid while this block is referenced.
    """

    __slots__ = ("_body", "_num_elements", "part", "rows", "views")

    def __init__(self, body: Body, views: Sequence[Tensor], num_elements: int, width: int = 0) -> None:
        """`views` are one tensor of the body, or two if it is quantised, or consists of some elements or rows."""
        self._body = body  # whose buffer the views are of
        self._num_elements = num_elements
        self.views = views
        self.rows = Rows(views[0], views[1].view(-1, width)) if width else None  # in place of `part`
        self.part: Part = views[0] if width or len(views) == 1 else decode_part(views, num_elements)

    def tensor(self) -> Tensor:
        """Return the elements, of shape (num_elements,): a view that must not be written, or decoded float32."""
        return self.part[:]

    def bytes(self) -> list[memoryview]:
        """Return the pushed bytes of each tensor, not copied."""
        return [view_bytes(view) for view in self.views]

    def check(self) -> None:
        """Raise BadInput for wrong indices."""
        if self.rows is not None:
            check_increasing(self.rows.indices, self._num_elements // self.rows.values.shape[1])
        elif isinstance(self.part, SparsePart):
            self.part.check()

    def __eq__(self, other: object) -> bool:
        # Compares bytes: a NaN is equal to itself then, and 0 is not -0.
        return (
            isinstance(other, StagedBlock)
            and len(self.views) == len(other.views)
            and all(map(_are_equal, self.bytes(), other.bytes()))
        )


def _are_equal(one: memoryview, other: memoryview) -> bool:
    # Memoryviews are compared element by element, which takes thirteen times as long.
    return len(one) == len(other) and all(
        bytes(one[at : at + _PIECE_BYTES]) == bytes(other[at : at + _PIECE_BYTES])
        for at in range(0, len(one), _PIECE_BYTES)
    )


def split_blocks(
    contributions: Iterable[Mapping[str, StagedBlock]],
) -> tuple[list[dict[str, Part]], list[dict[str, Rows]]]:
    """Return the parts of each contribution by block, and the rows of its sparse blocks, in two lists."""
    blocks = [contribution.items() for contribution in contributions]
    return (
        [{name: block.part for name, block in its if block.rows is None} for its in blocks],
        [{name: block.rows for name, block in its if block.rows is not None} for its in blocks],
    )


def check_blocks(blocks: Iterable[StagedBlock]) -> None:
    """Raise BadInput for blocks with wrong indices."""
    for block in blocks:
        block.check()


# ---------------------------------------------------------------------- the limit of bodies in reception


class InFlight:
    """Announced bytes of bodies, from their headers until their requests have ended.

    Every trainer has an equal share, and may always send one body of any size, so that no trainer can block another.
    Staged contributions do not count. The protocol bounds them (one for each trainer, round and block), and they end
    with the round only: if they counted, the push that completes a round could be refused for ever.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._by_rank: Counter[Rank] = Counter()

    def __repr__(self) -> str:
        return f"<InFlight [{self.num_bytes} of {self._max_bytes} bytes]>"

    @property
    def num_bytes(self) -> int:
        """The announced bytes of all trainers."""
        return self._by_rank.total()

    @contextmanager
    def reserve(self, rank: Rank, num_bytes: int, num_trainers: int) -> Iterator[None]:
        """Count a body while the block runs. Raises TryAgain without waiting if the trainer's share is used up."""
        share = self._max_bytes // max(1, num_trainers)
        total = self._by_rank[rank] + num_bytes
        if self._by_rank[rank] and total > share:
            raise TryAgain(
                f"trainer {rank} exceeds its share of request bodies in flight; retry when its earlier requests "
                "have ended",
                code="overloaded", expected=f"<= {share} bytes", actual=total,
            )  # fmt: skip
        self._by_rank[rank] += num_bytes
        try:
            yield
        finally:
            self._by_rank[rank] -= num_bytes
            if not self._by_rank[rank]:
                del self._by_rank[rank]
