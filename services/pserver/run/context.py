"""The part of a run that `Run` and its executor share: the shard, the waits of requests, and their end.

`Run` owns its executor, and both use one `RunContext`, which refers to neither of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from ps_protocol.errors import (
    Ended,
    GradpostError,
    NotReady,
    RoundPending,
    RoundTimeout,
    RunStopped,
    StorageFailed,
    TrainerLost,
)
from ps_protocol.fence import Fence
from ps_protocol.membership import InstallRun, Membership
from ps_protocol.plan import SlicePlan
from ps_protocol.vocabulary import PserverIndex, Round
from services.runtime.compute import ComputeExecutor
from services.runtime.logs import get_logger

from ..durable.snapshot_writer import SnapshotWriter
from ..durable.storage import RunStorage
from ..metrics import PserverMetrics
from ..shard.bodies import BufferPool
from ..shard.history import History
from ..shard.shard import Shard
from ..shard.tensors import StagedBlock
from .schedule import Read, Schedule, Wait, name_trainers
from .staging import Admission, check_member
from .standbys import LATE_SECONDS, STUCK_SECONDS, StandbyConfirmations

log = get_logger()

P = ParamSpec("P")
T = TypeVar("T")

QUICK_PARTS = 2048  # blocks of all contributions, which are summed and stepped within a few milliseconds
HELD_SECONDS = 10.0  # for which a request waits for standbys
ENDS_WITH_INTACT_SHARDS = (TrainerLost, RoundTimeout, RunStopped)


@dataclass(slots=True)
class WaitClock:
    """The time for which requests have been waiting for the initial values, or for the open synchronous round."""

    since: float | None = None  # a time of the loop's clock

    def start(self) -> None:
        """Start the clock, unless it runs."""
        if self.since is None:
            self.since = asyncio.get_running_loop().time()

    def stop(self) -> None:
        """Stop the clock, since there is progress."""
        self.since = None


@dataclass(eq=False)
class RunContext:
    """The shared part of one run. Lives on the event loop; only jobs of `compute` touch the shard's tensors."""

    installed: InstallRun
    index: PserverIndex
    plan: SlicePlan
    schedule: Schedule[StagedBlock]
    shard: Shard
    compute: ComputeExecutor
    pool: BufferPool
    metrics: PserverMetrics
    storage: RunStorage | None
    writer: SnapshotWriter
    membership: Membership
    standbys: StandbyConfirmations | None = None  # with durability `replicated`
    failure: GradpostError | None = None  # the reason that has ended the run
    is_readable: bool = False  # True once all initial values have arrived
    stalls_at: float = math.inf  # a time of the loop's clock, while an update is logged and stepped
    notice: str = ""  # the notice of the coordinator about lost trainers
    condition: asyncio.Condition = field(default_factory=asyncio.Condition)
    wait_clock: WaitClock = field(default_factory=WaitClock)

    @property
    def has_log(self) -> bool:
        """True if updates are logged."""
        return self.storage is not None and self.storage.has_log

    @property
    def identity(self) -> dict[str, str]:
        """The run and the attempt, in the metadata of each reply."""
        return {"run": self.installed.run, "attempt": str(self.installed.attempt)}

    def metadata(self, round_: Round) -> dict[str, str]:
        """Return the metadata of a reply with this version."""
        return {**self.identity, "round": str(round_)}

    def storage_failed(self, what: str, error: OSError) -> StorageFailed:
        """Return the error for a disk that fails where durability needs it."""
        reason = str(error) or "the disk does not answer"
        return StorageFailed(f"pserver {self.index} cannot {what}: {reason}", pserver=self.index)

    # ------------------------------------------------------------------ checks

    def check_fence(self, fence: Fence) -> None:
        """Raise an error if the addressee of a request is stale, or the failure that ended the run."""
        fence.check_addressee(
            run=self.installed.run,
            attempt=self.installed.attempt,
            plan=self.plan.digest,
            pserver=self.index,
            pserver_incarnation=self.installed.incarnation,
        )
        self.check_failure()

    def check_failure(self) -> None:
        """Raise the failure that ended the run, if one did."""
        if self.failure is not None:
            raise copy.copy(self.failure)  # its traceback would collect the frames, and bodies, of every request

    def check_member(self, fence: Fence) -> None:
        """Raise Conflict unless the request is from the current incarnation of a member."""
        check_member(self.schedule.members, fence.rank, fence.trainer_incarnation)

    def check_readable(self) -> None:
        """Raise NotReady before version 0 can be read."""
        if not self.is_readable:
            raise NotReady("the initial values are not complete", waiting_for=f"trainer {self.installed.uploader}")

    def admit_push(self, fence: Fence) -> Admission:
        """Check a push before its body is read, and again before it is staged."""
        self.check_fence(fence)
        self.check_readable()  # nothing may be stepped before version 0 can be read
        return self.schedule.admit(fence.rank, fence.trainer_incarnation, fence.round)

    # ------------------------------------------------------------------ waiting

    async def wait_for(self, wait_seconds: float, find: Callable[[], T | Wait]) -> T:
        """Return what `find` returns as soon as it is not a wait; an error that it raises ends the wait.

        Raises RoundPending after `wait_seconds` (the caller asks again), NotReady before version 0, and RoundTimeout
        when trainers have been missing for the round time-out.
        """
        deadline = asyncio.get_running_loop().time() + wait_seconds
        async with self.condition:
            while isinstance(found := find(), Wait):
                next_check = self._find_next_check(found, deadline)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(next_check):
                        await self.condition.wait()
        return found

    def describe_wait_for_values(self) -> Wait:
        """Return the reason why a request waits for version 0. Starts the clock of the wait, unless it runs."""
        self.wait_clock.start()
        missing, facts = [self.installed.uploader], {"round": self.schedule.reported_round}
        return Wait("version 0", "its values", missing, "upload the initial values", self.wait_clock.since, facts)

    def _find_next_check(self, wait: Wait, deadline: float) -> float:
        """Return the time until which a request waits before its next check. Raises the error that ends its wait."""
        limit = self.installed.round_timeout_seconds
        timeout_at = float("inf") if wait.since is None or self.schedule.is_paused else wait.since + limit
        now = asyncio.get_running_loop().time()
        if now >= timeout_at:
            who = name_trainers(wait.missing) or "the coordinator"
            text = f"{who} did not {wait.owed} within {limit:g} s"
            raise RoundTimeout(text, missing=list(wait.missing), **wait.facts)
        if now >= deadline:
            self.check_readable()
            notice = f" ({self.notice})" if self.notice else ""
            text = f"{wait.what} waits for {wait.cause}{notice}"
            raise RoundPending(text, missing=list(wait.missing), **wait.facts)
        return min(deadline, timeout_at)

    async def notify(self) -> None:
        """Make every waiting request check its condition again."""
        async with self.condition:
            self.condition.notify_all()

    async def end_waits(self, reason: GradpostError, *, is_failure: bool) -> None:
        """End every wait with `reason`, and refuse later requests with it. A later reason has no effect."""
        if self.failure is None:
            if is_failure:
                ranks = reason.facts.get("missing", reason.facts.get("ranks"))
                facts = {} if ranks is None else {"trainer": ranks}
                news = "run stopped" if isinstance(reason, RunStopped) else "run failed"
                log.error(news, reason=reason.detail, round=self.schedule.reported_round, code=reason.code, **facts)
                self.writer.heartbeat_is_due.set()  # the waiting trainers get the failure now, and may exit soon
            self.failure = copy.copy(reason)  # its traceback would keep this run and its shard
            if self.storage is not None:
                self.storage.log.wake_readers()
            if self.standbys is not None:
                self.standbys.wake()
        await self.notify()

    # ------------------------------------------------------------------ standbys

    def is_held(self, round_: Round) -> bool:
        """Return whether a version may be read: every required standby has confirmed it, with `replicated`."""
        return self.standbys is None or self.standbys.acknowledge(round_)

    @property
    def _newest_round(self) -> Round:
        """The round of the newest update in the log, with `replicated`."""
        assert self.standbys is not None
        assert self.storage is not None
        newest = self.storage.newest_update
        return self.standbys.first if newest is None else newest[0]

    def describe_missing_standbys(self) -> str:
        """Return what the newest update waits for, as text: empty if every required standby has confirmed it."""
        is_missing = self.standbys is not None and self.standbys.find_missing(self._newest_round)
        return f"a standby in sync with pserver {self.index}" if is_missing else ""

    async def wait_until_held(self, round_: Round | None = None, wait_seconds: float = math.inf) -> None:
        """Wait until every required standby holds a round, by default the newest logged one.

        Raises RoundPending after `wait_seconds`, and the failure of the run, which ends with `standby_lost` once
        requests have waited for the round time-out.
        """
        if self.standbys is None:
            return
        if round_ is None:
            round_ = self._newest_round
        loop, limit = asyncio.get_running_loop(), self.installed.round_timeout_seconds
        began = loop.time()
        while not self.is_held(round_):
            self.check_failure()
            waited, stalled = loop.time() - began, loop.time() - self.standbys.note_wait(round_)
            if stalled >= limit:
                text = f"round {round_} waited {limit:g} s for {self.describe_missing_standbys()}"
                await self.end_waits(Ended(text, code="standby_lost", round=round_), is_failure=True)
                self.check_failure()
            if waited >= wait_seconds:
                text = f"round {round_} waits for {self.describe_missing_standbys()}"
                raise RoundPending(text, missing=[], round=round_)
            if stalled >= LATE_SECONDS:
                self.standbys.note_late(round_, is_stuck=stalled >= STUCK_SECONDS)
            next_check = min(seconds for seconds in (LATE_SECONDS, STUCK_SECONDS, limit) if seconds > stalled)
            await self.standbys.wait_for_change(min(next_check - stalled, wait_seconds - waited))

    # ------------------------------------------------------------------ work on the shard

    async def run_update(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run an update of the shard, which must not wait for a disk, after the earlier jobs: on the loop if quick."""
        num_parts = len(self.shard.layout.places) * len(self.schedule.members)
        is_quick = self.shard.is_small and num_parts <= QUICK_PARTS
        return await (self.compute.run_at_once if is_quick else self.compute.run)(fn, *args, **kwargs)

    async def read_now(self, read: Read[T], extra: Mapping[str, str] | None = None) -> T:
        """Return what `read` returns between two updates, on the compute thread; `extra` joins its metadata."""
        return await self.compute.run(lambda: read({**self.metadata(self.shard.version), **(extra or {})}))

    async def write_snapshot(self, history: History | None = None) -> None:
        """Copy the shard as it is, and begin to write the copy. Raises TryAgain.

        The history is by default that of the schedule. An update is published once it is held.
        """
        history = self.schedule.copy_history() if history is None else history
        await self.writer.write(self.shard, history, self.compute, self.wait_until_held)
