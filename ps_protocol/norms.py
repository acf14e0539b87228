"""The global norm of a round's aggregated gradient, of which each pserver knows a part, and clipping by it.

    trainer ── norm(r), with the batch barrier ─────────► every pserver: its sum of squares, for which trainers
    trainer ── get(r) with the sum over all pservers ───► the first sum that matches lets the pserver step

All trainers add the same numbers, so any of them can finish the round.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .errors import BadInput

EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_ has it
MAX_TEXT = 128  # characters of the header


class ShardNorm(NamedTuple):
    """The norm of one pserver's part of an aggregate. `contributions` is a digest of the trainers in it."""

    contributions: str
    sum_of_squares: float

    def is_same(self, other: ShardNorm) -> bool:
        """Return whether both are of the same aggregate, where NaN equals NaN."""
        return self.contributions == other.contributions and repr(self.sum_of_squares) == repr(other.sum_of_squares)


@dataclass(frozen=True, slots=True)
class AgreedNorm:
    """The norm in a get to one pserver: the pserver's own norm, and the sum over all pservers."""

    own: ShardNorm
    total: float  # sum of squares

    @property
    def norm(self) -> float:
        return math.sqrt(self.total)

    def to_header(self) -> str:
        """Return three words, from which `from_header` reads exactly the same numbers.

        >>> AgreedNorm(ShardNorm("5f0c", 0.1), 25.0).to_header()
        '5f0c 0.1 25.0'
        """
        return f"{self.own.contributions} {self.own.sum_of_squares!r} {self.total!r}"

    @classmethod
    def from_header(cls, text: str) -> AgreedNorm:
        """Parse the header. Raises BadInput."""
        match text.split(" ") if len(text) <= MAX_TEXT and text.isascii() else ():
            case [contributions, own, total] if contributions.isalnum():
                try:
                    norm = cls(ShardNorm(contributions, float(own)), float(total))
                except ValueError:
                    pass
                else:
                    if _is_sum(norm.total, norm.own.sum_of_squares):
                        return norm
        raise BadInput(
            "the header gradpost-norm is not a norm",
            code="bad_header", expected="digest, own sum, total", actual=text[:40],
        )  # fmt: skip


def clip_coefficient(norm: float, max_norm: float) -> float:
    """Return the factor for every gradient, as `torch.nn.utils.clip_grad_norm_` computes it; NaN if the norm is NaN.

    >>> clip_coefficient(5.0, 10.0)
    1.0
    >>> round(clip_coefficient(5.0, 1.0), 5)
    0.2
    """
    coefficient = max_norm / (norm + EPSILON)
    return 1.0 if coefficient >= 1 else coefficient


def _is_sum(total: float, part: float) -> bool:
    """Return whether `total` can be the sum of `part` and other squares. A NaN makes the sum NaN."""
    return math.isnan(total) if math.isnan(part) else part >= 0 and (total >= part or math.isnan(total))


def agree(norms: Sequence[ShardNorm]) -> list[AgreedNorm] | None:
    """Return the norm to send to each pserver; None if their norms are not all of the same contributions.

    The total is rounded once, so that it is the same on all trainers.
    """
    if len({norm.contributions for norm in norms}) > 1:
        return None
    squares = [norm.sum_of_squares for norm in norms]
    total = math.fsum(squares) if all(map(math.isfinite, squares)) else sum(squares)
    return [AgreedNorm(norm, total) for norm in norms]
