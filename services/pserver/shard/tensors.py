"""Staged blocks as torch tensors: views of received bodies, never copies, decoded range by range."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ps_protocol.encodings import TORCH_DTYPES, Part, SparsePart, decode_part, is_finite
from ps_protocol.frames import TensorEntry

from .bodies import Body

QUICK_BYTES = 1 << 16  # a smaller push is checked in less time than another thread takes to begin

_PIECE_BYTES = 1 << 18  # compared at once


def view_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous 1-D tensor, not copied; they are valid, and change, with the tensor."""
    return tensor.view(torch.uint8).numpy().data


@dataclass(frozen=True, slots=True, eq=False)
class StagedBlock:
    """One block of a received body. While it is referenced, the body's buffer is not reused."""

    body: Body
    entries: tuple[TensorEntry, ...]  # one, or two for a quantised or sparse block
    num_elements: int

    def tensor(self) -> Tensor:
        """Return the elements, of shape (num_elements,): a view that must not be written, or decoded float32.

        A view is valid while this block is referenced.
        """
        return self.part()[:]

    def part(self) -> Part:
        """Return the elements as a part, which is decoded when a range of it is read."""
        return decode_part([self._view(entry) for entry in self.entries], self.num_elements)

    def is_finite(self) -> bool:
        """Return whether the block contains neither NaN nor infinity."""
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
        """Return the pushed bytes of each entry, not copied."""
        return [self.body.view(entry) for entry in self.entries]

    def __eq__(self, other: object) -> bool:
        # Compares bytes: a NaN is equal to itself then, and 0 is not -0.
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


def check_blocks(blocks: Mapping[str, StagedBlock]) -> None:
    """Raise BadInput for sparse blocks with wrong indices."""
    for block in blocks.values():
        if isinstance(part := block.part(), SparsePart):
            part.check()


def find_nonfinite(blocks: Mapping[str, StagedBlock]) -> str | None:
    """Return the name of a block that contains NaN or infinity, if there is one."""
    return next((name for name, block in blocks.items() if not block.is_finite()), None)
