"""One run on one pserver, the same in all modes but for its schedule and its executor: see `schedule.py`.

Both parts share a `RunContext` with the run. Tensor work goes to the compute thread. The fence is checked again after
every `await`, since the round, the member or the run may have ended meanwhile.

a run ends                            through                        which
with its failure                      `Executor.end`                 ends every wait now
because the process stops             `Run.stop`                     waits for acknowledged updates, and persists them
because another run takes its place   `Run.close`                    ends every wait, and frees threads and disk
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import xxhash

from ps_protocol.errors import (
    Conflict,
    Ended,
    FutureRound,
    GradpostError,
    NonFiniteGradient,
    NotReady,
    RoundPending,
    StaleRound,
    TryAgain,
)
from ps_protocol.fence import Fence
from ps_protocol.membership import FrozenRounds, InstallMembers, InstallRun
from ps_protocol.requests import PushAnswer
from ps_protocol.standbys import HeldUpdates
from ps_protocol.vocabulary import PserverIndex, Rank, Round
from services.runtime.compute import ComputeExecutor
from services.runtime.logs import get_logger

from ..durable.snapshot_writer import Publisher, SnapshotWriter
from ..durable.storage import Restored, RunStorage
from ..metrics import PserverMetrics
from ..shard.bodies import Body, BufferPool
from ..shard.shard import Shard
from ..shard.tensors import QUICK_BYTES, StagedBlock, check_blocks, find_nonfinite
from .asynchronous.clocks import Clocks
from .asynchronous.queue_executor import QueueExecutor
from .context import ENDS_WITH_INTACT_SHARDS, HELD_SECONDS, RunContext
from .initial_values import InitialValues
from .read_pushes import measure_largest_body, read_push
from .schedule import Executor, Read
from .staging import StagedContribution
from .standbys import StandbyConfirmations
from .synchronous.rounds import Rounds
from .synchronous.rounds_executor import RoundsExecutor

log = get_logger()

T = TypeVar("T")

FREEZE_SECONDS = 2.0  # less than the time-out of the coordinator's request


class Run:
    """One run on one pserver, in its mode. Lives on the event loop."""

    def __init__(
        self,
        installed: InstallRun,
        index: PserverIndex,
        *,
        compute: ComputeExecutor,
        pool: BufferPool,
        metrics: PserverMetrics,
        storage: RunStorage | None = None,
        restored: Restored | None = None,
        publisher: Publisher | None = None,
    ) -> None:
        """Resume with `restored`, if there is one, else wait for initial values."""
        self.installed = installed
        self.index = index
        self.storage = storage
        self.plan = plan = installed.plan
        self.schedule = _make_schedule(installed, restored)
        self.shard = shard = restored.shard if restored else Shard(plan, index)
        self.writer = writer = SnapshotWriter(storage, installed.checkpoint_rounds, metrics, publisher)
        self.context = RunContext(
            installed=installed, index=index, plan=plan, schedule=self.schedule, shard=shard, compute=compute,
            pool=pool, metrics=metrics, storage=storage, writer=writer, membership=installed.membership,
        )  # fmt: skip
        if installed.durability == "replicated":
            self.context.standbys = StandbyConfirmations(
                installed.required,
                restored.round if restored else 0,
                report=lambda: writer.heartbeat_is_due.set(),
                num_restorable=1 + installed.consistency.max_delay,
            )
        self.executor: Executor = (
            RoundsExecutor(self.context, self.schedule)
            if isinstance(self.schedule, Rounds)
            else QueueExecutor(self.context, self.schedule, is_restored=restored is not None)
        )
        self.initial_values = InitialValues(self.context, self.executor)
        self.max_body_bytes, self.max_body_tensors = measure_largest_body(plan, index, shard.layout)
        self.shard_bytes = plan.shard_bytes(index)
        self.pushed_bytes = 0
        self.pulled_bytes = 0
        self.transports: set[str] = set()  # HTTP versions of the data requests
        self._compute = compute
        self._metrics = metrics
        self.executor.install_members(installed.membership)  # the last statement, since it may begin an apply

    @property
    def round(self) -> Round:
        """The number of applied rounds; in asynchronous modes, the number of applied contributions."""
        return self.schedule.applied

    @property
    def missing(self) -> Sequence[Rank]:
        """The ranks that other trainers wait for or, before version 0, the uploader of its values."""
        return self._longest_wait[0]

    @property
    def waiting_seconds(self) -> float:
        """The seconds for which requests have been waiting for the missing trainers; 0 while the run is paused."""
        since = self._longest_wait[1]
        if since is None or self.schedule.is_paused:
            return 0.0
        return asyncio.get_running_loop().time() - since

    @property
    def _longest_wait(self) -> tuple[Sequence[Rank], float | None]:
        if self.context.is_readable:
            return self.executor.longest_wait
        return [self.installed.uploader], self.context.wait_clock.since

    def check_fence(self, fence: Fence) -> None:
        """Raise an error if the addressee of a request is stale, or the failure that ended the run."""
        self.context.check_fence(fence)

    # ------------------------------------------------------------------ reads, as of `ReadableShard`

    def check_readable(self) -> None:
        """Raise NotReady before version 0 can be read."""
        self.context.check_readable()

    async def read_now(self, read: Read[T]) -> T:
        """Return what `read` returns between two updates, once standbys hold them: see `RunContext.wait_until_held`."""
        found = await self.context.read_now(read)
        await self.wait_until_held()
        return found

    async def read_after_round(self, round_: Round | None, read: Read[T], wait_seconds: float) -> T:
        """Return what `read` returns right after a round: see `Executor.read_after_round`, and `read_now`."""
        found = await self.executor.read_after_round(round_, read, wait_seconds)
        await self.wait_until_held()
        return found

    async def wait_until_held(self) -> None:
        """Wait until every required standby holds what was read. Raises RoundPending, or the failure of the run."""
        await self.context.wait_until_held(wait_seconds=HELD_SECONDS)

    # ------------------------------------------------------------------ pushes and pulls

    async def push(self, fence: Fence, body: Body) -> PushAnswer:
        """Validate and stage one bucket. A repeated push gets the same answer; an error changes nothing.

        In asynchronous modes the push that completes a step is answered once the whole step is queued.
        """
        push = read_push(body, self.shard.layout, self.plan)
        is_finite = await self._check_finite(fence, push.blocks, body)
        if self.context.admit_push(fence) == "already_applied":
            await self.wait_until_held()
            return PushAnswer(status="already_applied", duplicates=push.num_entries, finite=is_finite)
        staged = self.executor.stage(fence, push)
        if push.blocks:
            self._metrics.staged_blocks.inc(staged.num_new)
        self.pushed_bytes += len(body.buffer)
        if staged.is_complete:
            await self.executor.commit(fence)
        known, complete = push.num_entries - staged.num_new, staged.is_complete
        return PushAnswer(status="staged", staged=staged.num_new, duplicates=known, complete=complete, finite=is_finite)

    async def _check_finite(self, fence: Fence, blocks: Mapping[str, StagedBlock], body: Body) -> bool:
        """Return whether the blocks contain neither NaN nor infinity, and count and log a push that does.

        Under `allow` blocks are not read. Raises NonFiniteGradient under `reject`, and BadInput for wrong indices.
        """
        if self.plan.wire.push == "topk":
            await self._compute.run(check_blocks, blocks)
        if self.installed.nonfinite == "allow" or not blocks:
            return True
        is_quick = len(body.buffer) <= QUICK_BYTES
        culprit = find_nonfinite(body, blocks) if is_quick else await self._compute.run(find_nonfinite, body, blocks)
        if culprit is None:
            return True
        self._metrics.nonfinite.inc()
        is_rejected = self.installed.nonfinite == "reject"
        write = log.info if is_rejected else log.warning  # the trainer reports a rejected push
        write("NaN or infinity in a gradient", trainer=fence.rank, round=fence.round, block=culprit)
        if is_rejected:
            advice = "" if self.installed.consistency.is_async else ". To skip such rounds, set --nonfinite skip_round"
            raise NonFiniteGradient(
                f"trainer {fence.rank} pushed NaN or infinity in block {culprit!r} in round {fence.round}; "
                f"nothing of this push was staged{advice}"
            )
        return False

    async def get_slots(self, fence: Fence, keys: Sequence[str]) -> Sequence[bytes]:
        """Return a frame of optimizer state as of the request's round: see `Shard.encode_state`.

        In the asynchronous modes it is the newest state. Raises BadInput, StaleRound, TryAgain.
        """

        def encode() -> tuple[Round, list[bytes]]:
            return self.shard.version, self.shard.encode_state(keys, self.context.metadata(fence.round), fence.rank)

        self.context.check_readable()
        self.context.check_member(fence)
        version, chunks = await self._compute.run(encode)
        await self.wait_until_held()
        self.check_fence(fence)
        self.schedule.check_state(fence.rank, fence.trainer_incarnation, fence.round, version)
        return chunks

    async def get_buffers(self, fence: Fence) -> Sequence[bytes]:
        """Return a frame of this shard's buffers, which no round changes, for a member."""
        self.check_fence(fence)
        self.context.check_member(fence)
        self.context.check_readable()
        return await self._compute.run(lambda: self.shard.encode([], self.context.metadata(0), with_buffers=True))

    # ------------------------------------------------------------------ members and the end

    async def freeze(self) -> FrozenRounds:
        """Wait for a running update, and from then on count no barrier until members are installed.

        Raises RoundPending after `FREEZE_SECONDS` while standbys are missing. That wait has its own limit.
        """
        while True:
            try:
                async with asyncio.timeout(FREEZE_SECONDS):
                    self.context.check_failure()
                    await self.executor.hold_updates()
                    frozen = self.schedule.freeze().model_copy(update={"is_readable": self.context.is_readable})
                    await self.context.wait_until_held()
                    return frozen
            except TimeoutError:
                if missing := self.context.describe_missing_standbys():
                    raise RoundPending(f"a change of members waits for {missing}", missing=[]) from None

    def confirm_held(self, message: HeldUpdates) -> None:
        """Count the confirmation of a standby. Raises Conflict, FutureRound, TryAgain, or the failure of the run."""
        self.context.check_failure()
        if self.context.standbys is None:
            raise Conflict("updates are confirmed with durability `replicated` only")
        newest = self.storage.newest_update if self.storage else None
        if newest is None or message.round > newest[0]:
            current = None if newest is None else newest[0]
            raise FutureRound(f"the log ends before round {message.round}", current=current)
        self.context.standbys.confirm(message.instance, message.round)

    async def install_members(self, message: InstallMembers) -> None:
        """Replace the set of members by a newer one and notify the waiting requests. Ends a freeze."""
        self.context.membership = message.membership
        self.executor.install_members(message.membership)
        await self.context.notify()

    async def stop(self) -> None:
        """End every wait, and persist the content of the shard, before the process ends."""
        await self.writer.wait_for_writes()
        if self.storage is not None and self.writer.is_saved:
            with contextlib.suppress(OSError):
                await asyncio.to_thread(self.storage.finish)
        has_log = self.storage is not None and self.storage.has_log
        if self.context.failure is not None and (
            has_log or not isinstance(self.context.failure, ENDS_WITH_INTACT_SHARDS)
        ):
            return  # the acknowledged updates are in the log, or the shard is not intact
        text = f"pserver {self.index} is stopping; a standby may replace it, or it is restarted"
        await self.executor.end_when_applied(TryAgain(text, code="stopping"))
        await self.executor.wait_for_apply()
        await self.writer.wait_for_writes()
        is_persisted = self.storage is None or self.shard.version in self.storage.rounds
        if not is_persisted and self.context.is_readable and self.executor.is_idle:
            with contextlib.suppress(TryAgain):  # the writer has logged the error
                await self.context.write_snapshot()
        await self.writer.wait_for_writes()

    async def wait_until_published(self) -> None:
        """Wait for the running apply, and for the snapshots that are being written and published."""
        await self.executor.wait_for_apply()
        await self.writer.wait_until_published()

    async def close(self, reason: GradpostError) -> None:
        """End the run with `reason`, and wait until no work of it remains on a thread or in the folder."""
        await self.executor.end(reason)
        await self.executor.wait_for_apply()
        await self.initial_values.wait_until_published()
        await self.writer.close()
        if self.storage is not None:
            self.storage.close()

    # ------------------------------------------------------------------ checkpoints and inspection

    def require_storage(self) -> RunStorage:
        """Return the storage, if a checkpoint can be made now or soon. Raises NotReady, or the run's failure."""
        self.context.check_failure()
        self.context.check_readable()
        if self.storage is None:
            raise NotReady(f"pserver {self.index} has no state folder", waiting_for="a state folder")
        return self.storage

    async def want_checkpoint(self, round_: Round, *, is_over: bool = False) -> None:
        """Publish the shard after this round, or number of contributions: immediately if it is the newest one.

        `is_over` marks the last checkpoint of the run. Raises StaleRound if the round is over, TryAgain while another
        snapshot is being published.
        """
        self.require_storage()
        newest = await self.executor.wait_for_newest(round_, is_over=is_over)
        self.require_storage()
        if round_ < newest:
            raise StaleRound(f"round {round_} is over", current=newest)
        self.writer.is_over |= is_over
        if self.writer.is_known(round_):
            return
        self.writer.request_round(round_)
        if round_ == newest:
            self.writer.begin_named(round_)
            await self.executor.begin_snapshot(round_)

    def describe(self) -> dict[str, Any]:
        """Return the members of `PserverHeartbeat` that belong to this run."""
        context, metrics = self.context, self._metrics
        return {
            "run": self.installed.run,
            "attempt": self.installed.attempt,
            "round": self.round,
            "missing": tuple(self.missing) if self.waiting_seconds else (),
            "waiting_seconds": self.waiting_seconds,
            "failure": context.failure.to_problem() if isinstance(context.failure, Ended) else None,
            "published": self.writer.published,
            "coming_checkpoints": self.writer.find_pending(self.round),
            "is_stalled": asyncio.get_running_loop().time() > context.stalls_at,
            "standbys": context.standbys.describe() if context.standbys else None,
            **self.schedule.describe(),
            "num_blocks": len(self.plan.shards[self.index]),
            "shard_bytes": self.shard_bytes,
            "pushed_bytes": self.pushed_bytes,
            "pulled_bytes": self.pulled_bytes,
            "num_queued": self.executor.num_queued,
            "num_applies": metrics.apply_seconds.count,
            "apply_seconds": metrics.apply_seconds.total,
            "num_waits": metrics.barrier_wait.count,
            "wait_seconds": metrics.barrier_wait.total,
            "staleness": dict(metrics.staleness.counts),
        }

    async def digest(self) -> str:
        """Return a digest of all that a request could change: values, optimizer state, barriers, contributions."""
        staged = xxhash.xxh3_128()
        progress = self.round, self.schedule.describe(), self.executor.num_queued
        staged.update(repr(progress).encode())
        for round_, rank, contribution in self.schedule.staged():
            _add_contribution(staged, (round_, rank), contribution)
        return f"{await self._compute.run(self.shard.digest)}-{staged.hexdigest()}"


def _make_schedule(installed: InstallRun, restored: Restored | None) -> Rounds[StagedBlock] | Clocks[StagedBlock]:
    rules, applied = installed.consistency, restored.round if restored else 0
    history = restored.history if restored else None
    if rules.is_async:
        return Clocks({}, rules, applied=applied, steps=history.steps if history else None)
    members, clips = installed.membership.members, installed.max_grad_norm is not None
    return Rounds(members, rules.max_delay, applied=applied, history=history, clips=clips)


def _add_contribution(
    digest: xxhash.xxh3_128, identity: tuple[Round, Rank], contribution: StagedContribution[StagedBlock]
) -> None:
    """Add all staged blocks and slots of a trainer to the digest."""
    digest.update(repr((identity, contribution.completion)).encode())
    for name, staged in [*sorted(contribution.blocks.items()), *sorted(contribution.slots.items())]:
        digest.update(name.encode())
        for view in staged.bytes() if isinstance(staged, StagedBlock) else [repr(staged).encode()]:
            digest.update(view)
