"""The encoding of a gradient for the wire; the part that the encoding loses is kept, and pushed later.

Error feedback: Seide et al. 2014, "1-Bit Stochastic Gradient Descent" (Interspeech); Karimireddy et al. 2019, "Error
Feedback Fixes SignSGD" (arXiv:1901.09847). Scales for groups of elements: Dettmers et al. 2021, "8-bit Optimizers via
Block-wise Quantization" (arXiv:2110.02861). The largest elements only: Stich et al. 2018, "Sparsified SGD with Memory"
(arXiv:1809.07599).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ps_protocol.quantisation import pieces, quantise
from ps_protocol.vocabulary import Block
from ps_protocol.wire_types import PushType


class Remainder:
    """The part of a block's gradients that was not pushed: two flat float32 tensors, the current and the next one.

    A push that is not applied, because it was refused or its round skipped, changes nothing. The same gradient pushed
    again is the same bytes.
    """

    def __init__(self, num_elements: int) -> None:
        self.kept = torch.zeros(num_elements, dtype=torch.float32, device="cpu")
        self.next = torch.zeros_like(self.kept)  # what is left once the newest push has been applied
        self.is_pending = False  # there is such a push

    def resolve(self, *, is_applied: bool) -> None:
        """Commit the remainder of the newest push if it was applied, else discard it."""
        if self.is_pending and is_applied:
            self.kept, self.next = self.next, self.kept
        self.is_pending = False

    def reset(self) -> None:
        """Set the remainder to zero."""
        self.kept.zero_()
        self.is_pending = False


class ErrorFeedback:
    """The remainders of all blocks, for one trainer. They belong to this trainer only, and end with it."""

    def __init__(self) -> None:
        self._remainders: dict[str, Remainder] = {}

    def of(self, block: Block) -> Remainder:
        """Return the remainder of a block, zeros at first."""
        remainder = self._remainders.get(block.name)
        if remainder is None:
            remainder = self._remainders[block.name] = Remainder(block.num_elements)
        return remainder

    def resolve(self, *, is_applied: bool) -> None:
        """Commit or discard the remainders of the newest push."""
        for remainder in self._remainders.values():
            remainder.resolve(is_applied=is_applied)

    def reset(self) -> None:
        """Set all remainders to zero, because the run has gone back."""
        for remainder in self._remainders.values():
            remainder.reset()


def encode_gradient(
    kind: PushType, source: Tensor, remainder: Remainder | None, destinations: Sequence[Tensor]
) -> None:
    """Write a flat gradient to its tensors on the wire (`SlicePlan.pushed`).

    The current `remainder` is added to the gradient first, and the part that is not pushed becomes the next remainder.
    Without `remainder` the gradient is only converted. A gradient that is not finite is pushed unchanged, and leaves no
    remainder.
    """
    if remainder is None:
        destinations[0].copy_(source)
        return
    encode = _quantise if kind == "int8" else _sparsify
    encode(source, remainder.kept, remainder.next, *destinations)
    remainder.is_pending = True


def _quantise(source: Tensor, kept: Tensor, left: Tensor, integers: Tensor, scales: Tensor) -> None:
    for elements, groups in pieces(len(source)):
        torch.add(kept[elements], source[elements], out=left[elements])
        quantise(left[elements], integers[elements], scales[groups])
    if not scales.sum().isfinite():
        left.zero_()


def _sparsify(source: Tensor, kept: Tensor, left: Tensor, values: Tensor, indices: Tensor) -> None:
    torch.add(kept, source, out=left)
    largest = torch.topk(left.abs(), len(values), sorted=False).indices.sort().values
    indices.copy_(largest)
    torch.index_select(left, 0, largest, out=values)
    left[largest] = 0.0
    if not values.sum().isfinite():
        left.zero_()
