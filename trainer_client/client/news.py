"""State of the cluster that a trainer's heartbeats bring: addresses, incarnations, and rollbacks.

A request without an answer waits here for the next heartbeat, because the pserver may restart at another address, and
the run may go back to an earlier round.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from ps_protocol.messages import PserverInfo, TrainerHeartbeatReply
from ps_protocol.vocabulary import Incarnation, PserverIndex, Rank, Round

MIN_PERIOD_SECONDS = 0.2  # between two heartbeats: many trainers may request one at the same time


class Waits:
    """The waits of this loop that an event may end early. A wait ends by its time-out, which needs no further task."""

    def __init__(self) -> None:
        self._limits: set[asyncio.Timeout] = set()

    @contextlib.contextmanager
    def add(self, limit: asyncio.Timeout) -> Iterator[None]:
        """Let `end_all` end this time-out until the block is left."""
        self._limits.add(limit)
        try:
            yield
        finally:
            self._limits.discard(limit)

    def end_all(self) -> None:
        """Let all waits time out now."""
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(asyncio.get_running_loop().time())


class Attempt(NamedTuple):
    """An attempt of the run. A rollback begins the next one."""

    number: int = 0
    base_round: Round = 0  # the version that the attempt began with; its first round follows
    uploader: Rank | None = None  # the trainer that pushes that version, if it is on no disk


@dataclass
class News:
    """The newest known state of the cluster. Lives on the I/O loop."""

    attempt: Attempt = field(default_factory=Attempt)  # the attempt that this trainer takes part in
    newest_attempt: Attempt = field(default_factory=Attempt)
    pservers: dict[PserverIndex, PserverInfo] = field(default_factory=dict)
    failing: dict[PserverIndex, tuple[Incarnation, float]] = field(default_factory=dict)  # since when, by the loop
    pages: dict[PserverIndex, str] = field(default_factory=dict)  # answers of gateways instead of a failing pserver
    ahead_of: dict[PserverIndex, Incarnation] = field(default_factory=dict)  # incarnations that have lost rounds
    heard_at: float | None = None  # the time of the coordinator's newest answer
    waits: defaultdict[PserverIndex, Waits] = field(
        default_factory=lambda: defaultdict(Waits)
    )  # for answers of a pserver
    _wanted: asyncio.Event = field(default_factory=asyncio.Event)
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    def update(self, reply: TrainerHeartbeatReply, now: float) -> None:
        """Update the state from the coordinator's answer to a heartbeat."""
        self.heard_at = now
        self.newest_attempt = Attempt(reply.attempt, reply.resume, reply.uploader)
        for info in reply.pservers:
            known = self.pservers.get(info.index)
            if known is None or info.incarnation >= known.incarnation:  # an older incarnation never comes back
                self.pservers[info.index] = info
            if known is not None and info.incarnation > known.incarnation:
                self.waits[info.index].end_all()  # a paused pserver, or a lost machine, would not answer

    def has_recent_heartbeat(self, now: float, seconds: float) -> bool:
        """Return True if the coordinator has answered within the last seconds."""
        return self.heard_at is not None and now - self.heard_at < seconds

    def unreachable(self, now: float) -> dict[PserverIndex, tuple[Incarnation, float]]:
        """Return the pservers that do not answer, and for how many seconds."""
        return {index: (incarnation, now - since) for index, (incarnation, since) in self.failing.items()}

    def mark_unreachable(self, info: PserverInfo, now: float, page: str | None) -> None:
        """Note that this pserver does not answer, since `now` at the latest; `page` is what answered instead."""
        self.failing.setdefault(info.index, (info.incarnation, now))
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

    async def wait_for_next_heartbeat(self, period: float) -> None:
        """Wake the waiting requests, and wait until the next heartbeat is due, or is requested early."""
        async with self._changed:
            self._changed.notify_all()
        await asyncio.sleep(min(MIN_PERIOD_SECONDS, period))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wanted.wait(), max(0.0, period - MIN_PERIOD_SECONDS))
        self._wanted.clear()

    async def wait_for_heartbeat(self, seconds: float) -> None:
        """Request a heartbeat now, and wait for its end, for up to some seconds."""
        self._wanted.set()
        async with self._changed:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):  # `wait_for` before 3.12 would wait in another task, for this lock
                    await self._changed.wait()
