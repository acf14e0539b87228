"""The rates of the newest attempt, and the curves of reported results, in memory."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from ps_protocol.fields import ByOrdinal
from ps_protocol.messages import PserverHeartbeat, PserverLoad, TrainerHeartbeat
from ps_protocol.vocabulary import Incarnation, PserverIndex, Rank, Round

from .cluster import Cluster

WINDOW_SECONDS = 5.0  # of a rate: heartbeats come once a second, each with a whole number
SAMPLE_SECONDS = 1.0
MAX_SAMPLES = 300  # of the run; older ones are dropped


@dataclass(frozen=True, slots=True)
class PserverReport:
    """The content of a pserver's heartbeat."""

    at: float  # by the monotonic clock
    wall: float  # seconds since 1970
    incarnation: Incarnation
    round: Round
    missing: tuple[Rank, ...]
    waiting_seconds: float
    load: PserverLoad


@dataclass(frozen=True, slots=True)
class Sample:
    """The progress of the run: rounds that all pservers have applied, and the steps of all trainers."""

    at: float
    wall: float
    rounds: int
    steps: int
    rounds_per_second: float | None  # None for the first sample
    steps_per_second: float | None


@dataclass(slots=True)
class ActivityLog:
    """The heartbeats of the newest attempt. Used on the event loop alone."""

    samples: deque[Sample] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES))
    pservers: dict[PserverIndex, deque[PserverReport]] = field(default_factory=dict)
    trainers: dict[Rank, deque[tuple[float, Round]]] = field(default_factory=dict)
    _of: tuple[str, int] = ("", 0)

    def record_pserver(self, cluster: Cluster, index: PserverIndex, message: PserverHeartbeat, now: float) -> None:
        """Record an accepted heartbeat of a pserver."""
        self._sample(cluster, now)
        if message.load is None or (message.run, message.attempt) != self._of:
            return
        heard = self.pservers.setdefault(index, deque())
        if heard and heard[-1].incarnation != message.incarnation:
            heard.clear()  # its counters begin with 0
        state = message.round, message.missing, message.waiting_seconds
        heard.append(PserverReport(now, time.time(), message.incarnation, *state, message.load))
        while heard[0].at < now - WINDOW_SECONDS:
            heard.popleft()

    def record_trainer(self, cluster: Cluster, rank: Rank, message: TrainerHeartbeat, now: float) -> None:
        """Record an accepted heartbeat of a trainer."""
        self._sample(cluster, now)
        steps = self.trainers.setdefault(rank, deque())
        if steps and steps[-1][1] > message.round:
            steps.clear()  # a new incarnation, or a rollback
        steps.append((now, message.round))
        while steps[0][0] < now - WINDOW_SECONDS:
            steps.popleft()

    def _sample(self, cluster: Cluster, now: float) -> None:
        run = cluster.run
        if (run.name, run.attempt) != self._of:
            self._of = run.name, run.attempt
            self.samples.clear()
            self.pservers.clear()
            self.trainers.clear()
        if run.state != "training" or (self.samples and now - self.samples[-1].at < SAMPLE_SECONDS):
            return
        rounds = min(cluster.rounds, default=0)
        steps = sum(trainer.round for trainer in run.trainers.values())
        first = next((old for old in self.samples if old.at >= now - WINDOW_SECONDS), None)
        rates = (
            (None, None)
            if first is None
            else (rate(first.rounds, rounds, first.at, now), rate(first.steps, steps, first.at, now))
        )
        self.samples.append(Sample(now, time.time(), rounds, steps, *rates))


def rate(before: float, after: float, since: float, until: float) -> float | None:
    """Return the growth per second; None without a duration. A decrease counts as no growth.

    >>> rate(10, 25, 100.0, 105.0), rate(10, 10, 3.0, 3.0), rate(10, 4, 1.0, 2.0)
    (3.0, None, 0.0)
    """
    return max(after - before, 0.0) / (until - since) if until > since else None


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
