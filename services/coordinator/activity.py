"""The activity of the newest attempt, and the curves of reported results, from heartbeats, in memory."""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import pairwise
from operator import attrgetter
from typing import Any

from pydantic import BaseModel, Field

from ps_protocol.fields import ByOrdinal, Mean, Message
from ps_protocol.messages import PserverHeartbeat, PserverLoad, TrainerHeartbeat
from ps_protocol.vocabulary import Mode, PserverIndex, Rank, Round

from .state.cluster import Cluster
from .state.run import Run
from .state.status import copy_fields

WINDOW_SECONDS = 5.0  # of a rate: heartbeats come once a second, each with a whole number
SAMPLE_SECONDS = 1.0
MAX_SAMPLES = 300  # of the run; older ones are dropped
LATE_SECONDS = 2.0  # heartbeats come once a second
MAX_POINTS = 1000  # of one curve; beyond it neighbours are merged in pairs
MAX_CURVES = 1000
MAX_ANSWERED = 100_000  # points in one answer, which takes about 0.1 s to encode


@dataclass(frozen=True, slots=True)
class PserverReport:
    """A heartbeat of a pserver with its time: by the monotonic clock, and in seconds since 1970."""

    at: float
    wall: float
    heartbeat: PserverHeartbeat
    load: PserverLoad


@dataclass(frozen=True, slots=True)
class Sample:
    """The progress of the run: rounds that all pservers have applied, and the steps of all trainers."""

    at: float
    wall: float
    rounds: int
    steps: int
    rounds_per_second: float | None = None  # None for the first sample
    steps_per_second: float | None = None


class Rates(Message):
    """One sample a second of the newest five minutes, in columns; null for the first sample."""

    at: tuple[float, ...] = Field(description="times of the samples, in seconds since 1970")
    rounds_per_second: tuple[float | None, ...]
    steps_per_second: tuple[float | None, ...] = Field(description="sum over all trainers")


class Barrier(Message):
    """The barrier with the longest wait, at a pserver or in the ring."""

    pserver: PserverIndex | None = Field(description="pserver of the barrier; null for the barrier of a ring")
    round: Round
    arrived: tuple[Rank, ...]
    missing: tuple[Rank, ...]
    waiting_since: float = Field(description="beginning of the wait, in seconds since 1970")


class PserverActivity(Message):
    """The activity of one pserver. Rates and means are over the newest five seconds; a mean without values is null."""

    index: PserverIndex
    round: Round
    num_blocks: int
    shard_bytes: int
    num_queued: int
    pushed_bytes: int
    pulled_bytes: int
    pushed_bytes_per_second: float | None
    pulled_bytes_per_second: float | None
    apply_seconds: float | None
    wait_seconds: float | None


class TrainerActivity(Message):
    """The activity of one trainer that sent a heartbeat in this run."""

    rank: Rank
    steps: Round
    steps_per_second: float | None
    has_contributed: bool = Field(
        description="whether the trainer contributed to the newest round, or in async modes in the newest five seconds"
    )
    steps_behind: int | None = Field(description="steps behind the fastest trainer; null in the synchronous mode")


class Activity(Message):
    """The answer of `GET /v1/activity`, which is made from heartbeats and at most a second old."""

    run: str
    attempt: int
    mode: Mode
    at: float = Field(description="time of the answer, in seconds since 1970, by the coordinator's clock")
    round: Round
    participants: tuple[Rank, ...] = Field(
        description="trainers with a contribution to the newest round; empty in asynchronous modes"
    )
    rounds_per_second: float | None
    steps_per_second: float | None
    remaining_seconds: float | None = Field(
        description="time until the slowest trainer has taken its steps at the present speed; null if not known"
    )
    rates: Rates
    barrier: Barrier | None = Field(description="incomplete barrier with the longest wait; null if there is none")
    pservers: tuple[PserverActivity, ...]
    trainers: tuple[TrainerActivity, ...]
    staleness: tuple[tuple[float | None, int], ...] = Field(
        description="asynchronous modes: upper bounds (null for the last) and the updates up to each"
    )


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
        reports = self.pservers.setdefault(index, deque())
        if reports and reports[-1].heartbeat.incarnation != message.incarnation:
            reports.clear()  # its counters begin with 0
        reports.append(PserverReport(now, time.time(), message, message.load))
        while reports[0].at < now - WINDOW_SECONDS:
            reports.popleft()

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
        if run.record.attempt_id != self._of:
            self._of = run.record.attempt_id
            self.samples.clear()
            self.pservers.clear()
            self.trainers.clear()
        if run.record.state != "training" or (self.samples and now - self.samples[-1].at < SAMPLE_SECONDS):
            return
        rounds = min(cluster.rounds, default=0)
        steps = sum(report.round for report in run.reports.values())
        first = next((old for old in self.samples if old.at >= now - WINDOW_SECONDS), Sample(now, 0.0, 0, 0))
        rates = rate(first.rounds, rounds, first.at, now), rate(first.steps, steps, first.at, now)
        self.samples.append(Sample(now, time.time(), rounds, steps, *rates))

    def describe(self, cluster: Cluster, now: float, wall: float) -> Activity:
        """Return the activity. `wall` is the time since 1970 at `now`."""
        run, living = cluster.run, cluster.registry.members
        newest = {index: reports[-1] for index, reports in sorted(self.pservers.items()) if index in living}
        last = self.samples[-1] if self.samples and run.record.state == "training" else None
        furthest = max(newest.values(), key=lambda report: report.heartbeat.round, default=None)
        round_ = furthest.heartbeat.round if furthest else 0
        participants = furthest.load.participants if furthest else ()
        barrier = _find_barrier(newest)
        if run.settings.consistency.is_ring:
            round_ = run.highest_round
            with_batches = (rank for rank, report in sorted(run.reports.items()) if not report.heartbeat.is_done)
            participants = (
                tuple(rank for rank in with_batches if rank in run.record.membership.members) if round_ else ()
            )
            barrier = _find_ring_barrier(run, now, wall)
        trainers = self._describe_trainers(run, list(newest.values()), participants, now)
        return Activity(
            run=run.record.name,
            attempt=run.record.attempt,
            mode=run.settings.mode,
            at=wall,
            round=round_,
            participants=participants,
            rounds_per_second=last.rounds_per_second if last else None,
            steps_per_second=last.steps_per_second if last else None,
            remaining_seconds=_remaining_seconds(run, trainers),
            rates=Rates(
                at=tuple(round(sample.wall, 3) for sample in self.samples),
                rounds_per_second=tuple(_round_rate(sample.rounds_per_second) for sample in self.samples),
                steps_per_second=tuple(_round_rate(sample.steps_per_second) for sample in self.samples),
            ),
            barrier=barrier if run.record.state == "training" else None,
            pservers=tuple(_describe_pserver(index, self.pservers[index]) for index in newest),
            trainers=trainers,
            staleness=_add_staleness(list(newest.values())),
        )

    def _describe_trainers(
        self, run: Run, newest: Sequence[PserverReport], participants: Sequence[Rank], now: float
    ) -> tuple[TrainerActivity, ...]:
        is_async = run.settings.consistency.is_async
        steps = {rank: report.round for rank, report in sorted(run.reports.items())}
        for report in newest:  # a pserver may know a step before the trainer's next heartbeat
            for rank, clock in report.load.clocks.items():
                steps[rank] = max(steps.get(rank, 0), clock)
        fastest = max(steps.values(), default=0)
        found = []
        for rank, number in steps.items():
            reported = self.trainers.get(rank)
            speed = None  # also for a silent trainer
            if reported and run.record.state == "training" and reported[-1][0] > now - WINDOW_SECONDS:
                speed = rate(reported[0][1], reported[-1][1], reported[0][0], reported[-1][0])
            found.append(
                TrainerActivity(
                    rank=rank,
                    steps=number,
                    steps_per_second=speed,
                    has_contributed=bool(speed) if is_async else rank in participants,
                    steps_behind=fastest - number if is_async else None,
                )
            )
        return tuple(found)


def rate(before: float, after: float, since: float, until: float) -> float | None:
    """Return the growth per second; None without a duration. A decrease counts as no growth.

    >>> rate(10, 25, 100.0, 105.0), rate(10, 10, 3.0, 3.0), rate(10, 4, 1.0, 2.0)
    (3.0, None, 0.0)
    """
    return max(after - before, 0.0) / (until - since) if until > since else None


def _remaining_seconds(run: Run, trainers: Sequence[TrainerActivity]) -> float | None:
    left = []
    for trainer in trainers:
        report = run.reports.get(trainer.rank)  # a pserver may know a trainer that has sent no heartbeat
        script = report.heartbeat.script if report else None
        if script is not None and script.total_rounds is not None and trainer.steps_per_second:
            left.append(max(0, script.total_rounds - trainer.steps) / trainer.steps_per_second)
    return max(left, default=None)


def _round_rate(rate_: float | None) -> float | None:
    """Round a rate to three decimals, since an answer contains hundreds."""
    return None if rate_ is None else round(rate_, 3)


def _find_barrier(newest: Mapping[PserverIndex, PserverReport]) -> Barrier | None:
    """Return the incomplete barrier with the longest wait."""
    waiting = {index: report for index, report in newest.items() if report.heartbeat.missing}
    if not waiting:
        return None
    index = max(waiting, key=lambda i: waiting[i].heartbeat.waiting_seconds)
    heartbeat = waiting[index].heartbeat
    return Barrier(
        pserver=index,
        round=heartbeat.round + 1,
        arrived=waiting[index].load.batch_barriers,
        missing=heartbeat.missing,
        waiting_since=waiting[index].wall - heartbeat.waiting_seconds,
    )


def _find_ring_barrier(run: Run, now: float, wall: float) -> Barrier | None:
    """Return the barrier of a ring, without trainers that are done or silent."""
    present = {rank: run.reports[rank] for rank in sorted(run.record.members)}
    working = {rank: report for rank, report in present.items() if not report.heartbeat.is_done}
    waiting = {
        rank: report
        for rank, report in working.items()
        if report.heartbeat.waiting_seconds and now - report.seen_at < LATE_SECONDS
    }
    if not waiting:
        return None
    round_ = 1 + max(report.round for report in waiting.values())
    missing = tuple(rank for rank, report in working.items() if rank not in waiting and report.round < round_)
    waited = max(report.heartbeat.waiting_seconds + now - report.seen_at for report in waiting.values())
    if not missing:
        return None
    return Barrier(pserver=None, round=round_, arrived=tuple(waiting), missing=missing, waiting_since=wall - waited)


def _describe_pserver(index: PserverIndex, reports: Sequence[PserverReport]) -> PserverActivity:
    first, last = reports[0], reports[-1]
    a, b = first.load, last.load
    return copy_fields(
        PserverActivity,
        b,
        index=index,
        round=last.heartbeat.round,
        pushed_bytes_per_second=rate(a.pushed_bytes, b.pushed_bytes, first.at, last.at),
        pulled_bytes_per_second=rate(a.pulled_bytes, b.pulled_bytes, first.at, last.at),
        apply_seconds=_mean(b.apply_seconds - a.apply_seconds, b.num_applies - a.num_applies),
        wait_seconds=_mean(b.wait_seconds - a.wait_seconds, b.num_waits - a.num_waits),
    )


def _mean(total: float, number: int) -> float | None:
    return total / number if number else None


def _add_staleness(newest: Sequence[PserverReport]) -> tuple[tuple[float | None, int], ...]:
    counts: dict[float | None, int] = {}
    for report in newest:
        for bound, number in report.load.staleness:
            counts[bound] = counts.get(bound, 0) + number
    return tuple(counts.items()) if any(counts.values()) else ()


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
