"""The standbys of one run of a pserver with durability `replicated`, and the updates that each of them holds.

    requests for updates ──► in time: connected ──► required ──► caught up
             ▲                         │ late, or it disconnects
             └───── not connected ◄────┘

An update is acknowledged once every required standby has confirmed it. No clock decides about that: times only decide
which standbys are reported to the coordinator as connected. The coordinator decides which ones are required.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from ps_protocol.errors import Ended, RoundPending
from ps_protocol.fields import Instance
from ps_protocol.membership import InstallRun, RequiredStandbys
from ps_protocol.standbys import SeenStandbys
from ps_protocol.vocabulary import PserverIndex, Round
from services.runtime.logs import get_logger

from ..durable.update_log import UpdateLog

LATE_SECONDS = 2.0  # for which an update may wait for a standby that counts as connected
STUCK_SECONDS = 5.0  # after which it waits for lost standbys that are not removed: see `replica_loss`
PROMPT_SECONDS = 0.5  # between an update and its confirmation by a standby that may become a required one
CATCH_UP_SECONDS = 0.25  # for which an update waits for a standby that catches up
JOINING_SECONDS = 60.0  # after the first request of a standby, in which updates wait for it to catch up
BACKOFF_SECONDS = 4.0  # before a standby that is late for the second time may become a required one, then doubled
MAX_BACKOFF_SECONDS = 300.0
STEADY_SECONDS = 600.0  # after which a late standby is late for the first time again

log = get_logger()


@dataclass(slots=True, eq=False)
class StandbyProgress:
    """The requests of one standby for updates, and the newest round that it has confirmed with them."""

    instance: Instance
    target: Round  # once it is confirmed, the standby has needed the time since `target_since`
    target_since: float
    begin: Round  # the first confirmed round, which a copy may contain
    held: Round
    is_prompt: bool = False  # it confirms updates in time
    num_requests: int = 0


class StandbyConfirmations:
    """The required standbys of one run, and all that ask for its updates. Lives on the event loop."""

    def __init__(
        self,
        installed: InstallRun,
        index: PserverIndex,
        first: Round,
        updates: UpdateLog,
        report: Callable[[], None],
    ) -> None:
        """`first` is the round that the run begins with. `report` is called when `describe` changes."""
        self._index = index
        self._updates = updates
        self._patience_seconds = installed.patience_seconds
        # A rollback may go back this many rounds, which a standby must have received behind its copy of the shard.
        self._num_restorable = 1 + installed.consistency.max_delay
        self.required = required = installed.required
        self.acknowledged: Round = 0  # version 0 is no update
        self.first = first
        self._report = report
        self._progress: dict[Instance, StandbyProgress] = {}
        self._joins_until: dict[Instance, float] = {}
        self._backoffs: dict[Instance, tuple[float, float]] = {}  # of standbys that were late: seconds, and until when
        self._awaited = set(required.instances)  # they count as connected until they are late: the run has just begun
        self._change: asyncio.Future[None] | None = None  # for the waiting tasks
        self._stalled: tuple[Round, float] | None = None  # an update that requests wait for, and since when
        self._described = self.describe()

    def __repr__(self) -> str:
        standbys = ", ".join(f"{standby.instance[:8]}: {standby.held}" for standby in self._progress.values())
        return f"<StandbyConfirmations [round {self.acknowledged} acknowledged | {standbys or 'no standbys'}]>"

    # ------------------------------------------------------------------ events

    def require(self, required: RequiredStandbys) -> None:
        """Require another set of standbys, unless it is not newer than the known one."""
        if required.number > self.required.number:
            self.required = required
            self._awaited.intersection_update(required.instances)
            for instance in required.instances:
                self._joins_until.pop(instance, None)
            self._note_change()

    def confirm(self, instance: Instance, round_: Round) -> int:
        """Count a confirmation of all updates up to a round: the request of a standby for those behind it.

        Returns the number of the request, for `remove`.
        """
        now = asyncio.get_running_loop().time()
        standby = self._progress.get(instance)
        if standby is None:
            self._progress[instance] = standby = StandbyProgress(instance, self._newest, now, round_, round_)
            self._joins_until.setdefault(instance, now + JOINING_SECONDS)
        standby.num_requests += 1
        standby.held = max(standby.held, round_)
        _, until = self._backoffs.get(instance, (0.0, 0.0))
        has_received = standby.held >= standby.begin + self._num_restorable
        may_join = instance in self.required.instances or (has_received and now >= until)
        if standby.held >= standby.target:
            is_in_time = standby.held >= self._newest or now - standby.target_since <= PROMPT_SECONDS
            standby.is_prompt |= is_in_time and may_join
            standby.target, standby.target_since = self._newest, now
        self._note_change()
        return standby.num_requests

    def remove(self, instance: Instance, request: int) -> None:
        """Remove a standby whose connection has ended, unless a later request has arrived. It must confirm again."""
        standby = self._progress.get(instance)
        if standby is not None and standby.num_requests == request:
            del self._progress[instance]
            self._awaited.discard(instance)
            self._note_change()

    def note_late(self, round_: Round, *, is_stuck: bool) -> None:
        """Count the required standbys that have not confirmed a round as not connected until they confirm in time.

        If the round `is_stuck`, the others that hold it may become required ones: there is no later one to receive.
        """
        for instance in self.find_missing(round_):
            self._awaited.discard(instance)
            if (standby := self._progress.get(instance)) is not None and standby.is_prompt:
                standby.is_prompt = False
                standby.target, standby.target_since = self._newest, asyncio.get_running_loop().time()
                self._back_off(instance, standby.target_since)
        for standby in self._progress.values():
            standby.is_prompt |= is_stuck and standby.held >= round_
        self._note_change(wakes=False)

    def _back_off(self, instance: Instance, now: float) -> None:
        """Let a standby that is late again wait before it may become a required one again."""
        seconds, until = self._backoffs.get(instance, (0.0, 0.0))
        is_again = instance in self._backoffs and now < until + STEADY_SECONDS
        seconds = min(max(2 * seconds, BACKOFF_SECONDS), MAX_BACKOFF_SECONDS) if is_again else 0.0
        self._backoffs[instance] = seconds, now + seconds
        if is_again:
            text = "a standby confirms updates late again and again; look at its disk, network and CPU"
            log.warning(text, standby=instance, not_in_sync_seconds=seconds)

    # ------------------------------------------------------------------ waiting

    @property
    def _newest(self) -> Round:
        """The newest round that this pserver, or an earlier incarnation of it, may have acknowledged."""
        return max(self.acknowledged, self.first)

    @property
    def newest_logged(self) -> Round:
        """The round of the newest update in the log."""
        newest = self._updates.tail
        return self.first if newest is None else newest.round

    def find_missing(self, round_: Round) -> list[Instance]:
        """Return the required standbys that have not confirmed a round."""
        held = {instance for instance, standby in self._progress.items() if standby.held >= round_}
        return [instance for instance in self.required.instances if instance not in held]

    def describe_missing(self) -> str:
        """Return what the newest update waits for, as text: empty if every required standby has confirmed it."""
        return f"a standby in sync with pserver {self._index}" if self.find_missing(self.newest_logged) else ""

    def acknowledge(self, round_: Round) -> bool:
        """Return whether the update of a round may be acknowledged, from now on also to standbys that join later."""
        if round_ > self.acknowledged:
            if self.find_missing(round_):
                return False
            self.acknowledged = round_
        if self._stalled is not None and self._stalled[0] <= self.acknowledged:
            self._stalled = None
        return True

    def note_wait(self, round_: Round) -> float:
        """Return the time since which an update has waited for standbys: this one, or one before that still waits.

        A request may be repeated meanwhile.
        """
        if self._stalled is None or not self.find_missing(self._stalled[0]):
            self._stalled = round_, asyncio.get_running_loop().time()
        return self._stalled[1]

    async def wait_until_held(self, round_: Round | None, wait_seconds: float, check: Callable[[], None]) -> None:
        """Wait until every required standby holds a round, by default the newest logged one.

        Raises the errors of `check`, RoundPending after `wait_seconds`, and Ended (`standby_lost`) once requests have
        waited for `patience_seconds`.
        """
        if round_ is None:
            round_ = self.newest_logged
        loop, limit = asyncio.get_running_loop(), self._patience_seconds
        began = loop.time()
        while not self.acknowledge(round_):
            check()
            waited, stalled = loop.time() - began, loop.time() - self.note_wait(round_)
            if stalled >= limit:
                text = f"round {round_} waited {limit:g} s for {self.describe_missing()}"
                raise Ended(text, code="standby_lost", round=round_)
            if waited >= wait_seconds:
                raise RoundPending(f"round {round_} waits for {self.describe_missing()}", missing=[], round=round_)
            if stalled >= LATE_SECONDS:
                self.note_late(round_, is_stuck=stalled >= STUCK_SECONDS)
            next_check = min(seconds for seconds in (LATE_SECONDS, STUCK_SECONDS, limit) if seconds > stalled)
            await self.wait_for_change(min(next_check - stalled, wait_seconds - waited))

    async def wait_for_change(self, seconds: float) -> None:
        """Wait until confirmations or requirements change, the run ends, or `seconds` have passed."""
        if self._change is None:
            self._change = asyncio.get_running_loop().create_future()
        await asyncio.wait([self._change], timeout=seconds)

    async def wait_for_joining(self, round_: Round) -> None:
        """Wait at most `CATCH_UP_SECONDS` for standbys that are not required yet to confirm the round before this one.

        Otherwise a standby that is slower than this pserver would never catch up.
        """
        loop = asyncio.get_running_loop()
        now = loop.time()
        until = now + CATCH_UP_SECONDS
        while now < until and any(self._is_behind(standby, round_ - 1, now) for standby in self._progress.values()):
            await self.wait_for_change(until - now)
            now = loop.time()

    def _is_behind(self, standby: StandbyProgress, round_: Round, now: float) -> bool:
        is_joining = standby.instance not in self.required.instances and now < self._joins_until.get(
            standby.instance, 0.0
        )
        return is_joining and standby.held < round_

    def wake(self) -> None:
        """Make every waiting task check its condition again."""
        change, self._change = self._change, None
        if change is not None:
            change.set_result(None)

    # ------------------------------------------------------------------ reports

    def describe(self) -> SeenStandbys:
        """Return the standbys as the coordinator needs to know them."""
        held = {instance: standby.held for instance, standby in self._progress.items() if standby.is_prompt}
        caught_up = (instance for instance in self.required.instances if held.get(instance, -1) >= self._newest)
        return SeenStandbys(
            number=self.required.number,
            connected=tuple(sorted(held.keys() | self._awaited)),
            caught_up=tuple(sorted(caught_up)),
        )

    def _note_change(self, *, wakes: bool = True) -> None:
        if wakes:
            self.wake()
        if (described := self.describe()) != self._described:
            self._described = described
            self._report()
