"""Staged blocks as torch sees them: views into received bodies, never copies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import xxhash
from torch import Tensor

from ps_protocol.errors import BadInput
from ps_protocol.frames import TensorEntry
from ps_protocol.quantisation import dequantise
from ps_protocol.vocabulary import Rank, Round
from ps_protocol.wire_types import GROUP

from .bodies import Body
from .contribution import Contribution


class Part(Protocol):
    """What one trainer pushed of one block; only read."""

    @property
    def shape(self) -> torch.Size:
        """(num_elements,), of the block."""

    def __getitem__(self, elements: slice) -> Tensor:
        """The elements in a range that begins on a multiple of 256, as a floating tensor; maybe a view."""


class QuantisedPart:
    """int8 with a scale for each 256 elements; decoded range by range, so that never much of it is."""

    def __init__(self, integers: Tensor, scales: Tensor) -> None:
        self._integers, self._scales = integers, scales

    @property
    def shape(self) -> torch.Size:
        """See Part."""
        return self._integers.shape

    def __getitem__(self, elements: slice) -> Tensor:
        """See Part."""
        begin, end, _ = elements.indices(len(self._integers))
        return dequantise(self._integers[begin:end], self._scales[begin // GROUP : -(-end // GROUP)])


class SparsePart:
    """Some elements, at increasing indices; the others are 0."""

    def __init__(self, values: Tensor, indices: Tensor, num_elements: int) -> None:
        self._values, self._indices, self._num_elements = values, indices, num_elements

    def check(self) -> None:
        """Raise BadInput unless the indices increase and lie within the block."""
        indices = self._indices
        is_sorted = bool((indices[1:] > indices[:-1]).all())
        if not is_sorted or not 0 <= int(indices[0]) <= int(indices[-1]) < self._num_elements:
            raise BadInput(
                "the indices of a sparse block have to increase, from 0 to below its size", code="malformed_frame"
            )

    @property
    def shape(self) -> torch.Size:
        """See Part."""
        return torch.Size((self._num_elements,))

    def __getitem__(self, elements: slice) -> Tensor:
        """See Part."""
        begin, end, _ = elements.indices(self._num_elements)
        bounds = torch.tensor([begin, end], dtype=self._indices.dtype)
        first, last = torch.searchsorted(self._indices, bounds).tolist()
        dense = torch.zeros(end - begin)
        dense[(self._indices[first:last] - begin).long()] = self._values[first:last]
        return dense


_PIECE_BYTES = 1 << 18  # that are compared at once

TORCH_DTYPES = {
    "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I8": torch.int8, "I32": torch.int32,
}  # fmt: skip


def view_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous 1-D tensor, not copied; valid and changing as long as the tensor."""
    return tensor.view(torch.uint8).numpy().data


@dataclass(frozen=True, slots=True, eq=False)
class StagedBlock:
    """One block of a received body. Holding it keeps the body's buffer from being reused."""

    body: Body
    entries: tuple[TensorEntry, ...]  # one, or two where it is not simply its elements
    num_elements: int

    def tensor(self) -> Tensor:
        """Its elements, of shape (num_elements,): a view, or decoded float32; not to be written.

        A view is valid while this block is held.
        """
        return self.part()[:]

    def part(self) -> Part:
        """The same for who wants ranges of it, and decoded only then."""
        first, *rest = (self._view(entry) for entry in self.entries)
        if not rest:
            return first
        return (
            QuantisedPart(first, rest[0])
            if first.dtype == torch.int8
            else SparsePart(first, rest[0], self.num_elements)
        )

    def check(self) -> None:
        """Raise BadInput for indices that are none."""
        part = self.part()
        if isinstance(part, SparsePart):
            part.check()

    def is_finite(self) -> bool:
        """Whether there is neither NaN nor infinity in it."""
        views = (self._view(entry) for entry in self.entries)
        return all(is_finite(view) for view in views if view.dtype.is_floating_point)

    def _view(self, entry: TensorEntry) -> Tensor:
        return torch.frombuffer(
            self.body.buffer,
            dtype=TORCH_DTYPES[entry.dtype],
            count=entry.shape[0],
            offset=self.body.frame.data_begin + entry.begin,
        )

    def bytes(self) -> list[memoryview]:
        """What was pushed."""
        return [self.body.view(entry) for entry in self.entries]

    def __eq__(self, other: object) -> bool:
        """Whether the very same bytes were pushed; a NaN is equal to itself then, and 0 is not -0."""
        return (
            isinstance(other, StagedBlock)
            and len(self.entries) == len(other.entries)
            and all(map(_are_equal, self.bytes(), other.bytes()))
        )


def _are_equal(one: memoryview, other: memoryview) -> bool:
    # Memoryviews are compared element by element, which takes thirteen times as long.
    return len(one) == len(other) and all(
        bytes(one[at : at + _PIECE_BYTES]) == bytes(other[at : at + _PIECE_BYTES])
        for at in range(0, len(one), _PIECE_BYTES)
    )


def digest_contribution(
    digest: xxhash.xxh3_128, identity: tuple[Round, Rank], contribution: Contribution[StagedBlock]
) -> None:
    """Add everything that a trainer has staged."""
    said = contribution.num_blocks, contribution.num_slots, contribution.hyper_parameters
    digest.update(repr((identity, *said)).encode())
    for name, staged in [*sorted(contribution.blocks.items()), *sorted(contribution.slots.items())]:
        digest.update(name.encode())
        for view in staged.bytes() if isinstance(staged, StagedBlock) else [repr(staged).encode()]:
            digest.update(view)


def check_blocks(blocks: Mapping[str, StagedBlock]) -> None:
    """Raise BadInput for what can be seen only in the data."""
    for block in blocks.values():
        block.check()


def find_nonfinite(blocks: Mapping[str, StagedBlock]) -> str | None:
    """Return the name of a block that holds NaN or infinity, if there is one."""
    return next((name for name, block in blocks.items() if not block.is_finite()), None)


def is_finite(tensor: Tensor) -> bool:
    """Whether a float32, bfloat16 or float16 tensor of any shape holds neither NaN nor infinity.

    The sum of finite elements may overflow, but a sum is not finite if one of them is not. So a finite sum, which is
    three times as fast, spares a look at the extremes, which propagate NaN and never overflow
    (https://docs.pytorch.org/docs/stable/generated/torch.aminmax.html). Neither allocates anything: of 12.5 M float32
    elements on one thread the sum takes 1.9 ms, the extremes 6.3, `isfinite().all()` 100.
    """
    if tensor.numel() == 0 or math.isfinite(tensor.sum().item()):
        return True
    return all(math.isfinite(extreme.item()) for extreme in torch.aminmax(tensor))
