"""The synchronous mode: complete rounds are applied one after another, between batch and fetch barriers.

plain:    Apply ────────────────────────────────────────────────────► aggregate, log, step, encode ──► the next order
clipped:  Measure ──► aggregate ──► the trainers agree on the norm ──► clip, log, step, encode ──────► the next order

`RoundsExecutor` lives on the event loop; `RoundWork` does its tensor work in jobs of `ComputeExecutor`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Coroutine, Sequence
from time import perf_counter
from typing import Any, TypeVar

from ps_protocol.errors import Ended, GradpostError, NormChanged, RoundPending, StaleRound, TryAgain
from ps_protocol.fence import Fence
from ps_protocol.membership import Membership
from ps_protocol.norms import AgreedNorm, clip_coefficient
from ps_protocol.optimizers import find_difference
from ps_protocol.requests import Barrier, BarrierAnswer, NormAnswer, Pull
from ps_protocol.vocabulary import Rank, Round
from services.runtime.logs import get_logger

from ...shard.history import History
from ...shard.reply import Reply
from ...shard.tensors import StagedBlock
from ..context import RunContext
from ..schedule import Read, Wait, name_trainers
from ..staging import Push, Staged
from .equal_gradients import MAX_ROUNDS, AbsentGradients, EqualGradients
from .round_work import Measured, RoundWork
from .rounds import Apply, Measure, Order, Rounds

log = get_logger()

T = TypeVar("T")

STALLED_SECONDS = 2.0  # for which an update may be logged and stepped, beside the time for its size
STALLED_BYTES_PER_SECOND = 20e6  # of the shard, less than any disk for it writes
LOG_RETRY_SECONDS = 0.5  # between tries to write to a full disk
LOG_REPORT_SECONDS = 60.0  # between messages about it


class RoundsExecutor:
    """The executor of the orders of `Rounds`. The reply of the applied round is encoded once, for all trainers."""

    def __init__(self, context: RunContext, schedule: Rounds[StagedBlock]) -> None:
        self.schedule = schedule
        self._context = context
        self._condition = context.condition
        self._compute = context.compute
        self._metrics = context.metrics
        self._wait_clock = context.wait_clock
        # With `max_delay` a member may still read a version when its push of a later round arrives.
        self._work = RoundWork(context.shard, context.storage, context.identity, borrows=not schedule.max_delay)
        self._reply: Reply | None = None  # the reply of the applied round, once the round may be read
        self._measured: Measured | None = None  # the round that waits for its global norm, or is being applied
        self._apply_task: asyncio.Task[None] | None = None
        self._has_warned_about_disagreement = False
        self._equal_gradients = EqualGradients()
        self._absent_gradients = AbsentGradients(context.shard.layout)
        self._disk_trouble = ""  # the reason why the log of the open round is not written yet
        self.stepped_history = schedule.copy_history()  # of the shard's version; only jobs replace it

    @property
    def longest_wait(self) -> tuple[Sequence[Rank], float | None]:
        """The ranks missing at the open batch barrier, and when the first trainer began to wait for the open round."""
        return self.schedule.missing, self._wait_clock.since

    @property
    def num_queued(self) -> int:
        """Always 0, because contributions are staged and not queued."""
        return 0

    @property
    def is_idle(self) -> bool:
        """True if no round is being applied. A round whose apply failed counts as being applied."""
        return self.schedule.applying is None

    # ------------------------------------------------------------------ pushes and barriers

    def stage(self, fence: Fence, push: Push[StagedBlock]) -> Staged:
        """Stage an admitted push of the open round, or with `max_delay` of a later one."""
        return self.schedule.stage(fence.rank, fence.round, push)

    async def commit(self, fence: Fence) -> None:
        """Leave the contribution to its batch barrier."""

    def count_barrier(self, fence: Fence, barrier: Barrier) -> BarrierAnswer:
        """Count a barrier, and with a batch barrier the trainer's verdict on its gradient. Never waits.

        The fence has been checked. Starts the apply that the barrier completes.
        """
        rank, incarnation = fence.rank, fence.trainer_incarnation
        if barrier.kind == "batch":
            ignores_verdicts = self._context.installed.nonfinite != "skip_round"
            is_finite = barrier.is_finite or ignores_verdicts
            order = self.schedule.count_batch_barrier(rank, incarnation, fence.round, is_finite=is_finite)
            if self.schedule.batch_barriers:
                self._wait_clock.start()
        else:
            order = self.schedule.count_fetch_barrier(rank, incarnation, fence.round)
        self._start(order)
        missing = tuple(self.schedule.missing)
        return BarrierAnswer(round=self.schedule.open, missing=missing, notice=self._context.notice)

    # ------------------------------------------------------------------ members

    async def hold_updates(self) -> None:
        """Wait for a running apply. None follows it until members are installed."""
        async with self._condition:
            self.schedule.hold()
            while self.schedule.applying is not None:
                self._context.check_failure()
                await self._condition.wait()

    def install_members(self, membership: Membership) -> None:
        """Install a set of members, which may complete the batch barrier."""
        was_paused = self.schedule.is_paused
        self._start(self.schedule.install_members(membership))
        if was_paused or not self.schedule.batch_barriers:
            self._wait_clock.stop()  # the waiting trainers have left, or waited for an administrator

    # ------------------------------------------------------------------ apply

    def _start(self, order: Order[StagedBlock] | None) -> None:
        if order is None:
            return
        if self._wait_clock.since is not None:
            self._metrics.barrier_wait.observe(asyncio.get_running_loop().time() - self._wait_clock.since)
        self._begin(self._measure(order.apply) if isinstance(order, Measure) else self._apply(order))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        # A task of the run, not of the request that completed the barrier: that client may disconnect.
        self._apply_task = asyncio.create_task(work, name=f"apply round {self.schedule.open}")

    @contextlib.asynccontextmanager
    async def _fail_on_error(self, round_: Round) -> AsyncIterator[None]:
        """End the run for all trainers with an error that is raised in the block."""
        try:
            yield
        except GradpostError as error:
            await self.end(error, is_failure=True)
        except Exception as error:
            log.exception("apply failed", round=round_)
            text = f"the optimizer of pserver {self._context.index} failed in round {round_}: {error}"
            await self.end(Ended(text, code="apply_failed"), is_failure=True)

    async def _measure(self, apply: Apply[StagedBlock]) -> None:
        async with self._fail_on_error(apply.round):
            controls = self._context.membership.controls_at(apply.round)
            measured = await self._context.run_update(self._work.measure, apply, controls)
            async with self._condition:
                if self.schedule.measuring is apply:  # else the members have changed meanwhile
                    self._measured = measured
                    self._wait_clock.stop()
                    self._condition.notify_all()

    def _find_measured(self, apply: Apply[StagedBlock] | None) -> Measured | None:
        return self._measured if self._measured is not None and self._measured.apply is apply else None

    async def _apply(self, apply: Apply[StagedBlock], coefficient: float = 1.0) -> None:
        self._warn_about_disagreement(apply)
        self._warn_about_gradients(apply)
        async with self._fail_on_error(apply.round):
            begin = perf_counter()
            await self._revoke_reply()
            if coefficient != 1:
                await self._context.run_update(self._work.clip, coefficient)
            reply = await self._step_when_logged(apply)
            await self._snapshot_if_due(apply)
            self._metrics.apply_seconds.observe(perf_counter() - begin)
            if (standbys := self._context.standbys) is not None:
                await standbys.wait_for_joining(apply.round)
            await self._context.wait_until_held(apply.round)
            await self._finish_round(apply, reply)

    async def _revoke_reply(self) -> None:
        """Wait for the last readers of the reply, whose values are about to change, and end the slow ones.

        All members have read it, since their fetch barriers have arrived. With `max_delay` the reply is a copy.
        """
        if self.schedule.max_delay:
            return
        reply, self._reply = self._reply, None
        if reply is not None:
            await reply.revoke()

    async def _step_when_logged(self, apply: Apply[StagedBlock]) -> Reply:
        """Step as soon as the disk accepts the update. A full or hanging disk fails the run in the end."""
        loop, context = asyncio.get_running_loop(), self._context
        deadline, next_report = loop.time() + context.installed.round_timeout_seconds, 0.0
        run = context.compute.run if context.has_log else context.run_update  # a write may block, as may its thread
        context.stalls_at = loop.time() + STALLED_SECONDS + context.shard.values.nbytes / STALLED_BYTES_PER_SECOND
        while True:
            try:
                async with asyncio.timeout_at(max(deadline, context.stalls_at)):
                    reply = await run(self._step, apply)
            except OSError as error:  # also the end of the time
                self._metrics.log_failures.inc()
                if loop.time() >= deadline or context.failure is not None:
                    raise context.storage_failed(f"log round {apply.round}", error) from error
                if loop.time() >= next_report:
                    log.error("the log cannot be written; the round waits", round=apply.round, error=str(error))
                    next_report = loop.time() + LOG_REPORT_SECONDS
                self._disk_trouble = f"the disk of pserver {context.index}: {error}"
                await asyncio.sleep(LOG_RETRY_SECONDS)
            else:
                self._disk_trouble, context.stalls_at = "", math.inf
                return reply

    def _step(self, apply: Apply[StagedBlock]) -> Reply:
        measured = self._find_measured(apply)
        controls = self._context.membership.controls_at(apply.round)
        history = self._history_after(apply)
        reply = self._work.step(apply, controls, measured, history.outcome(apply.round))
        self.stepped_history = history
        return reply

    def _history_after(self, apply: Apply[StagedBlock]) -> History:
        measured = self._find_measured(apply)
        return self.schedule.history_after(apply, measured.norm if measured else None)

    async def _snapshot_if_due(self, apply: Apply[StagedBlock]) -> None:
        if self._context.writer.begin_if_due(apply.round):
            with contextlib.suppress(TryAgain):  # the writer has logged the error, and the log has the round
                await self._context.write_snapshot(self._history_after(apply))

    async def _finish_round(self, apply: Apply[StagedBlock], reply: Reply) -> None:
        async with self._condition:
            measured, self._measured = self._find_measured(apply), None
            following = self.schedule.finish_apply(measured.norm if measured else None)
            self._work.captures.expire_rounds(apply.round)
            self._reply = reply
            self._wait_clock.stop()
            if self.schedule.batch_barriers:
                self._wait_clock.start()
            self._start(following)
            self._condition.notify_all()
        self._metrics.rounds.inc()
        if apply.nonfinite:
            self._metrics.skipped.inc()
            log.warning("round skipped: gradients contain NaN or infinity", round=apply.round, trainer=apply.nonfinite)

    def _warn_about_disagreement(self, apply: Apply[StagedBlock]) -> None:
        for rank, contribution in zip(apply.ranks, apply.contributions, strict=True):
            if contribution.hyper_parameters != apply.hyper_parameters:
                self._metrics.disagreements.inc()
                if not self._has_warned_about_disagreement and self._context.index == 0:
                    self._has_warned_about_disagreement = True
                    name, used, ignored = find_difference(apply.hyper_parameters, contribution.hyper_parameters)
                    log.warning(
                        f"{name} is {used} on trainer {apply.ranks[0]} and {ignored} on trainer {rank}, and all step "
                        f"with that of trainer {apply.ranks[0]}. Set the same on all trainers"
                    )

    def _warn_about_gradients(self, apply: Apply[StagedBlock]) -> None:
        if (found := self._absent_gradients.find(apply)) is not None:
            rank, name = found
            log.warning(
                f"trainer {rank} has sent no gradient of {self._context.shard.layout.place[name].block.parameter!r} in "
                f"{MAX_ROUNDS} rounds in which others had one: it is frozen on this trainer, or not used by its part "
                "of the model. The mean counts zeros for it; if that is not intended, freeze it on all trainers or on "
                "none"
            )
        if self._context.index == 0 and (ranks := self._equal_gradients.find(apply)) is not None:
            log.warning(
                f"trainers {ranks[0]} and {ranks[1]} push the same gradients: does each read its own part of the data? "
                "(torch.utils.data.DistributedSampler)"
            )

    async def wait_for_apply(self) -> None:
        """Wait until no round is being applied."""
        while self._apply_task is not None and not self._apply_task.done():  # an apply may begin the next one
            await asyncio.wait([self._apply_task])

    # ------------------------------------------------------------------ pulls

    async def open_reads(self) -> None:
        """Serve the shard's version, which is complete."""
        version = self._context.shard.version
        self._reply = await self._compute.run(self._work.encode, version, self.schedule.history.outcome(version))

    async def get(self, fence: Fence, pull: Pull) -> Reply:
        """Return version `pull.round`, or with `max_delay` a newer one.

        Raises the errors of `RunContext.wait_for`, and StaleRound when the version has been overwritten.
        """
        reply = await self._context.wait_for(pull.wait_seconds, lambda: self._find_reply(fence))
        if not self._context.is_held(reply.round):  # the restored version
            await self._context.wait_until_held(reply.round, pull.wait_seconds)
            reply = await self._context.wait_for(0.0, lambda: self._find_reply(fence))
        if pull.names:
            version, chunks = await self._compute.run(self._encode_blocks, pull.names)
            await self._context.wait_until_held(version, pull.wait_seconds)
            self._context.check_fence(fence)
            if not self._serves(version, fence):
                raise StaleRound(f"round {fence.round} has been overwritten", current=version)
            reply = Reply(version, chunks)
        return reply

    def _encode_blocks(self, names: Sequence[str]) -> tuple[Round, Sequence[bytes]]:
        # Jobs run one at a time, so the version belongs to the values.
        version = self._context.shard.version
        return version, self._context.shard.encode(names, metadata=self._context.metadata(version), pulled=True)

    def _admit_get(self, fence: Fence) -> None:
        self._context.check_fence(fence)
        self.schedule.admit_get(fence.rank, fence.trainer_incarnation, fence.round)

    def _find_reply(self, fence: Fence) -> Reply | Wait:
        self._admit_get(fence)
        if self._reply is not None and self._serves(self._reply.round, fence):
            return self._reply
        if self._reply is not None and self._reply.round > fence.round:
            raise StaleRound(f"round {fence.round} has been overwritten", current=self._reply.round)
        return self._describe_wait(fence)

    def _serves(self, version: Round, fence: Fence) -> bool:
        """Return whether this version may be the answer: with `max_delay` newer versions may be."""
        return version == fence.round or (version > fence.round and self.schedule.max_delay > 0)

    async def get_norm(self, fence: Fence, pull: Pull) -> NormAnswer:
        """Return the norm of this shard's part of a round's gradient.

        The global norm, `pull.norm`, lets the round be stepped, and the answer waits until that round is over. The
        answer for a round that is over is the norm that was sent then, if one was. Raises the same errors as `get`.
        """
        return await self._context.wait_for(pull.wait_seconds, lambda: self._find_norm(fence, pull.norm))

    def _find_norm(self, fence: Fence, agreed: AgreedNorm | None) -> NormAnswer | Wait:
        """Return the norm, or why it is not there yet. The global norm begins the step, which is awaited then."""
        self._admit_get(fence)
        rounds = self.schedule
        if fence.round <= rounds.applied:
            norm = rounds.history.norms.get(fence.round)
            return NormAnswer() if norm is None else NormAnswer(**norm._asdict())
        measured = self._find_measured(rounds.measuring) or self._find_measured(rounds.applying)
        if measured is None or measured.apply.round != fence.round:
            return self._describe_wait(fence)  # the round is incomplete, or a change of members has dropped it
        if agreed is None:
            return NormAnswer(**measured.norm._asdict())
        self._accept_norm(agreed, measured)
        return self._describe_wait(fence)

    def _accept_norm(self, agreed: AgreedNorm, measured: Measured) -> None:
        """Step the round with the first norm that matches. Raises NormChanged for the norm of another gradient."""
        assert self._context.installed.max_grad_norm is not None
        if not agreed.own.is_same(measured.norm):
            round_ = measured.apply.round
            raise NormChanged(f"the gradient of round {round_} changed after its norm was requested", round=round_)
        if self.schedule.measuring is not None:
            coefficient = clip_coefficient(agreed.norm, self._context.installed.max_grad_norm)
            self._begin(self._apply(self.schedule.accept_norm(), coefficient))

    def _describe_wait(self, fence: Fence) -> Wait:
        """Return the reason why a request waits for the open round. Starts the clock of the wait, unless it runs."""
        if not self._context.is_readable:
            return self._context.describe_wait_for_values()
        self._wait_clock.start()
        rounds, since = self.schedule, self._wait_clock.since
        missing: Sequence[Rank] = rounds.missing
        cause = name_trainers(missing) or self._disk_trouble or self._context.describe_missing_standbys() or "its apply"
        owed = f"reach the batch barrier of round {rounds.open}"
        if rounds.is_frozen:
            missing, owed = [], "end a change of members"
            cause = "the coordinator, in the middle of a change of members"
        elif rounds.is_paused:
            cause = "an administrator, who has paused the run"
        elif rounds.measuring is not None:
            missing, owed = sorted(rounds.members), f"send the global norm of round {rounds.open}"
            cause = "its global norm"
        is_measuring = rounds.measuring is not None and self._find_measured(rounds.measuring) is None
        if rounds.applying is not None or is_measuring:
            since = None  # no trainer is late
        return Wait(f"round {fence.round}", cause, missing, owed, since, {"round": rounds.open})

    # ------------------------------------------------------------------ checkpoints and inspection

    async def wait_for_newest(self, round_: Round, *, is_over: bool) -> Round:
        """Return the newest round that is applied or being applied; if it is this one, wait until it is applied."""
        if self.schedule.applying is not None and round_ == self.schedule.open and self._apply_task is not None:
            await asyncio.wait([self._apply_task])  # the apply may have decided already that no checkpoint is due
        return self.schedule.applied if self.schedule.applying is None else self.schedule.open

    async def begin_snapshot(self, round_: Round) -> None:
        """Begin a snapshot of the shard. Raises TryAgain."""
        await self._context.write_snapshot()

    async def read_after_round(self, round_: Round | None, read: Read[T], wait_seconds: float) -> T:
        """Read the shard right after a round, or as it is: see `Executor.read_after_round`."""
        context, rounds = self._context, self.schedule
        if round_ is None or (round_ == rounds.applied and rounds.applying is None):  # no update comes between
            return await context.read_now(read)
        if round_ <= rounds.applied:
            raise StaleRound(f"round {round_} is over", current=rounds.applied)
        context.check_failure()
        metadata = context.metadata(round_)
        try:
            return await self._work.captures.wait_for_round(
                round_, lambda: read(metadata), wait_seconds, rounds.applied
            )
        except TimeoutError:
            missing = rounds.missing
            text = f"round {round_} waits for {name_trainers(missing) or 'its apply'}"
            raise RoundPending(text, missing=missing, round=rounds.open) from None

    # ------------------------------------------------------------------ the end

    async def end_when_applied(self, reason: GradpostError) -> None:
        """End the run now: see `Executor.end_when_applied`. A running apply continues."""
        await self.end(reason)

    async def end(self, reason: GradpostError, *, is_failure: bool = False) -> None:
        """End every wait, also for captures: see `Executor.end`."""
        self._work.captures.end(reason)
        await self._context.end_waits(reason, is_failure=is_failure)
