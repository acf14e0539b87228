"""Statistics of tensors that are sharded over pservers; the statistics of two shards can be merged exactly.

The edges of histogram bins are multiples of a power of two, so that the edges of two shards coincide:

    bins of 1/4:    |-0.25  0|0  0.25|0.25  0.5|0.5  0.75|
    bins of 1/2:    |-0.5   0|0           0.5  |0.5     1|
"""

from __future__ import annotations

import math
from typing import Any

from ps_protocol.fields import Message
from ps_protocol.vocabulary import Round

MAX_BINS = 64


class Histogram(Message):
    """Counts of finite values: bin i holds values from `(first + i) * width` to below `(first + i + 1) * width`.

    `width` is a power of two, 2 ** `exponent`.
    """

    exponent: int
    first: int
    counts: tuple[int, ...]

    @property
    def width(self) -> float:
        """The width of every bin."""
        return math.ldexp(1.0, self.exponent)

    def coarsen(self, exponent: int) -> Histogram:
        """Return the histogram with wider bins.

        >>> Histogram(exponent=-2, first=-1, counts=(5, 1, 2, 3)).coarsen(-1)
        Histogram(exponent=-1, first=-1, counts=(5, 3, 3))
        """
        times = 1 << (exponent - self.exponent)
        first = self.first // times
        counts = [0] * ((self.first + len(self.counts) - 1) // times - first + 1 if self.counts else 0)
        for i, count in enumerate(self.counts, self.first):
            counts[i // times - first] += count
        return Histogram(exponent=exponent, first=first, counts=tuple(counts))

    def merge(self, other: Histogram) -> Histogram:
        """Return the histogram of the values of both, with at most `MAX_BINS` bins."""
        if not self.counts or not other.counts:
            return self if self.counts else other
        exponent = max(self.exponent, other.exponent)
        while True:
            a, b = self.coarsen(exponent), other.coarsen(exponent)
            first = min(a.first, b.first)
            num_bins = max(a.first + len(a.counts), b.first + len(b.counts)) - first
            if num_bins <= MAX_BINS:
                break
            exponent += 1
        counts = [0] * num_bins
        for one in (a, b):
            for i, count in enumerate(one.counts, one.first - first):
                counts[i] += count
        return Histogram(exponent=exponent, first=first, counts=tuple(counts))


class Statistics(Message):
    """Statistics of the elements of one or several blocks. Sums and extremes are of finite ones, sums in float64.

    `deviations` is the sum of squared deviations from the mean. `update_squares` and `before_squares` are sums of
    squares of the newest update, and of the values before it; None without an observed update.
    """

    version: Round
    num_elements: int
    num_nan: int = 0
    num_infinite: int = 0
    num_zero: int = 0
    minimum: float | None = None
    maximum: float | None = None
    mean: float = 0.0
    deviations: float = 0.0
    squares: float = 0.0
    update_squares: float | None = None
    before_squares: float | None = None
    histogram: Histogram = Histogram(exponent=0, first=0, counts=())

    @property
    def num_finite(self) -> int:
        """The number of finite elements."""
        return self.num_elements - self.num_nan - self.num_infinite

    def merge(self, other: Statistics) -> Statistics:
        """Return the statistics of the elements of both (Chan, Golub, LeVeque 1979); `version` is the older one."""
        n = self.num_finite + other.num_finite
        apart = other.mean - self.mean
        share = other.num_finite / n if n else 0.0
        return Statistics(
            version=min(self.version, other.version),
            num_elements=self.num_elements + other.num_elements,
            num_nan=self.num_nan + other.num_nan,
            num_infinite=self.num_infinite + other.num_infinite,
            num_zero=self.num_zero + other.num_zero,
            minimum=min((x for x in (self.minimum, other.minimum) if x is not None), default=None),
            maximum=max((x for x in (self.maximum, other.maximum) if x is not None), default=None),
            mean=self.mean + apart * share,
            deviations=self.deviations + other.deviations + apart * apart * share * self.num_finite,
            squares=self.squares + other.squares,
            update_squares=_add(self.update_squares, other.update_squares),
            before_squares=_add(self.before_squares, other.before_squares),
            histogram=self.histogram.merge(other.histogram),
        )

    def describe(self) -> dict[str, Any]:
        """Return the fields of `ParameterStatistics` that follow from these statistics."""
        n = self.num_finite
        ratio = None
        if self.update_squares is not None and self.before_squares:
            ratio = math.sqrt(self.update_squares / self.before_squares)
        return {
            "version": self.version,
            "num_elements": self.num_elements,
            "norm": math.sqrt(self.squares),
            "mean": self.mean if n else None,
            "deviation": math.sqrt(self.deviations / n) if n else None,
            "minimum": self.minimum,
            "maximum": self.maximum,
            "num_nan": self.num_nan,
            "num_infinite": self.num_infinite,
            "num_zero": self.num_zero,
            "update_ratio": ratio,
            "histogram": {
                "begin": self.histogram.first * self.histogram.width,
                "width": self.histogram.width,
                "counts": list(self.histogram.counts),
            },
        }


class ValueHistogram(Message):
    """Counts of finite values: bin i holds values from `begin + i * width` to below `begin + (i + 1) * width`."""

    begin: float
    width: float
    counts: tuple[int, ...]


class ParameterStatistics(Message):
    """Statistics of one parameter in the HTTP API; all but the counts of NaN and infinities are of finite elements.

    `version` is the smallest round (in asynchronous modes number of contributions) of a pserver; `norm` the square root
    of the sum of squares; `deviation` the standard deviation of the whole population; `update_ratio` the norm of the
    newest update divided by the norm of the values before it, null without an observed update.
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
    update_ratio: float | None
    histogram: ValueHistogram


def _add(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a + b
