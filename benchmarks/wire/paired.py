"""What differs between two ways of training, measured pair by pair."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000


@dataclass(frozen=True)
class Difference:
    """The mean over all pairs with its 95 % bootstrap interval, and how many pairs went which way."""

    mean: float
    low: float
    high: float
    num_worse: int
    num_equal: int
    num_better: int

    @classmethod
    def between(cls, values: Sequence[float], baseline: Sequence[float]) -> Difference:
        """The i-th value belongs to the i-th of the baseline. The same pairs give the same interval.

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
