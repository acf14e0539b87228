"""State of the cluster that a trainer's heartbeats bring: addresses, incarnations, and rollbacks.

A request without an answer waits here for the next heartbeat, because the pserver may restart at another address, and
the run may go back to an earlier round.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from ps_protocol.errors import GradpostError
from ps_protocol.messages import PserverInfo, TrainerHeartbeatReply
from ps_protocol.vocabulary import Incarnation, PserverIndex, Rank, Round

from ..transport.work import Signal, Work

MIN_PERIOD_SECONDS = 0.2  # between two heartbeats: many trainers may request one at the same time


class Attempt(NamedTuple):
    """An attempt of the run. A rollback begins the next one."""

    number: int = 0
    base_round: Round = 0  # the version that the attempt began with; its first round follows
    uploader: Rank | None = None  # the trainer that pushes that version, if it is on no disk


@dataclass
class News:
    """The newest known state of the cluster.

    The thread of the heartbeats and that of the requests share it: what one of them writes, the other only reads or
    copies.
    """

    wake: Callable[[], None] = lambda: None  # lets the requests look at the news
    attempt: Attempt = field(default_factory=Attempt)  # the attempt that this trainer takes part in
    newest_attempt: Attempt = field(default_factory=Attempt)
    failure: GradpostError | None = None  # the error that ended the run
    pservers: dict[PserverIndex, PserverInfo] = field(default_factory=dict)
    failing: dict[PserverIndex, tuple[Incarnation, float]] = field(default_factory=dict)  # since when
    pages: dict[PserverIndex, str] = field(default_factory=dict)  # answers of gateways instead of a failing pserver
    ahead_of: dict[PserverIndex, Incarnation] = field(default_factory=dict)  # incarnations that have lost rounds
    heard_at: float | None = None  # the time of the coordinator's newest answer
    _wanted: Signal = field(default_factory=Signal)
    _num_heartbeats: int = 0  # that have ended

    def update(self, reply: TrainerHeartbeatReply) -> None:
        """Update the state from the coordinator's answer to a heartbeat."""
        self.heard_at = time.monotonic()
        self.newest_attempt = Attempt(reply.attempt, reply.resume, reply.uploader)
        for info in reply.pservers:
            known = self.pservers.get(info.index)
            if known is None or info.incarnation >= known.incarnation:  # an older incarnation never comes back
                self.pservers[info.index] = info

    def fail(self, error: GradpostError) -> None:
        """End all requests with this error; the first one counts."""
        if self.failure is None:
            for index, page in self.pages.copy().items():
                error.detail += f"; another program answers instead of pserver {index}: {page}"
            self.failure = error
            self.wake()

    def check_failure(self) -> None:
        """Raise the error that ended the run, if there is one: every caller its own, with its own traceback."""
        if self.failure is not None:
            raise copy.copy(self.failure) from self.failure.__cause__

    def has_newer(self, info: PserverInfo) -> bool:
        """Return True if a newer incarnation of this pserver is known: the older one may be silent for ever."""
        newest = self.pservers.get(info.index)
        return newest is not None and newest.incarnation > info.incarnation

    def has_recent_heartbeat(self, seconds: float) -> bool:
        """Return True if the coordinator has answered within the last seconds."""
        return self.heard_at is not None and time.monotonic() - self.heard_at < seconds

    def unreachable(self) -> dict[PserverIndex, tuple[Incarnation, float]]:
        """Return the pservers that do not answer, and for how many seconds."""
        now = time.monotonic()
        return {index: (incarnation, now - since) for index, (incarnation, since) in self.failing.copy().items()}

    def mark_unreachable(self, info: PserverInfo, page: str | None) -> None:
        """Note that this pserver does not answer, since now at the latest; `page` is what answered instead."""
        self.failing.setdefault(info.index, (info.incarnation, time.monotonic()))
        if page is not None:
            self.pages[info.index] = page

    def mark_reachable(self, index: PserverIndex) -> None:
        """Note that this pserver has answered, or has restarted."""
        self.failing.pop(index, None)
        self.pages.pop(index, None)

    def adopt_newest_attempt(self) -> Attempt:
        """Note that this trainer has gone back to the start of the newest attempt, and return it."""
        self.attempt = self.newest_attempt
        self.ahead_of.clear()
        return self.attempt

    def wait_until_heartbeat_is_due(self, period: float, leaving: Signal) -> None:
        """Wake the waiting requests, and wait until the next heartbeat is due, or is requested early, or the last."""
        self._num_heartbeats += 1
        self.wake()
        if not leaving.wait(min(MIN_PERIOD_SECONDS, period)):
            self._wanted.wait(max(0.0, period - MIN_PERIOD_SECONDS))

    def request_heartbeat(self) -> None:
        """Let the next heartbeat be due at once."""
        self._wanted.set()

    def wait_for_heartbeat(self, seconds: float) -> Work[None]:
        """Request a heartbeat now, and wait for its end, for up to some seconds."""
        self.request_heartbeat()
        before, due = self._num_heartbeats, time.monotonic() + seconds
        while self._num_heartbeats == before and time.monotonic() < due:
            yield due
