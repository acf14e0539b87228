"""Pairs of wire types, for gradients and for parameters, and the comparison of two of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Pair:
    """The wire types of a run."""

    push: str
    pull: str

    def __str__(self) -> str:
        return f"{self.push} / {self.pull}"


FLOAT32 = Pair("float32", "float32")
EIGHT_BITS = Pair("int8", "int8")  # of the targets

PAIRS = (
    FLOAT32,
    Pair("bfloat16", "bfloat16"),
    Pair("float16", "float16"),
    Pair("int8", "bfloat16"),
    EIGHT_BITS,
    Pair("topk", "float32"),
    Pair("topk", "int8"),
)


def parse_pair(text: str) -> Pair:
    """Return the pair with this name.

    >>> parse_pair("int8/bfloat16")
    Pair(push='int8', pull='bfloat16')
    """
    push, _, pull = text.partition("/")
    return Pair(push.strip(), pull.strip())


RESAMPLES = 10_000


@dataclass(frozen=True)
class Difference:
    """The mean difference of paired values with its 95 % bootstrap interval, and the numbers of pairs by sign."""

    mean: float
    low: float
    high: float
    num_worse: int
    num_equal: int
    num_better: int

    @classmethod
    def between(cls, values: Sequence[float], baseline: Sequence[float]) -> Difference:
        """Compare the i-th value with the i-th of the baseline. The same pairs give the same interval.

        >>> Difference.between([2.0, 4.0], [1.0, 3.0])
        Difference(mean=1.0, low=1.0, high=1.0, num_worse=0, num_equal=0, num_better=2)
        """
        differences = np.asarray(values) - np.asarray(baseline)
        drawn = np.random.default_rng(0).choice(differences, (RESAMPLES, len(differences)))
        low, high = np.percentile(drawn.mean(axis=1), [2.5, 97.5])
        counts = (int(count) for count in ((differences < 0).sum(), (differences == 0).sum(), (differences > 0).sum()))
        return cls(float(differences.mean()), float(low), float(high), *counts)

    def __str__(self) -> str:
        return f"{self.mean:+.2f} [{self.low:+.2f}, {self.high:+.2f}]"
