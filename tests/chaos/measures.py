"""The stalls and recovery times of faults, from the diaries."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence

from .diary import Record, in_order
from .episode import Injection


def measure(injection: Injection, records: Sequence[Record], ranks: Sequence[int]) -> tuple[float, float] | None:
    """Return stall and recovery of a fault in seconds, or None if a trainer had not recovered at the end.

    A trainer has recovered when it has completed a step that began after the injection. The stall is the longest time
    without a completed step until all have recovered; the recovery is the time from the healing until then. Faults
    overlap, so the cost of one may be that of another.
    """
    later = in_order(r for r in records if r["at"] > injection.at)
    recovered = [_first_whole_step(later, rank) for rank in ranks]
    if any(at is None for at in recovered):
        return None
    at = max(at for at in recovered if at is not None)
    steps = [injection.at, *(r["at"] for r in later if r["what"] == "end" and r["at"] <= at)]
    stall = max(after - before for before, after in itertools.pairwise(steps))
    return stall, max(0.0, at - injection.healed_at)


def _first_whole_step(later: Sequence[Record], rank: int) -> float | None:
    begun: set[tuple[int, int]] = set()  # incarnation and round
    for record in later:
        if record.get("rank") != rank:
            continue
        if record["what"] == "begin":
            begun.add((record["life"], record["round"]))
        elif record["what"] == "end" and any(
            life == record["life"] and round_ <= record["round"] for life, round_ in begun
        ):
            return float(record["at"])
    return None


def describe(values: Sequence[float]) -> str:
    """Return median and maximum as text."""
    return f"p50 {statistics.median(values):.2f} s, max {max(values):.2f} s" if values else "not measured"
