"""The global norm of a round's aggregated gradient, which no pserver can know alone, and how it clips.

    trainer ── norm(r), the batch barrier rides on it ──► every pserver: its sum of squares, and of whose gradients
    trainer ── get(r) with the sum over all of them ────► the first one that matches lets the pserver step

Every trainer adds up the same numbers, so any of them can finish the round.
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
    """Of one pserver's part of a round's aggregate. `contributions` is a digest of whose they are."""

    contributions: str
    sum_of_squares: float

    def is_same(self, other: ShardNorm) -> bool:
        """Whether both were taken of the same; a NaN is one."""
        return self.contributions == other.contributions and repr(self.sum_of_squares) == repr(other.sum_of_squares)


@dataclass(frozen=True, slots=True)
class AgreedNorm:
    """What a get tells one pserver: its own norm, as it was answered, and the sum over all pservers."""

    own: ShardNorm
    total: float  # sum of squares

    @property
    def norm(self) -> float:
        """The 2-norm of the whole gradient."""
        return math.sqrt(self.total)

    def to_header(self) -> str:
        """Three words; numbers so that they come back exactly.

        >>> AgreedNorm(ShardNorm("5f0c", 0.1), 25.0).to_header()
        '5f0c 0.1 25.0'
        """
        return f"{self.own.contributions} {self.own.sum_of_squares!r} {self.total!r}"

    @classmethod
    def from_header(cls, text: str) -> AgreedNorm:
        """The same back. Raises BadInput."""
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
            "the header gradpost-norm is no norm",
            code="bad_header", expected="digest, own sum, total", actual=text[:40],
        )  # fmt: skip


def clip_coefficient(norm: float, max_norm: float) -> float:
    """What every gradient is multiplied by, as `torch.nn.utils.clip_grad_norm_` does; NaN if the norm is.

    >>> clip_coefficient(5.0, 10.0)
    1.0
    >>> round(clip_coefficient(5.0, 1.0), 5)
    0.2
    """
    coefficient = max_norm / (norm + EPSILON)
    return 1.0 if coefficient >= 1 else coefficient


def _is_sum(total: float, part: float) -> bool:
    """Whether it can be the sum of this and other squares; if one of them is NaN, so is the sum."""
    return math.isnan(total) if math.isnan(part) else part >= 0 and (total >= part or math.isnan(total))


def agree(norms: Sequence[ShardNorm]) -> list[AgreedNorm] | None:
    """For each pserver what to tell it; None if their norms are not all of the same contributions.

    The total is rounded once, so that it does not depend on who adds it up.
    """
    if len({norm.contributions for norm in norms}) > 1:
        return None
    squares = [norm.sum_of_squares for norm in norms]
    total = math.fsum(squares) if all(map(math.isfinite, squares)) else sum(squares)
    return [AgreedNorm(norm, total) for norm in norms]
