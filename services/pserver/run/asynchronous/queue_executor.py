"""The asynchronous modes: a queue and a worker for each block, and pulls beside them (ADR 5).

push ──staged until the step is complete──► logged ──► together into all its queues ──► each block's worker applies it
pull ──waits for clocks (its own, or with `max_staleness` those of all trainers)─────► reads as `read_consistency` says

Contributions are numbered in the order in which they are committed. A checkpoint of number n is made while no
contribution is being committed and every queue is empty, so that it contains exactly the first n contributions. The log
has the later ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn, TypeVar

from torch import Tensor

from ps_protocol.errors import GradpostError, RoundPending, TryAgain
from ps_protocol.fence import Fence
from ps_protocol.membership import Membership
from ps_protocol.optimizers import HyperParameters
from ps_protocol.requests import APPLIED_KEY, HISTORY_KEY, Completion, Pull
from ps_protocol.vocabulary import Rank, Round
from services.runtime.logs import get_logger

from ...durable.checkpoint_writer import Destination
from ...durable.update_log import LoggedUpdate
from ...shard.optimizer_blocks import LoadedState
from ...shard.reply import Reply
from ...shard.tensors import StagedBlock, view_bytes
from ..context import ENDS_WITH_INTACT_SHARDS, HELD_SECONDS, RunContext
from ..schedule import Read, Wait, name_trainers
from ..staging import Push, Staged, StagedContribution
from .clocks import Clocks
from .queues import BlockQueue, BlockUpdate, HeldPushes, Pauses
from .readers import Reader, make_reader
from .staleness import PulledState, Pulls
from .update_jobs import UpdateJobs

log = get_logger()

T = TypeVar("T")

HOLD_SECONDS = 10.0  # a push that has waited this long for room must be sent again


@dataclass(frozen=True, slots=True)
class _Pulling:
    """A trainer's pull that waits for others, `since` by the loop's clock."""

    step: Round
    since: float


def _computed_on(completion: Completion | None) -> Round:
    """Return the step after which the parameters of a complete contribution were pulled."""
    assert completion is not None
    assert completion.computed_on is not None  # `read_push` refuses completions without it
    return completion.computed_on


class QueueExecutor:
    """The executor of contributions that `Clocks` commits. The round of a request is its trainer's step."""

    def __init__(self, context: RunContext, schedule: Clocks[StagedBlock], *, is_restored: bool) -> None:
        self.schedule = schedule
        self._rules = rules = context.installed.consistency
        self._context = context
        self._shard = context.shard
        self._condition = context.condition
        self._compute = context.compute
        self._metrics = context.metrics
        self._pulls = Pulls(rules.max_delay, self._make_restored_pull() if is_restored else None)
        self.queues: dict[str, BlockQueue] = {}  # empty before version 0
        self._held = HeldPushes(self.queues)
        self._pauses = Pauses(context.condition, self._held)
        self._log_fails_since: float | None = None
        self._reader: Reader | None = None
        self._pulling: dict[Rank, _Pulling] = {}

    def _make_restored_pull(self) -> PulledState:
        """Return the pull that the trainers of an earlier incarnation of this pserver are assumed to have made."""
        values = self._shard.values.clone() if self._rules.compensation == "dc" else None
        return PulledState(dict(self._shard.versions), values)

    @property
    def longest_wait(self) -> tuple[Sequence[Rank], float | None]:
        """The ranks that the longest waiting pull waits for, and when it began to wait.

        A trainer whose pull was answered with RoundPending may never come back, so the clocks decide which pulls wait.
        """
        found = ((pulling.since, self._find_others(rank, pulling.step)) for rank, pulling in self._pulling.items())
        since, others = min(((since, others) for since, others in found if others), default=(None, []))
        return others, since

    def _find_others(self, rank: Rank, step: Round) -> list[Rank]:
        return [other for other in self.schedule.find_missing(rank, step) if other != rank]

    @property
    def num_queued(self) -> int:
        """The number of gradients in all queues."""
        return sum(queue.num_updates for queue in self.queues.values())

    @property
    def is_idle(self) -> bool:
        """True if all committed contributions are applied."""
        return self.num_queued == 0 and all(queue.failure is None for queue in self.queues.values())

    # ------------------------------------------------------------------ pushes

    def stage(self, fence: Fence, push: Push[StagedBlock]) -> Staged:
        """Stage an admitted push. Raises the failure of a stopped block, Conflict (`delay_exceeded`) or StaleRound."""
        self._check_blocks_run(push.blocks)
        if push.completion is not None:
            computed_on = _computed_on(push.completion)
            self.schedule.check_delay(fence.rank, fence.round, computed_on)
            self._pulls.find_pull(fence.rank, computed_on)
        staged = self.schedule.stage(fence.rank, fence.round, push)
        if staged.num_lost:
            log.error(
                "steps that an earlier incarnation of this pserver acknowledged are lost",
                trainer=fence.rank, lost=staged.num_lost, next=fence.round,
            )  # fmt: skip
        return staged

    async def commit(self, fence: Fence) -> None:
        """Log the whole contribution and put it into all its queues together, once all of them have room.

        Raises TryAgain if there is no room for long or the log cannot be written, and StorageFailed once the log has
        failed for the round time-out. Then the whole contribution stays staged, and the same push must be sent again.
        """
        loop = asyncio.get_running_loop()
        begin = loop.time()
        blocks = self.schedule.contribution(fence.rank).blocks.keys()
        logging: asyncio.Task[None] | None = None
        async with self._condition:
            try:
                with self._held.hold(blocks):
                    while self._context.admit_push(fence) == "open":  # a repeated push may have committed it
                        self._check_blocks_run(blocks)
                        if self._pauses.may_commit and self._held.is_ready(blocks):
                            self._pauses.note_commit()
                            if self._context.has_log or self.schedule.contribution(fence.rank).slots:
                                logging = self._pauses.begin_pause(self._log_and_commit(fence.rank))
                            else:
                                self._commit(fence.rank, self._find_pull(fence.rank))
                            break
                        if loop.time() >= begin + HOLD_SECONDS:
                            raise self._make_hold_error(blocks)
                        with self._metrics.held_pushes.track_inprogress(), contextlib.suppress(TimeoutError):
                            async with asyncio.timeout_at(begin + HOLD_SECONDS):
                                await self._condition.wait()
            finally:
                self._condition.notify_all()  # later pushes may go on; an empty contribution advances a clock
        self._metrics.held_seconds.observe(loop.time() - begin)
        if logging is not None:
            await asyncio.shield(logging)  # the task belongs to the run: this client may disconnect
            if (standbys := self._context.standbys) is not None:
                await standbys.wait_for_joining(self.schedule.num_committed)
        await self._context.wait_until_held(wait_seconds=HELD_SECONDS)

    def _make_hold_error(self, blocks: Iterable[str]) -> GradpostError:
        if self.schedule.is_paused:
            return RoundPending("the run is paused by an administrator; send the push again")
        full = self._held.find_full_queues(blocks)
        what = f"the queue of block {full[0]!r} is full" if full else f"pserver {self._context.index} is busy"
        return TryAgain(f"{what}; send the push again", code="queue_full", blocks=full[:10])

    def _check_blocks_run(self, names: Iterable[str]) -> None:
        for name in names:
            if (failure := self.queues[name].failure) is not None:
                raise copy.copy(failure)

    def _find_pull(self, rank: Rank) -> PulledState:
        """Return the pull that the complete contribution of a trainer was computed on."""
        return self._pulls.find_pull(rank, _computed_on(self.schedule.contribution(rank).completion))

    def _commit(self, rank: Rank, pull: PulledState) -> None:
        committed = self.schedule.commit(rank)
        hyper_parameters = self._get_hyper_parameters(committed.contribution)
        for name, block in committed.contribution.blocks.items():
            if self._is_frozen(name):
                self.schedule.count_applied_block(committed)
            else:
                self.queues[name].put_update(BlockUpdate(committed, block, pull, hyper_parameters))
        self._shard.version = self.schedule.applied  # needed here if all blocks of the contribution are frozen
        if (destination := self._context.writer.choose_destination(committed.number)) is not None:
            self._pauses.begin_pause(self._drain_and_snapshot(committed.number, destination))

    def _get_hyper_parameters(self, contribution: StagedContribution[StagedBlock]) -> list[HyperParameters]:
        return self._context.membership.newest_controls.override_rates(contribution.hyper_parameters)

    def _is_frozen(self, name: str) -> bool:
        frozen = self._context.membership.newest_controls.frozen
        return bool(frozen) and self._shard.layout.place[name].block.parameter in frozen

    # ------------------------------------------------------------------ log and checkpoints

    async def _log_and_commit(self, rank: Rank) -> None:
        """Log a complete contribution, and then commit it to the queues, and its optimizer state to the shard."""
        contribution = self.schedule.contribution(rank)
        present = [place.name for place in self._shard.layout.places if place.name in contribution.blocks]
        names = tuple(name for name in present if not self._is_frozen(name))
        origin = self.schedule.members[rank], self.schedule.open_steps[rank]
        hyper_parameters = self._get_hyper_parameters(contribution)
        loaded = LoadedState.from_staged(contribution.slots)
        pull = self._find_pull(rank)  # now, since the trainer may repeat its pull while the log is written
        update = LoggedUpdate(
            self.schedule.num_committed + 1, (rank,), hyper_parameters, names, origin=origin, counter=rank,
            pulled=tuple(pull.versions[name] for name in names) if self._rules.compensation == "divide" else None,
            dc_lambda=self._rules.dc_lambda if pull.values is not None else None,
        )  # fmt: skip
        values = [] if pull.values is None else self._shard.layout.view_blocks(pull.values, names)
        try:
            await asyncio.to_thread(self._append, update, [contribution.blocks[name] for name in names], values, loaded)
        except OSError as error:
            await self._handle_failed_append(f"log step {origin[1]} of trainer {rank}", error)
        self._log_fails_since = None
        if loaded:
            await self._drain()
            self._context.check_failure()
            await self._compute.run(self._shard.load_slots, loaded)
        self._commit(rank, pull)

    def _append(
        self, update: LoggedUpdate, blocks: Sequence[StagedBlock], pulled: Sequence[Tensor], loaded: LoadedState | None
    ) -> None:
        if self._context.storage is not None:
            tensors = [*(block.tensor().float() for block in blocks), *pulled]
            self._context.storage.append(update, list(map(view_bytes, tensors)), loaded)

    async def _handle_failed_append(self, what: str, error: OSError) -> NoReturn:
        """Make the trainers send the push again, until the round time-out for a full disk has passed."""
        failure = self._context.storage_failed(what, error)
        now = asyncio.get_running_loop().time()
        self._metrics.log_failures.inc()
        log.error("the log cannot be written; the push has to be sent again", error=failure.detail)
        self._log_fails_since = self._log_fails_since or now
        if now - self._log_fails_since >= self._context.installed.round_timeout_seconds:
            await self.end(failure, is_failure=True)
            raise copy.copy(failure)
        raise TryAgain(f"{failure.detail}; send the push again")

    async def _drain_and_snapshot(self, number: Round, destination: Destination) -> None:
        await self._drain()
        if self._context.failure is not None or not self.is_idle:
            return
        self.schedule.set_committed(number)
        self._shard.version = number
        await self._context.write_checkpoint(destination)

    async def _drain(self) -> None:
        """Wait until all committed contributions are applied, or a block has stopped."""

        def is_over() -> bool:
            return self.is_idle or not all(queue.is_working for queue in self.queues.values())

        async with self._condition:
            await self._condition.wait_for(is_over)

    async def wait_for_newest(self, round_: Round, *, is_over: bool) -> Round:
        """Return the number of committed contributions; for a run that `is_over`, at least `round_`."""
        await self._pauses.wait_for_turn()
        return max(self.schedule.num_committed, round_ if is_over else 0)

    async def begin_checkpoint(self, round_: Round) -> None:
        """Begin a checkpoint of the committed contributions, to be stored under this number."""
        self._pauses.begin_pause(self._drain_and_snapshot(round_, "place"))

    async def read_after_round(self, round_: Round | None, read: Read[T], wait_seconds: float) -> T:
        """Read the shard between two contributions: see `Executor.read_after_round`. Pushes wait meanwhile."""
        found: list[T] = []

        async def drain_and_read() -> None:
            await self._drain()
            self._context.check_failure()
            self._check_blocks_run(self.queues)
            extra = {APPLIED_KEY: str(self.schedule.applied), HISTORY_KEY: self.schedule.copy_history().to_json()}
            found.append(await self._context.read_now(read, extra))

        await self._pauses.wait_for_turn_and_pause(drain_and_read)
        return found[0]

    async def wait_for_apply(self) -> None:
        """Wait until no contribution is being committed and the compute thread is done with the earlier ones."""
        await self._pauses.wait_for_turn()
        await self._compute.run(lambda: None)  # the compute thread runs its jobs in order

    # ------------------------------------------------------------------ apply

    async def open_reads(self) -> None:
        """Begin the queues and the reader of the shard's version, which is complete."""
        rules, jobs = self._rules, UpdateJobs(self._context, self.schedule)
        for name in self._shard.layout.place:
            self.queues[name] = BlockQueue(name, max_queued=rules.max_queued, apply=jobs.apply)
        self._reader = make_reader(
            rules.read_consistency, self._shard, self._compute, self._context.pool, self.queues,
            keep_values=rules.compensation == "dc",
        )  # fmt: skip

    # ------------------------------------------------------------------ pulls

    async def get(self, fence: Fence, pull: Pull) -> Reply:
        """Return the newest parameters, once the clocks allow it to a trainer that has pushed step `fence.round`.

        Raises the errors of `RunContext.wait_for`.
        """
        loop = asyncio.get_running_loop()
        begin = loop.time()
        reader: Reader = await self._context.wait_for(pull.wait_seconds, lambda: self._find_reader(fence))
        self._metrics.barrier_wait.observe(loop.time() - begin)
        metadata = {**self._context.metadata(fence.round), APPLIED_KEY: str(self.schedule.applied)}
        reading = await reader.read(pull.names or None, metadata)
        await self._context.wait_until_held(wait_seconds=pull.wait_seconds)
        self._context.check_fence(fence)
        self._context.check_member(fence)
        self._pulls.record_pull(fence.rank, fence.round, reading.pull)
        return Reply(fence.round, [reading.frame.buffer], memory=reading.frame)

    def _find_reader(self, fence: Fence) -> Reader | Wait:
        self._context.check_fence(fence)
        self._context.check_member(fence)
        if not self._context.is_readable or self._reader is None:
            return self._context.describe_wait_for_values()
        if self.schedule.find_missing(fence.rank, fence.round):
            self._check_blocks_run(self.queues)
            return self._describe_wait(fence)
        self._pulling.pop(fence.rank, None)
        return self._reader

    def _describe_wait(self, fence: Fence) -> Wait:
        """Return the reason why a trainer's pull waits for clocks. Starts the clock of the wait, unless it runs."""
        rank, step = fence.rank, fence.round
        others = self._find_others(rank, step)
        pulling = self._pulling.pop(rank, None)
        if pulling is None or pulling.step != step:
            pulling = _Pulling(step, asyncio.get_running_loop().time())
        if others:
            self._pulling[rank] = pulling
        return Wait(
            f"step {step} of trainer {rank}",
            name_trainers(others) or "its own update",
            others,
            f"let trainer {rank} go on after step {step}",
            pulling.since if others else None,
            {"clocks": self.schedule.clocks},
        )

    # ------------------------------------------------------------------ members and the end

    async def hold_updates(self) -> None:
        """Wait for the contribution that is being logged; contributions are applied one by one, and go on."""
        await self._pauses.wait_for_turn()

    async def wait_until_changeable(self) -> None:
        """Wait for the contribution that is being logged, which counts for the members before the change."""
        await self._pauses.wait_for_turn()

    def install_members(self, membership: Membership) -> None:
        """Install a set of members: trainers that left are not waited for any more."""
        was_paused = self.schedule.is_paused
        for rank, incarnation in self.schedule.members.items():
            if membership.members.get(rank) != incarnation:
                self._pulls.forget_trainer(rank)
                self._pulling.pop(rank, None)
        self.schedule.install_members(membership)
        self._held.is_paused = self.schedule.is_paused
        if was_paused:
            self._pulling.clear()  # the round time-outs of these pulls begin again
            self._context.wait_clock.stop()

    async def end_when_applied(self, reason: GradpostError) -> None:
        """End the run once all committed contributions are applied, so that the last checkpoint contains them."""

        async def drain_and_end() -> None:
            await self._drain()
            await self.end(reason)

        await self._pauses.wait_for_turn_and_pause(drain_and_end)

    async def end(self, reason: GradpostError, *, is_failure: bool = False) -> None:
        """End every wait, and the queues unless `Run.stop` may still persist their updates: see `Executor.end`."""
        if not isinstance(reason, ENDS_WITH_INTACT_SHARDS):
            for queue in self.queues.values():
                queue.close()
        if self._reader is not None:
            self._reader.close(reason)
        await self._context.end_waits(reason, is_failure=is_failure)
