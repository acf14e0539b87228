"""How fast everybody is and what they do just now, from what heartbeats bring; minutes of it, kept in memory."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from ps_protocol.messages import PserverHeartbeat, PserverLoad, TrainerHeartbeat
from ps_protocol.vocabulary import Incarnation, PserverIndex, Rank, Round

from .cluster import Cluster

WINDOW_SECONDS = 5.0  # that rates are taken over: heartbeats come once a second, and each brings a whole number
SAMPLE_SECONDS = 1.0
MAX_SAMPLES = 300  # of the whole run; older ones are forgotten


@dataclass(frozen=True, slots=True)
class Heard:
    """What a heartbeat of a pserver has said."""

    at: float  # by the monotonic clock
    wall: float  # the same since 1970
    incarnation: Incarnation
    round: Round
    missing: tuple[Rank, ...]
    waiting_seconds: float
    load: PserverLoad


@dataclass(frozen=True, slots=True)
class Sample:
    """How far the run was: rounds that every pserver has, and the steps of all trainers together."""

    at: float
    wall: float
    rounds: int
    steps: int
    rounds_per_second: float | None  # None for the first of a row
    steps_per_second: float | None


@dataclass(slots=True)
class ActivityLog:
    """Of the newest attempt of the newest run. Lives on the event loop; the handlers of heartbeats tell it."""

    samples: deque[Sample] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES))
    pservers: dict[PserverIndex, deque[Heard]] = field(default_factory=dict)
    trainers: dict[Rank, deque[tuple[float, Round]]] = field(default_factory=dict)
    _of: tuple[str, int] = ("", 0)

    def pserver_heard(self, cluster: Cluster, index: PserverIndex, message: PserverHeartbeat, now: float) -> None:
        """A pserver's heartbeat was accepted."""
        self._look(cluster, now)
        if message.load is None or (message.run, message.attempt) != self._of:
            return
        heard = self.pservers.setdefault(index, deque())
        if heard and heard[-1].incarnation != message.incarnation:
            heard.clear()  # it counts from 0 again
        state = message.round, message.missing, message.waiting_seconds
        heard.append(Heard(now, time.time(), message.incarnation, *state, message.load))
        while heard[0].at < now - WINDOW_SECONDS:
            heard.popleft()

    def trainer_heard(self, cluster: Cluster, rank: Rank, message: TrainerHeartbeat, now: float) -> None:
        """A trainer's heartbeat was accepted."""
        self._look(cluster, now)
        steps = self.trainers.setdefault(rank, deque())
        if steps and steps[-1][1] > message.round:
            steps.clear()  # another life of it, or the run went back
        steps.append((now, message.round))
        while steps[0][0] < now - WINDOW_SECONDS:
            steps.popleft()

    def _look(self, cluster: Cluster, now: float) -> None:
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
    """By how much something grows in a second; None if that cannot be told. What went back has not grown.

    >>> rate(10, 25, 100.0, 105.0), rate(10, 10, 3.0, 3.0), rate(10, 4, 1.0, 2.0)
    (3.0, None, 0.0)
    """
    return max(after - before, 0.0) / (until - since) if until > since else None
