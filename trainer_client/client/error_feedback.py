"""Error feedback: the part of a gradient that its encoding loses is kept, and pushed later.

Seide et al. 2014, "1-Bit Stochastic Gradient Descent" (Interspeech); Karimireddy et al. 2019, "Error Feedback Fixes
SignSGD" (arXiv:1901.09847).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ps_protocol.encodings import LOSSY_ENCODERS
from ps_protocol.vocabulary import Block
from ps_protocol.wire_types import PushType


class Remainder:
    """The part of a block's gradients that was not pushed: two flat float32 tensors, the current and the next one.

    A push that is not applied, because it was refused or its round skipped, changes nothing. The same gradient pushed
    again is the same bytes.
    """

    def __init__(self, kind: PushType, num_elements: int) -> None:
        self._kind = kind
        self.kept = torch.zeros(num_elements, dtype=torch.float32, device="cpu")
        self.next = torch.zeros_like(self.kept)  # the remainder after the newest push, if that is applied
        self.is_pending = False  # there is such a push

    def encode(self, gradient: Tensor, tensors: Sequence[Tensor]) -> None:
        """Write the remainder and a flat gradient to its tensors on the wire (`SlicePlan.pushed`).

        The part that these lack becomes the next remainder. A gradient that is not finite leaves none.
        """
        LOSSY_ENCODERS[self._kind](gradient, self.kept, self.next, *tensors)
        self.is_pending = True

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

    def of(self, block: Block, kind: PushType) -> Remainder:
        """Return the remainder of a block that is pushed in this wire type, zeros at first."""
        remainder = self._remainders.get(block.name)
        if remainder is None:
            remainder = self._remainders[block.name] = Remainder(kind, block.num_elements)
        return remainder

    def resolve(self, *, is_applied: bool) -> None:
        """Commit or discard the remainders of the newest push."""
        for remainder in self._remainders.values():
            remainder.resolve(is_applied=is_applied)

    def reset(self) -> None:
        """Set all remainders to zero, because the run has gone back."""
        for remainder in self._remainders.values():
            remainder.reset()
