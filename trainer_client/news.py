"""What a trainer and the coordinator tell each other while training goes on: who is where, and who cannot be reached.

Requests to pservers that meet a closed door wait here for news instead of giving up: a pserver may come back at another
address in another life, and the whole run may go back to an earlier round.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from ps_protocol.messages import PserverInfo, TrainerHeartbeatReply
from ps_protocol.vocabulary import Incarnation, PserverIndex, Rank, Round

MIN_PERIOD_SECONDS = 0.2  # between two heartbeats, however much somebody wants news: many trainers want it at once


@dataclass
class News:
    """Lives on the I/O loop."""

    attempt: int = 0  # of the run, as far as this trainer has followed it
    newest_attempt: int = 0
    resume: Round = 0  # the version that the newest attempt began with
    uploader: Rank | None = None  # who pushes that version, if it is on no disk
    pservers: dict[PserverIndex, PserverInfo] = field(default_factory=dict)
    failing: dict[PserverIndex, tuple[Incarnation, float]] = field(default_factory=dict)  # since when, by the loop
    pages: dict[PserverIndex, str] = field(default_factory=dict)  # what answers instead of those that are failing
    ahead_of: dict[PserverIndex, Incarnation] = field(default_factory=dict)
    heard_at: float | None = None  # when the coordinator answered last
    _waiting: dict[PserverIndex, set[asyncio.Timeout]] = field(default_factory=dict)
    _wanted: asyncio.Event = field(default_factory=asyncio.Event)
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    def update(self, reply: TrainerHeartbeatReply, now: float) -> None:
        """The coordinator has answered a heartbeat."""
        self.heard_at = now
        self.newest_attempt, self.resume, self.uploader = reply.attempt, reply.resume, reply.uploader
        for info in reply.pservers:
            known = self.pservers.get(info.index)
            if known is None or info.incarnation >= known.incarnation:  # never an older life again
                self.pservers[info.index] = info
            if known is not None and info.incarnation > known.incarnation:
                for limit in self._waiting.get(info.index, ()):
                    if not limit.expired():
                        limit.reschedule(now)  # the older life may be silent for long: paused, or its machine gone

    @contextlib.contextmanager
    def waiting_for(self, index: PserverIndex, limit: asyncio.Timeout) -> Iterator[None]:
        """In this block an answer of the pserver is waited for: `limit` ends when another life has taken its place."""
        waiting = self._waiting.setdefault(index, set())
        waiting.add(limit)
        try:
            yield
        finally:
            waiting.discard(limit)

    def has_recent_heartbeat(self, now: float, seconds: float) -> bool:
        """Whether the coordinator has answered within the last seconds, so that it decides how long to wait."""
        return self.heard_at is not None and now - self.heard_at < seconds

    def unreachable(self, now: float) -> dict[PserverIndex, tuple[Incarnation, float]]:
        """Those that do not answer, and for how long."""
        return {index: (incarnation, now - since) for index, (incarnation, since) in self.failing.items()}

    def mark_reachable(self, index: PserverIndex) -> None:
        """This pserver can be reached, or another incarnation has taken its place."""
        self.failing.pop(index, None)
        self.pages.pop(index, None)

    def adopt_newest_attempt(self) -> None:
        """This trainer has gone back to where the newest attempt began."""
        self.attempt = self.newest_attempt
        self.ahead_of.clear()

    async def wait_for_next_heartbeat(self, period: float) -> None:
        """Wait for the time of the next heartbeat, which comes sooner if somebody wants news; tells who waited."""
        async with self._changed:
            self._changed.notify_all()
        await asyncio.sleep(min(MIN_PERIOD_SECONDS, period))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wanted.wait(), max(0.0, period - MIN_PERIOD_SECONDS))
        self._wanted.clear()

    async def wait_for_heartbeat(self, seconds: float) -> None:
        """Ask for a heartbeat now, and wait for its end, up to some seconds."""
        self._wanted.set()
        async with self._changed:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):  # `wait_for` before 3.12 would wait in another task, for this lock
                    await self._changed.wait()
