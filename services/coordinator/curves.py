"""The curves of the results that trainers report, in memory."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from ps_protocol.fields import ByOrdinal
from ps_protocol.vocabulary import Rank, Round

MAX_POINTS = 1000  # of one curve; beyond it every second point is dropped
MAX_CURVES = 1000
MAX_ANSWERED = 100_000  # points in one answer, which takes about 0.1 s to encode


class Curve(BaseModel):
    """The points of one result of one trainer, in columns. A value that JSON cannot express is null."""

    round: list[Round]
    at: list[float]  # seconds since 1970
    value: list[float | None]


class CurveList(BaseModel):
    """The curves of the newest run, by name and rank."""

    run: str
    curves: dict[str, ByOrdinal[Curve]]


class Curves:
    """The curves of the newest run: one for each trainer and result."""

    def __init__(self) -> None:
        self._run = ""
        self._points: dict[tuple[str, Rank], list[tuple[Round, float, float]]] = {}

    def add(self, run: str, rank: Rank, round_: Round, results: Mapping[str, float]) -> None:
        """Add the results of a heartbeat."""
        if run != self._run:
            self._run = run
            self._points.clear()
        for name, value in results.items():
            points = self._points.get((name, rank))
            if points is None:
                if len(self._points) >= MAX_CURVES:
                    continue
                points = self._points[name, rank] = []
            if points and points[-1][0] >= round_:
                if points[-1][0] == round_:
                    continue
                del points[_first_after(points, round_) :]  # a rollback
            points.append((round_, time.time(), value))
            if len(points) > MAX_POINTS:
                del points[1:-1:2]

    def describe(self, max_points: int = MAX_POINTS) -> dict[str, Any]:
        """Return the curves by name and rank, evenly thinned out to at most `max_points` points.

        With many curves each has fewer points, so that the answer has at most `MAX_ANSWERED`.
        """
        max_points = min(max_points, MAX_ANSWERED // max(1, len(self._points)))
        curves: dict[str, dict[Rank, dict[str, list[float]]]] = {}
        for (name, rank), points in sorted(self._points.items()):
            rounds, times, values = zip(*_thin_out(points, max_points), strict=True)
            curves.setdefault(name, {})[rank] = {"round": list(rounds), "at": list(times), "value": list(values)}
        return {"run": self._run, "curves": curves}


def _thin_out(points: list[tuple[Round, float, float]], most: int) -> list[tuple[Round, float, float]]:
    if len(points) <= most:
        return points
    return [points[i * (len(points) - 1) // (most - 1)] for i in range(most)]


def _first_after(points: list[tuple[Round, float, float]], round_: Round) -> int:
    return next((i for i, (there, _, _) in enumerate(points) if there >= round_), len(points))
