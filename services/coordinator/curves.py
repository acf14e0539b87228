"""The curves of the results that trainers report with their heartbeats, in memory."""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import reduce
from itertools import pairwise
from operator import attrgetter
from typing import Any

from pydantic import BaseModel

from ps_protocol.fields import ByOrdinal, Mean
from ps_protocol.messages import TrainerHeartbeat
from ps_protocol.vocabulary import Rank, Round

MAX_POINTS = 1000  # of one curve; beyond it neighbours are merged in pairs
MAX_CURVES = 1000
MAX_ANSWERED = 100_000  # points in one answer, which takes about 0.1 s to encode


class Curve(BaseModel):
    """The points of one result of one trainer, in columns.

    A point is the mean of `count` reported values. A mean that JSON cannot express is null.
    """

    round: list[Round]
    at: list[float]  # seconds since 1970
    value: list[float | None]
    count: list[int]


class CurveList(BaseModel):
    """The curves of the newest run, by name and rank."""

    run: str
    curves: dict[str, ByOrdinal[Curve]]


@dataclass(frozen=True, slots=True)
class Point:
    """The mean of the values that a trainer reported up to a round and a time, since the point before."""

    round: Round
    at: float
    mean: Mean


class Curves:
    """The curves of the newest run: one for each trainer and result."""

    def __init__(self, run: str = "") -> None:
        self.run = run
        self._points: dict[tuple[str, Rank], list[Point]] = {}

    def copy(self) -> Curves:
        """Return a copy, which another thread may use."""
        copy = Curves(self.run)
        copy._points = {key: list(points) for key, points in self._points.items()}
        return copy

    def restore(self, earlier: CurveList) -> None:
        """Continue curves that `describe` has returned in an earlier process."""
        self.run = earlier.run
        for name, by_rank in earlier.curves.items():
            for rank, curve in by_rank.items():
                columns = zip(curve.round, curve.at, curve.value, curve.count, strict=True)
                self._points[name, rank] = [
                    Point(round_, at, Mean(count=count, value=math.nan if value is None else value))
                    for round_, at, value, count in columns
                ]

    def add(self, rank: Rank, message: TrainerHeartbeat) -> None:
        """Add the means of a heartbeat. A client without means reports `results` once for each round."""
        if message.run != self.run:
            self.run = message.run
            self._points.clear()
        now, means = time.time(), message.means
        if means is None:
            means = {name: Mean(count=1, value=value) for name, value in message.results.items()}
        for name, mean in means.items():
            points = self._points.get((name, rank))
            if points is None:
                if len(self._points) >= MAX_CURVES:
                    continue
                points = self._points[name, rank] = []
            del points[bisect_right(points, message.round, key=_round_of) :]  # a rollback
            if points and points[-1].round == message.round:
                if message.means is None:
                    continue
                mean = points.pop().mean.merge(mean)
            points.append(Point(message.round, now, mean))
            if len(points) > MAX_POINTS:
                points[:] = _thin_out(points, MAX_POINTS // 2 + 1)

    def describe(self, max_points: int = MAX_POINTS, max_answered: int = MAX_ANSWERED) -> dict[str, Any]:
        """Return the curves by name and rank, with at most `max_points` points, which are means of the stored points.

        With many curves each curve has fewer points, so that the answer has at most `max_answered` points.
        """
        max_points = min(max_points, max_answered // max(1, len(self._points)))
        curves: dict[str, dict[Rank, dict[str, list[float]]]] = {}
        for (name, rank), points in sorted(self._points.items()):
            thin = _thin_out(points, max_points)
            curves.setdefault(name, {})[rank] = {
                "round": [point.round for point in thin],
                "at": [point.at for point in thin],
                "value": [point.mean.value for point in thin],
                "count": [point.mean.count for point in thin],
            }
        return {"run": self.run, "curves": curves}


_round_of = attrgetter("round")


def _thin_out(points: list[Point], most: int) -> list[Point]:
    """Return at most `most` points. The first is kept, and each other one is the mean of the points up to it."""
    if len(points) <= most:
        return points
    ends = [i * (len(points) - 1) // (most - 1) for i in range(most)]
    merged = [reduce(Mean.merge, (p.mean for p in points[a + 1 : b + 1])) for a, b in pairwise([-1, *ends])]
    return [replace(points[end], mean=mean) for end, mean in zip(ends, merged, strict=True)]
