"""The asynchronous modes: a queue and a worker for each block, and pulls beside them (ADR 5).

push ──staged until the step is complete──► together into all its queues ──► each block's worker applies it
pull ──waits for clocks (its own, or with `max_staleness` those of all trainers)──► reads as `read_consistency` says

Contributions are numbered in the order in which they are committed. Nothing is logged: a restarted pserver begins with
its newest checkpoint. Checkpoint n contains exactly the first n contributions, because the pserver commits nothing
while it waits for empty queues and copies the shard.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import secrets
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from ps_protocol.errors import BadInput, GradpostError, RoundPending, StaleRound, TryAgain
from ps_protocol.fence import Fence
from ps_protocol.membership import FrozenRounds, Membership
from ps_protocol.requests import APPLIED_KEY, COMPUTED_ON_KEY, HISTORY_KEY, POSITION_KEY, Completion, Pull, PushAnswer
from ps_protocol.vocabulary import Rank, Round
from services.runtime.compute import ComputeExecutor
from services.runtime.logs import get_logger

from ..durable.storage import Restored
from ..shard.bodies import Body, StagedBlock
from ..shard.optimizer import LoadedState
from ..shard.reply import Parts, Reply
from ..shard.row_changes import RowChanges
from ..waits import Wait, name_trainers
from .clocks import Clocks, PulledState, Pulls
from .queues import BlockQueue, BlockUpdate, UpdateJobs
from .run import ENDS_WITH_INTACT_SHARDS, Read, Run
from .staging import Push, Staged

log = get_logger()

T = TypeVar("T")

HOLD_SECONDS = 10.0  # a push that has waited this long must be sent again


def _read_computed_on(completion: Completion) -> Round:
    """Return the step after which the parameters of a complete contribution were pulled. Raises BadInput."""
    if completion.computed_on is None:
        text = f"the last push of a step must contain {COMPUTED_ON_KEY}"
        raise BadInput(text, code="malformed_frame", expected="the step of a get")
    return completion.computed_on


class QueueRun(Run):
    """A run whose contributions `Clocks` commits. The round of a request is its trainer's step."""

    schedule: Clocks[StagedBlock]

    def prepare(self, restored: Restored | None) -> None:
        """Begin with the contributions in the restored shard, or with none."""
        self._rules = rules = self.installed.consistency
        self.shard.changes = RowChanges(self.shard.layout, secrets.randbits(40))
        self.schedule = Clocks(
            {},
            rules,
            applied=restored.round if restored else 0,
            steps=restored.history.steps if restored else None,
        )
        self._pulls = Pulls(rules.max_delay, self._copy_state() if restored else None)
        self.queues: dict[str, BlockQueue] = {}  # empty before version 0
        self._turn = asyncio.Lock()  # of the caller that commits a contribution or needs empty queues, in FIFO order
        # A thread of its own reads while updates are written, so that even one block may be half old and half new.
        self._reads = ComputeExecutor() if rules.read_consistency == "none" else self.compute
        self._pulling: dict[Rank, tuple[Round, float]] = {}  # steps after which pulls wait for others, and since when
        self._install(self.installed.membership)

    def _copy_state(self) -> PulledState:
        """Return the state of the shard. Versions come first: the values may be newer than they say, never older."""
        versions = dict(self.shard.versions)
        return PulledState(versions, self.shard.values.clone() if self._rules.compensation == "dc" else None)

    @property
    def longest_wait(self) -> tuple[Sequence[Rank], float | None]:
        """The ranks that the longest waiting pull waits for, and when it began to wait.

        A trainer whose pull was answered with RoundPending may never come back, so the clocks decide which pulls wait.
        """
        found = ((since, self._find_others(rank, step)) for rank, (step, since) in self._pulling.items())
        since, others = min(((since, others) for since, others in found if others), default=(None, []))
        return others, since

    def _find_others(self, rank: Rank, step: Round) -> list[Rank]:
        return [other for other in self.schedule.find_missing(rank, step) if other != rank]

    @property
    def num_queued(self) -> int:
        """The number of gradients in all queues."""
        return sum(queue.num_updates for queue in self.queues.values())

    def describe_progress(self) -> dict[str, Any]:
        """Return the clocks of all members, and the number of queued gradients."""
        return {**self.schedule.describe(), "num_queued": self.num_queued}

    @property
    def _is_idle(self) -> bool:
        """True if all committed contributions are applied."""
        return self.num_queued == 0 and all(queue.failure is None for queue in self.queues.values())

    # ------------------------------------------------------------------ pushes

    def stage(self, fence: Fence, push: Push[StagedBlock]) -> Staged:
        """Stage an admitted push. Raises the failure of a stopped block, Conflict (`delay_exceeded`) or StaleRound."""
        self._check_blocks_run(push.blocks)
        if push.completion is not None:
            computed_on = _read_computed_on(push.completion)
            self.schedule.check_delay(fence.rank, fence.round, computed_on)
            self._pulls.find_pull(fence.rank, computed_on)
        staged = super().stage(fence, push)
        if staged.num_lost:
            log.error(
                "steps that an earlier incarnation of this pserver acknowledged are lost",
                trainer=fence.rank, lost=staged.num_lost, next=fence.round,
            )  # fmt: skip
        return staged

    async def push(self, fence: Fence, body: Body) -> PushAnswer:
        """Stage one bucket, and put a complete contribution into all its queues together, once all of them have room.

        Pushes are committed in the order in which they became complete, so that one that needs several queues is not
        overtaken for ever. Raises TryAgain if there is no room for long. Then the whole contribution stays staged, and
        the same push must be sent again. Raises the errors of `Run.push`, too.
        """
        answer = await super().push(fence, body)
        if answer.complete:
            task = asyncio.create_task(self._commit(fence), name="commit")  # of the run: this client may disconnect
            task.add_done_callback(lambda task: task.cancelled() or task.exception())
            await asyncio.shield(task)
        return answer

    async def _commit(self, fence: Fence) -> None:
        contribution = self.schedule.contribution(fence.rank)
        blocks = contribution.blocks.keys()

        def has_room() -> bool:
            return not (self.num_queued if contribution.slots else self._find_full_queues(blocks))

        with self.metrics.held_pushes.track_inprogress(), self.metrics.held_seconds.time():
            try:
                async with asyncio.timeout(HOLD_SECONDS) as limit:
                    # A push of a paused run waits without the turn, which an administrator needs for a checkpoint.
                    while await self._wait_until(fence, blocks, lambda: not self.schedule.is_paused):
                        async with self._turn:
                            if await self._wait_until(fence, blocks, has_room) and not self.schedule.is_paused:
                                limit.reschedule(None)
                                await self._commit_in_turn(fence)
            except TimeoutError:
                raise self._make_hold_error(blocks) from None

    async def _wait_until(self, fence: Fence, blocks: Collection[str], is_met: Callable[[], bool]) -> bool:
        """Wait for a condition of a push. Returns False as soon as a repeated push has committed the contribution."""
        async with self.waits.condition:
            while is_open := self.admit_push(fence) == "open":
                self._check_blocks_run(blocks)
                if is_met():
                    break
                await self.waits.condition.wait()
        return is_open

    def _make_hold_error(self, blocks: Iterable[str]) -> GradpostError:
        if self.schedule.is_paused:
            return RoundPending("the run is paused by an administrator; send the push again")
        full = self._find_full_queues(blocks)
        what = f"the queue of block {full[0]!r} is full" if full else f"pserver {self.index} is busy"
        return TryAgain(f"{what}; send the push again", code="queue_full", blocks=full[:10])

    def _find_full_queues(self, blocks: Iterable[str]) -> list[str]:
        return [name for name in blocks if not self.queues[name].has_room]

    def _check_blocks_run(self, names: Iterable[str]) -> None:
        for name in names:
            if (failure := self.queues[name].failure) is not None:
                raise copy.copy(failure)

    async def _commit_in_turn(self, fence: Fence) -> None:
        """Commit a complete contribution, after loading the optimizer state in it, for which the queues are empty."""
        loaded = LoadedState.from_staged(self.schedule.contribution(fence.rank).slots)
        if loaded is not None:
            await self.compute.run(self.shard.load_slots, loaded)
            self.admit_push(fence)  # raises the failure of the run; the trainer may have left, too
        contribution = self.schedule.contribution(fence.rank)
        assert contribution.completion is not None
        pull = self._pulls.find_pull(fence.rank, _read_computed_on(contribution.completion))
        controls, place = self.membership.newest_controls, self.shard.layout.place
        hyper_parameters = controls.override_rates(contribution.hyper_parameters)
        committed = self.schedule.commit(fence.rank)
        for name, block in contribution.blocks.items():
            if place[name].block.parameter in controls.frozen:
                self.schedule.count_applied_block(committed)
            else:
                self.queues[name].put_update(BlockUpdate(name, committed, block, pull, hyper_parameters))
        self.shard.version = self.schedule.applied  # needed here if all blocks of the contribution are frozen
        await self.waits.notify()  # a contribution without blocks to step advances a clock
        if self.writer.begin_if_due(committed.number):
            with contextlib.suppress(GradpostError):  # the writer has logged it, or requests get the failure
                await self._write_snapshot(committed.number)

    # ------------------------------------------------------------------ checkpoints and inspection

    @contextlib.asynccontextmanager
    async def _drained(self) -> AsyncIterator[None]:
        """Run the block on a shard with all committed contributions, and commit nothing meanwhile.

        Raises the failure of the run, or of a stopped block.
        """
        async with self._turn:
            await self._drain()
            yield

    async def _drain(self) -> None:
        """Wait until all committed contributions are applied: see `_drained`. The caller has the turn."""
        async with self.waits.condition:
            while True:
                self.check_failure()
                self._check_blocks_run(self.queues)
                if self._is_idle:
                    break
                await self.waits.condition.wait()

    async def wait_for_newest(self, round_: Round, *, is_over: bool) -> Round:
        """Return the number of committed contributions; for a run that `is_over`, at least `round_`."""
        return max(self.schedule.num_committed, round_ if is_over else 0)

    async def begin_snapshot(self, round_: Round) -> None:
        """Begin a snapshot of the committed contributions, to be stored under this number.

        Raises StaleRound if another contribution is committed first, TryAgain.
        """
        async with self._turn:
            await self._write_snapshot(round_)

    async def _write_snapshot(self, number: Round) -> None:
        """Begin a snapshot that counts as under way: see `begin_snapshot`. The caller has the turn."""
        try:
            await self._drain()
            if self.schedule.num_committed > number:
                raise StaleRound(f"round {number} is over", current=self.schedule.num_committed)
            self.schedule.set_committed(number)
            self.shard.version = number
            await self.write_snapshot()
        except BaseException:
            self.writer.end_named(number)
            raise

    async def read_after_round(self, round_: Round | None, read: Read[T], wait_seconds: float) -> T:
        """Read the shard between two contributions: see `Run.read_after_round`. Pushes wait meanwhile."""
        async with self._drained():
            extra = {APPLIED_KEY: str(self.schedule.applied), HISTORY_KEY: self.schedule.copy_history().to_json()}
            return await self.read_between_updates(read, extra)

    async def wait_for_apply(self) -> None:
        """Wait until no contribution is being committed and the compute thread is done with the earlier ones."""
        async with self._turn:
            await self.compute.run(lambda: None)  # the compute thread runs its jobs in order

    # ------------------------------------------------------------------ apply

    async def open_reads(self) -> None:
        """Begin the queues of the shard's version, which is complete."""
        rules, jobs = self._rules, UpdateJobs(self, self.schedule)
        for name in self.shard.layout.place:
            self.queues[name] = BlockQueue(name, max_queued=rules.max_queued, apply=jobs.apply)

    # ------------------------------------------------------------------ pulls

    async def get(self, fence: Fence, pull: Pull) -> Reply:
        """Return the newest parameters, once the clocks allow it to a trainer that has pushed step `fence.round`.

        Raises the errors of `wait_for`.
        """
        loop = asyncio.get_running_loop()
        begin = loop.time()
        await self.wait_for(pull.wait_seconds, lambda: self._find_wait(fence))
        self.metrics.barrier_wait.observe(loop.time() - begin)
        frame, state = await self._read(fence, pull)
        self.check_fence(fence)
        self.check_member(fence)
        self._pulls.record_pull(fence.rank, fence.round, state)
        return Reply(fence.round, frame)

    async def _read(self, fence: Fence, pull: Pull) -> tuple[Parts, PulledState]:
        """Read as `read_consistency` says: for `shard` between two contributions, so that all blocks have the same.

        Returns a frame of the pulled blocks, and the state of the whole shard that it shows.
        """
        async with self._drained() if self._rules.read_consistency == "shard" else contextlib.nullcontext():
            metadata = {**self.metadata(fence.round), APPLIED_KEY: str(self.schedule.applied)}
            run = self._reads.run_at_once if self.shard.is_small else self._reads.run
            return await run(self._copy, pull, metadata)

    def _copy(self, pull: Pull, metadata: Mapping[str, str]) -> tuple[Parts, PulledState]:
        state, shard = self._copy_state(), self.shard
        if pull.names or not shard.layout.sparse:
            return shard.encode(pull.names or None, metadata, pulled=True), state
        # Read first, too: a row that is written meanwhile is sent again.
        return shard.encode_since(pull.base, {**metadata, POSITION_KEY: str(shard.changes.position)}), state

    def _find_wait(self, fence: Fence) -> Wait | None:
        self.check_fence(fence)
        self.check_member(fence)
        if not self.is_readable:
            return self.describe_wait_for_values()
        if self.schedule.find_missing(fence.rank, fence.round):
            self._check_blocks_run(self.queues)
            return self._describe_wait(fence)
        self._pulling.pop(fence.rank, None)
        return None

    def _describe_wait(self, fence: Fence) -> Wait:
        """Return the reason why a trainer's pull waits for clocks. Starts the clock of the wait, unless it runs."""
        rank, step = fence.rank, fence.round
        others = self._find_others(rank, step)
        before, since = self._pulling.pop(rank, (None, 0.0))
        since = since if before == step else asyncio.get_running_loop().time()
        if others:
            self._pulling[rank] = step, since
        return Wait(
            f"step {step} of trainer {rank}",
            name_trainers(others) or "its own update",
            others,
            f"let trainer {rank} go on after step {step}",
            since if others and not self.schedule.is_paused else None,
            {"clocks": self.schedule.clocks},
        )

    # ------------------------------------------------------------------ members and the end

    async def freeze(self) -> FrozenRounds:
        """Return the open steps at once. Contributions are applied one by one, and go on."""
        self.check_failure()
        return self.schedule.freeze().model_copy(update={"is_readable": self.is_readable})

    async def install_members(self, membership: Membership) -> None:
        """Install a set of members: trainers that left are not waited for any more."""
        self._install(membership)
        await self.waits.notify()

    def _install(self, membership: Membership) -> None:
        self.membership = membership
        was_paused = self.schedule.is_paused
        for rank, incarnation in self.schedule.members.items():
            if membership.members.get(rank) != incarnation:
                self._pulls.forget_trainer(rank)
                self._pulling.pop(rank, None)
        self.schedule.install_members(membership)
        if was_paused:
            self._pulling.clear()  # the waits of these pulls begin again
            self.waits.since = None

    async def end_when_applied(self, reason: GradpostError) -> bool:
        """End the run once all committed contributions are applied, so that the last checkpoint contains them.

        The run may have failed before, with an intact shard.
        """

        def is_over() -> bool:
            return self._is_idle or not all(queue.is_working for queue in self.queues.values())

        async with self._turn:
            async with self.waits.condition:
                await self.waits.condition.wait_for(is_over)
            await self.end(reason)
        await self.wait_for_apply()
        return self._is_idle

    async def end(self, reason: GradpostError, *, is_failure: bool = False) -> None:
        """End every wait, and the queues unless `stop` may still persist their updates: see `Run.end`."""
        if not isinstance(reason, ENDS_WITH_INTACT_SHARDS):
            for queue in self.queues.values():
                queue.close()
        if self._reads is not self.compute:
            self._reads.close()
        await super().end(reason, is_failure=is_failure)
