"""Statistics of tensors that are sharded over pservers: sums and counts, so that those of two shards are added."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from pydantic import Field

from ps_protocol.fields import Message
from ps_protocol.vocabulary import Round


class Statistics(Message):
    """Sums over the elements of one or several blocks, in float64. Sums, extremes and counts are of finite elements.

    `counts` has the number of elements by the sign and exponent of float32, its upper nine bits: 0 are the elements
    below `2**-126` of both signs.
    """

    version: Round
    num_elements: int = 0
    num_nan: int = 0
    num_infinite: int = 0
    num_zero: int = 0
    minimum: float = math.inf
    maximum: float = -math.inf
    total: float = 0.0
    squares: float = 0.0
    counts: dict[int, int] = Field(default={})
    num_touched: int | None = None  # rows in the newest update of each block; None for dense parameters

    def merge(self, other: Statistics) -> Statistics:
        """Return the statistics of the elements of both; `version` is the older one."""
        return Statistics(
            version=min(self.version, other.version),
            num_elements=self.num_elements + other.num_elements,
            num_nan=self.num_nan + other.num_nan,
            num_infinite=self.num_infinite + other.num_infinite,
            num_zero=self.num_zero + other.num_zero,
            minimum=min(self.minimum, other.minimum),
            maximum=max(self.maximum, other.maximum),
            total=self.total + other.total,
            squares=self.squares + other.squares,
            counts=Counter(self.counts) + Counter(other.counts),
            num_touched=None if self.num_touched is None else self.num_touched + (other.num_touched or 0),
        )

    def describe(self) -> dict[str, Any]:
        """Return the fields of `ParameterStatistics` that follow from these statistics."""
        n = self.num_elements - self.num_nan - self.num_infinite
        mean = self.total / n if n else 0.0
        return {
            "version": self.version,
            "num_elements": self.num_elements,
            "norm": math.sqrt(self.squares),
            "mean": mean if n else None,
            "deviation": math.sqrt(max(0.0, self.squares / n - mean * mean)) if n else None,
            "minimum": self.minimum if n else None,
            "maximum": self.maximum if n else None,
            "num_nan": self.num_nan,
            "num_infinite": self.num_infinite,
            "num_zero": self.num_zero,
            "num_touched": self.num_touched,
            "histogram": tuple(sorted((*_find_ends(bits), count) for bits, count in self.counts.items())),
        }


def _find_ends(bits: int) -> tuple[float, float]:
    """Return the ends of the bin with this sign and exponent.

    >>> _find_ends(126), _find_ends(256 + 128), _find_ends(0)
    ((0.5, 1.0), (-4.0, -2.0), (0.0, 0.0))
    """
    begin, end = (math.ldexp(1.0, (bits & 255) + more) if bits else 0.0 for more in (-127, -126))
    return (-end, -begin) if bits > 255 else (begin, end)


class ParameterStatistics(Message):
    """Statistics of one parameter in the HTTP API; all but the counts of NaN and infinities are of finite elements.

    `version` is the smallest round (in asynchronous modes number of contributions) of a pserver; `norm` the square root
    of the sum of squares; `deviation` the standard deviation of the whole population; `num_touched` the number of rows
    in the newest update of each block, null for a dense parameter. An administrator has frozen a parameter with
    `is_frozen`. `histogram` has `(begin, end, count)` for each bin with elements, in order. The ends of
    a bin are neighbouring powers of two, or both are 0 for the elements below `2**-126`.
    """

    run: str
    name: str
    shape: tuple[int, ...]
    version: Round
    num_elements: int
    norm: float
    mean: float | None
    deviation: float | None
    minimum: float | None
    maximum: float | None
    num_nan: int
    num_infinite: int
    num_zero: int
    num_touched: int | None
    is_frozen: bool
    histogram: tuple[tuple[float, float, int], ...]
