"""What trainers report while they train, as curves: kept in memory, thinned out when there are many points."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from ps_protocol.fields import ByOrdinal
from ps_protocol.vocabulary import Rank, Round

MAX_POINTS = 1000  # of one curve; of more every second one is dropped
MAX_CURVES = 1000
MAX_ANSWERED = 100_000  # points in one answer, which is made in about 0.1 s


class Curve(BaseModel):
    """The points of one number that one trainer reports, in columns; a value that JSON has no word for is null."""

    round: list[Round]
    at: list[float]  # seconds since 1970
    value: list[float | None]


class CurveList(BaseModel):
    """The curves of the newest run, by name and rank."""

    run: str
    curves: dict[str, ByOrdinal[Curve]]


class Curves:
    """One for each trainer and name of a number, of the newest run."""

    def __init__(self) -> None:
        self._run = ""
        self._points: dict[tuple[str, Rank], list[tuple[Round, float, float]]] = {}

    def add(self, run: str, rank: Rank, round_: Round, results: Mapping[str, float]) -> None:
        """A heartbeat of a trainer has brought these numbers."""
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
                del points[_first_after(points, round_) :]  # the run went back
            points.append((round_, time.time(), value))
            if len(points) > MAX_POINTS:
                del points[1:-1:2]

    def describe(self, max_points: int = MAX_POINTS) -> dict[str, Any]:
        """By name and rank; each curve in three columns: rounds, seconds since 1970, values; evenly thinned out.

        A curve has at most `max_points`, and fewer if there are so many curves that all are more than `MAX_ANSWERED`.
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
