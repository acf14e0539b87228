"""Staged blocks as torch tensors: views of received bodies, never copies, decoded range by range."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from operator import attrgetter

import torch
from torch import Tensor

from ps_protocol.encodings import TORCH_DTYPES, Part, SparsePart, decode_part
from ps_protocol.frames import TensorEntry

from .bodies import Body

_PIECE_BYTES = 1 << 18  # compared at once


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
        flat = torch.frombuffer(body.buffer, dtype=TORCH_DTYPES[dtype], count=sum(sizes), offset=offset)
        views += flat.split_with_sizes(sizes)
    return views


class StagedBlock:
    """One block of a received body. While it is referenced, the body's buffer is not reused.

    `views` are its tensors on the wire, and `part` its elements, which are decoded when a range of them is read. They
    are valid while this block is referenced.
    """

    __slots__ = ("_body", "part", "views")

    def __init__(self, body: Body, views: Sequence[Tensor], num_elements: int) -> None:
        """`views` are one tensor of the body, or two for a quantised or sparse block."""
        self._body = body  # whose buffer the views are of
        self.views = views
        self.part: Part = views[0] if len(views) == 1 else decode_part(views, num_elements)

    def tensor(self) -> Tensor:
        """Return the elements, of shape (num_elements,): a view that must not be written, or decoded float32."""
        return self.part[:]

    def bytes(self) -> list[memoryview]:
        """Return the pushed bytes of each tensor, not copied."""
        return [view_bytes(view) for view in self.views]

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


def check_blocks(blocks: Mapping[str, StagedBlock]) -> None:
    """Raise BadInput for sparse blocks with wrong indices."""
    for block in blocks.values():
        if isinstance(block.part, SparsePart):
            block.part.check()
