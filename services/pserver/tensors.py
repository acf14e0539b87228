"""Staged blocks as torch sees them: views into received bodies, never copies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor

from ps_protocol.frames import TensorEntry
from ps_protocol.vocabulary import Rank, Round

from .bodies import Body
from .contribution import Contribution
from .finite import is_finite
from .parts import Part, QuantisedPart, SparsePart

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
