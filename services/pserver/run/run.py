"""One run on one pserver: the part that both modes share. It is the only part of a pserver that waits for trainers.

                    decides, pure            carries out                  with
synchronous mode    Rounds, rounds.py        SyncRun, sync_run.py
asynchronous modes  Clocks, clocks.py        QueueRun, queue_run.py       queues.py

Tensor work goes to the compute thread. The fence is checked again after every `await`, since the round, the member or
the run may have ended meanwhile.

a run ends                            through        which
with its failure                      `Run.end`      ends every wait now
because the process stops             `Run.stop`     waits for acknowledged updates, and persists them
because another run takes its place   `Run.close`    ends every wait, and frees threads and disk
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeAlias, TypeVar

from ps_protocol.errors import (
    Conflict,
    Ended,
    GradpostError,
    NotReady,
    RoundPending,
    RoundTimeout,
    RunStopped,
    StorageFailed,
    TrainerLost,
    TryAgain,
)
from ps_protocol.fence import Fence
from ps_protocol.membership import FrozenRounds, InstallRun, Membership
from ps_protocol.requests import Pull, PushAnswer
from ps_protocol.vocabulary import PserverIndex, Rank, Round
from services.runtime.compute import ComputeExecutor
from services.runtime.logs import get_logger

from ..durable.snapshot_writer import Publisher, SnapshotWriter
from ..durable.storage import Restored, RunStorage
from ..metrics import PserverMetrics
from ..shard.bodies import Body, BufferPool, StagedBlock, check_blocks
from ..shard.reply import Reply
from ..shard.shard import Shard
from ..shard.shard_state import History
from ..waits import Wait, Waits
from .clocks import Clocks
from .read_pushes import PushReader, measure_largest_body, read_initial
from .rounds import Rounds
from .staging import Admission, Push, Staged, check_member
from .standbys import StandbyConfirmations

log = get_logger()

P = ParamSpec("P")
T = TypeVar("T")

Read: TypeAlias = Callable[[Mapping[str, str]], T]  # reads the shard; its argument is the metadata of the version

QUICK_PARTS = 2048  # blocks of all contributions, which are summed and stepped within a few milliseconds
QUICK_BYTES = 1 << 20  # of a push, whose indices are checked in less time than a thread is woken
HELD_SECONDS = 10.0  # for which a request waits for standbys
ENDS_WITH_INTACT_SHARDS = (TrainerLost, RoundTimeout, RunStopped)


class Run(ABC):
    """One run on one pserver. Lives on the event loop; only jobs of `compute` touch the shard's tensors."""

    schedule: Rounds[StagedBlock] | Clocks[StagedBlock]
    follows = False  # whether another process decides, and this one repeats its updates

    def __init__(
        self,
        installed: InstallRun,
        index: PserverIndex,
        *,
        compute: ComputeExecutor,
        pool: BufferPool,
        metrics: PserverMetrics,
        storage: RunStorage,
        publisher: Publisher,
        report: Callable[[], None],
        restored: Restored | None = None,
    ) -> None:
        """Resume with `restored`, if there is one, else wait for initial values.

        `report` is called when the coordinator has to learn at once how the run is.
        """
        self.installed = installed
        self.index = index
        self.plan = plan = installed.plan
        self.compute = compute
        self.pool = pool
        self.metrics = metrics
        self.storage = storage
        self.membership = installed.membership
        self.shard = restored.shard if restored else Shard(plan, index)
        self.shard.aggregator.allows_nonfinite = installed.nonfinite == "allow"
        self.writer = SnapshotWriter(storage, installed.checkpoint_rounds, metrics, publisher, report)
        self._report = report
        self.standbys: StandbyConfirmations | None = None
        if installed.durability == "replicated" and not self.follows:
            first = restored.round if restored else 0
            self.standbys = StandbyConfirmations(installed, index, first, storage.log, report)
        self.failure: GradpostError | None = None  # the reason that has ended the run
        self.is_readable = False  # True once all initial values have arrived
        self.stalls_at = math.inf  # a time of the loop's clock, while an update is logged and stepped
        self._push_reader = PushReader(self.shard.layout, plan)
        self.max_body_bytes = measure_largest_body(plan, index)
        self.shard_bytes = plan.shard_bytes(index)
        self.pushed_bytes = 0
        self.pulled_bytes = 0
        self.transports: set[str] = set()  # HTTP versions of the data requests
        self.waits = Waits(installed.patience_seconds)
        self._buffers = {spec.name: spec for spec in plan.buffers if spec.pserver == index}
        self._publishing = asyncio.Lock()
        self.prepare(restored)

    # ------------------------------------------------------------------ what a mode decides

    @abstractmethod
    def prepare(self, restored: Restored | None) -> None:
        """Make the schedule, and all else that only this mode has: the end of the constructor."""

    @property
    @abstractmethod
    def longest_wait(self) -> tuple[Sequence[Rank], float | None]:
        """The ranks that trainers have waited for longest, and since when by the loop's clock, after version 0."""

    def describe_progress(self) -> dict[str, Any]:
        """Return the progress of each trainer, as members of `PserverHeartbeat`."""
        return self.schedule.describe()

    @abstractmethod
    async def open_reads(self) -> None:
        """Serve the shard's version, which is complete."""

    def stage(self, fence: Fence, push: Push[StagedBlock]) -> Staged:
        """Stage an admitted push."""
        return self.schedule.stage(fence.rank, fence.round, push)

    @abstractmethod
    async def get(self, fence: Fence, pull: Pull) -> Reply:
        """Return the parameters of a request's round, waiting up to `pull.wait_seconds` for them."""

    @abstractmethod
    async def freeze(self) -> FrozenRounds:
        """Return the progress of all trainers. Until members are installed, no barrier counts."""

    @abstractmethod
    async def install_members(self, membership: Membership) -> None:
        """Replace the set of members by a newer one, and notify the waiting requests. Ends a freeze."""

    @abstractmethod
    async def wait_for_newest(self, round_: Round, *, is_over: bool) -> Round:
        """Return the newest round that is applied or, unless it is this one, being applied.

        In asynchronous modes it is the number of committed contributions; for a run that `is_over`, at least `round_`.
        """

    async def begin_snapshot(self, round_: Round) -> None:
        """Begin a snapshot of the shard, which is at this round. Raises TryAgain."""
        await self.write_snapshot()

    @abstractmethod
    async def read_after_round(self, round_: Round | None, read: Read[T], wait_seconds: float) -> T:
        """Read the whole shard right after a round, waiting up to `wait_seconds` for it; None is any whole round.

        In asynchronous modes all blocks contain the same contributions. Raises StaleRound, RoundPending.
        """

    @abstractmethod
    async def wait_for_apply(self) -> None:
        """Wait for the running apply."""

    @abstractmethod
    async def end_when_applied(self, reason: GradpostError) -> bool:
        """End the run once its updates are applied. Return whether the shard contains all that was acknowledged."""

    # ------------------------------------------------------------------ checks

    @property
    def round(self) -> Round:
        """The number of applied rounds; in asynchronous modes, the number of applied contributions."""
        return self.schedule.applied

    def metadata(self, round_: Round) -> dict[str, str]:
        """Return the metadata of a reply with this version."""
        return {"run": self.installed.run, "attempt": str(self.installed.attempt), "round": str(round_)}

    def storage_failed(self, what: str, error: Exception) -> StorageFailed:
        """Return the error for a disk that fails where durability needs it."""
        text = f"pserver {self.index} cannot {what}: {str(error) or 'the disk does not answer'}"
        return StorageFailed(text, pserver=self.index)

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
        self.check_readable()
        return self.schedule.admit(fence.rank, fence.trainer_incarnation, fence.round)

    def admit_initial(self, fence: Fence) -> Admission:
        """Check an upload of initial values: round 0, from the elected trainer."""
        self.check_fence(fence)
        self.check_member(fence)
        if fence.round != 0 or fence.rank != self.installed.uploader:
            text = f"the initial values must be uploaded by trainer {self.installed.uploader}, as round 0"
            raise Conflict(text, code="stale_trainer")
        return "already_applied" if self.shard.is_initialised else "open"

    # ------------------------------------------------------------------ waiting

    @property
    def late(self) -> tuple[tuple[Rank, ...], float]:
        """The ranks that requests wait for, and the seconds of their wait: none and 0 without one, or while paused."""
        missing, since = self.longest_wait if self.is_readable else ([self.installed.uploader], self.waits.since)
        is_being_written = self.shard.is_initialised and not self.is_readable  # no trainer is late then
        if since is None or self.schedule.is_paused or is_being_written:
            return (), 0.0
        return tuple(missing), asyncio.get_running_loop().time() - since

    async def wait_for(self, wait_seconds: float, find: Callable[[], T | Wait]) -> T:
        """Return what `find` returns as soon as it is not a wait: see `Waits.wait_for`. Raises NotReady, too."""
        try:
            return await self.waits.wait_for(wait_seconds, find)
        except RoundPending:
            self.check_readable()
            raise

    def describe_wait_for_values(self) -> Wait:
        """Return the reason why a request waits for version 0."""
        if self.shard.is_initialised:
            return Wait("version 0", "its first snapshot", facts={"round": self.schedule.reported_round})
        since = None if self.schedule.is_paused else self.waits.begin()
        missing, facts = [self.installed.uploader], {"round": self.schedule.reported_round}
        return Wait("version 0", "its values", missing, "upload the initial values", since, facts)

    async def wait_until_held(self, round_: Round | None = None, wait_seconds: float = HELD_SECONDS) -> None:
        """Wait until every required standby holds a round: see `StandbyConfirmations.wait_until_held`.

        Raises the failure of the run, too, which ends with `standby_lost` after `patience_seconds`.
        """
        if self.standbys is None:
            return
        try:
            await self.standbys.wait_until_held(round_, wait_seconds, self.check_failure)
        except Ended as error:
            await self.end(error, is_failure=True)
            raise

    # ------------------------------------------------------------------ initial values

    async def store_initial(self, fence: Fence, body: Body) -> PushAnswer:
        """Store initial values and buffers; the last one makes the run readable at version 0."""
        blocks, buffers = read_initial(body, self.shard.layout, self._buffers)
        if self.admit_initial(fence) == "already_applied":
            await self.publish()  # the request that stored the last value may have ended before it did this
            return PushAnswer(status="already_applied", duplicates=len(body.frame.tensors))
        self.waits.since = None
        await self.compute.run(self.shard.set_initial, blocks, buffers)
        await self.publish()
        return PushAnswer(status="staged", staged=len(body.frame.tensors), complete=self.shard.is_initialised)

    async def publish(self) -> None:
        """Make the first version readable once every value has arrived; without blocks, immediately.

        A restored shard begins with the version that was restored.
        """
        async with self._publishing:
            if self.shard.is_initialised and not self.is_readable:
                self.check_failure()
                if self.installed.restore is None or self.installed.source is not None:
                    await self._write_first_snapshot()
                    self.check_failure()
                await self.open_reads()
                self.is_readable = True
                self.waits.since = None
        await self.waits.notify()  # even without a version, since the time-out of its readers begins again

    async def _write_first_snapshot(self) -> None:
        """Write the first version, before a trainer can read it. A disk that fails, or hangs, ends the run."""
        error: Exception | None
        self.writer.begin_named(self.shard.version)
        try:
            async with asyncio.timeout(self.installed.patience_seconds):
                write = await self.writer.write(self.shard, self.schedule.copy_history(), self.compute)
                error = await asyncio.shield(write)
        except (TimeoutError, TryAgain) as problem:
            error = problem
        if error is not None:
            await self.end(self.storage_failed("write its first snapshot", error), is_failure=True)

    # ------------------------------------------------------------------ pushes and state

    async def push(self, fence: Fence, body: Body) -> PushAnswer:
        """Validate and stage one bucket. A repeated push gets the same answer; an error changes nothing."""
        push = self._push_reader.read(body)
        if self.plan.wire.push == "topk" or self.shard.layout.sparse:
            check = self.compute.run_at_once if len(body.buffer) <= QUICK_BYTES else self.compute.run
            await check(check_blocks, push.blocks.values())
        if self.admit_push(fence) == "already_applied":
            await self.wait_until_held()
            return PushAnswer(status="already_applied", duplicates=push.num_entries)
        staged = self.stage(fence, push)
        if push.blocks:
            self.metrics.staged_blocks.inc(staged.num_new)
        self.pushed_bytes += len(body.buffer)
        known, complete = push.num_entries - staged.num_new, staged.is_complete
        return PushAnswer(status="staged", staged=staged.num_new, duplicates=known, complete=complete)

    async def get_slots(self, fence: Fence, keys: Sequence[str]) -> Sequence[bytes]:
        """Return a frame of optimizer state as of the request's round: see `Shard.encode_state`.

        In the asynchronous modes it is the newest state. Raises BadInput, StaleRound, TryAgain.
        """

        def encode() -> tuple[Round, list[bytes]]:
            return self.shard.version, self.shard.encode_state(keys, self.metadata(fence.round), fence.rank)

        self.check_readable()
        self.check_member(fence)
        version, chunks = await self.compute.run(encode)
        await self.wait_until_held()
        self.check_fence(fence)
        self.schedule.check_state(fence.rank, fence.trainer_incarnation, fence.round, version)
        return chunks

    async def get_buffers(self, fence: Fence) -> Sequence[bytes | memoryview]:
        """Return a frame of this shard's buffers, which no round changes, for a member."""
        self.check_fence(fence)
        self.check_member(fence)
        self.check_readable()
        return await self.compute.run(lambda: self.shard.encode([], self.metadata(0), with_buffers=True))

    # ------------------------------------------------------------------ work on the shard

    async def run_update(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run an update of the shard, which must not wait for a disk, after the earlier jobs: on the loop if quick."""
        num_parts = len(self.shard.layout.places) * len(self.schedule.members)
        is_quick = self.shard.is_small and num_parts <= QUICK_PARTS
        return await (self.compute.run_at_once if is_quick else self.compute.run)(fn, *args, **kwargs)

    async def read_between_updates(self, read: Read[T], extra: Mapping[str, str] | None = None) -> T:
        """Return what `read` returns between two updates, on the compute thread; `extra` joins its metadata."""
        return await self.compute.run(lambda: read({**self.metadata(self.shard.version), **(extra or {})}))

    async def read_now(self, read: Read[T]) -> T:
        """Return what `read` returns between two updates, once standbys hold them."""
        found = await self.read_between_updates(read)
        await self.wait_until_held()
        return found

    async def write_snapshot(self, history: History | None = None) -> None:
        """Copy the shard as it is, and begin to write the copy. Raises TryAgain.

        The history is by default that of the schedule. An update is published once it is held.
        """
        history = self.schedule.copy_history() if history is None else history
        await self.writer.write(self.shard, history, self.compute, lambda: self.wait_until_held(wait_seconds=math.inf))

    async def want_checkpoint(self, round_: Round, *, is_over: bool = False) -> None:
        """Publish the shard after this round, or number of contributions: immediately if it is the newest one.

        `is_over` marks the last checkpoint of the run. Raises StaleRound if the round is over, TryAgain while another
        snapshot is being published.
        """
        self.check_failure()
        self.check_readable()
        newest = await self.wait_for_newest(round_, is_over=is_over)
        self.check_failure()
        if self.writer.request_round(round_, newest, is_over=is_over):
            await self.begin_snapshot(round_)

    # ------------------------------------------------------------------ the end

    async def end(self, reason: GradpostError, *, is_failure: bool = False) -> None:
        """End every wait with `reason` now, and refuse later requests with it. A later reason has no effect.

        A failure is logged and reported to the coordinator.
        """
        if self.failure is None:
            if is_failure:
                ranks = reason.facts.get("missing", reason.facts.get("ranks"))
                facts = {} if ranks is None else {"trainer": ranks}
                news = "run stopped" if isinstance(reason, RunStopped) else "run failed"
                log.error(news, reason=reason.detail, round=self.schedule.reported_round, code=reason.code, **facts)
                self._report()  # the waiting trainers get the failure now, and may exit soon
            self.failure = copy.copy(reason)  # its traceback would keep this run and its shard
            self.storage.log.wake_readers()
            self.waits.note_round(math.inf)
            if self.standbys is not None:
                self.standbys.wake()
        await self.waits.notify()

    async def stop(self) -> None:
        """End every wait, and persist the content of the shard, before the process ends."""
        await self.writer.wait_for_writes()
        if self.writer.is_saved:
            with contextlib.suppress(OSError):
                await asyncio.to_thread(self.storage.finish)
        is_intact = self.failure is None or isinstance(self.failure, ENDS_WITH_INTACT_SHARDS)
        if not is_intact or (self.failure is not None and self.installed.durability != "none"):
            return  # the acknowledged updates are in the log, or the shard is not intact
        text = f"pserver {self.index} is stopping; a standby may replace it, or it is restarted"
        is_intact = await self.end_when_applied(TryAgain(text, code="stopping"))
        await self.writer.wait_for_writes()
        if is_intact and self.is_readable and self.shard.version not in self.storage.rounds:
            with contextlib.suppress(TryAgain):  # the writer has logged the error
                await self.write_snapshot()
            await self.writer.wait_for_writes()

    async def close(self, reason: GradpostError) -> None:
        """End the run with `reason`, and wait until no work of it remains on a thread or in the folder."""
        await self.end(reason)
        await self.wait_for_apply()
        async with self._publishing:  # the first snapshot may be being written
            await self.writer.close()
        self.storage.close()
