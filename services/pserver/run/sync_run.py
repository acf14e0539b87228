"""The synchronous mode: complete rounds are applied one after another, between batch and fetch barriers.

plain:    Apply ────────────────────────────────────────────────────► aggregate, log, step, encode ──► the next order
clipped:  Apply ────► aggregate ──► the trainers agree on the norm ──► clip, log, step, encode ──────► the next order
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, TypeVar

import xxhash
from torch import Tensor

from ps_protocol.errors import Ended, GradpostError, NormChanged, RoundPending, StaleRound, TryAgain
from ps_protocol.fence import Fence
from ps_protocol.membership import Controls, FrozenRounds, Membership
from ps_protocol.norms import AgreedNorm, ShardNorm, clip_coefficient
from ps_protocol.requests import Barrier, BarrierAnswer, NormAnswer, Pull, Pulled
from ps_protocol.vocabulary import Rank, Round
from services.runtime.failpoints import reach_failpoint
from services.runtime.logs import get_logger

from ..durable.storage import Restored
from ..durable.update_log import LoggedUpdate
from ..shard.bodies import StagedBlock, split_blocks
from ..shard.optimizer import find_loaded
from ..shard.reply import Parts, Reply, VersionedBlocks
from ..shard.shard_state import History
from ..waits import Wait, name_trainers
from .rounds import Apply, Rounds
from .run import Read, Run
from .script_warnings import ScriptWarnings

log = get_logger()

T = TypeVar("T")

FREEZE_SECONDS = 2.0  # less than the time-out of the coordinator's request
STALLED_SECONDS = 2.0  # for which an update may be logged and stepped, beside the time for its size
STALLED_BYTES_PER_SECOND = 20e6  # of the shard, less than any disk for it writes
LOG_RETRY_SECONDS = 0.5  # between tries to write to a full disk
LOG_REPORT_SECONDS = 60.0  # between messages about it
DIGEST_ROUNDS = 1000  # between two updates with a digest of the shard, which standbys compare with their own


@dataclass(frozen=True, slots=True)
class Measured:
    """A complete round, aggregated, that is stepped once the trainers send its global norm."""

    apply: Apply[StagedBlock]
    gradient: Tensor  # the aggregator's flat float32 tensor, which the next aggregation overwrites
    present: tuple[str, ...]  # the blocks in it
    norm: ShardNorm


class SyncRun(Run):
    """A run that carries out the orders of `Rounds`. A round's reply is encoded once, for all trainers."""

    schedule: Rounds[StagedBlock]

    def prepare(self, restored: Restored | None) -> None:
        """Begin with the round after the restored one, or with the first one."""
        installed = self.installed
        self.schedule = Rounds(
            installed.membership.members,
            installed.consistency.max_delay,
            applied=restored.round if restored else 0,
            history=restored.history if restored else None,
            clips=installed.max_grad_norm is not None,
        )
        self.stepped_history = self.schedule.copy_history()  # of the shard's version; only jobs replace it
        self._pulled = self.shard.view_pulled()
        self._changed = dict.fromkeys(self.shard.layout.place, self.shard.version)  # the newest change of each block
        self._reply: Reply | None = None  # the reply of the applied round, once the round may be read
        self._measured: Measured | None = None  # the round that waits for its global norm, or is being applied
        self._apply_task: asyncio.Task[None] | None = None
        self._warnings = ScriptWarnings(self.shard.layout, reports_all=self.index == 0)
        self._disk_trouble = ""  # the reason why the log of the open round is not written yet
        if not self.follows:
            self._start(self.schedule.install_members(installed.membership))  # last, since it may begin an apply

    @property
    def longest_wait(self) -> tuple[Sequence[Rank], float | None]:
        return self.schedule.missing, self.waits.since

    # ------------------------------------------------------------------ barriers

    def count_barrier(self, fence: Fence, barrier: Barrier) -> BarrierAnswer:
        """Count a barrier whose fence was checked, and its verdict. Starts the apply that it completes; never waits."""
        rank, incarnation = fence.rank, fence.trainer_incarnation
        if barrier.kind == "batch":
            is_finite = barrier.is_finite or self.installed.nonfinite != "skip_round"
            order = self.schedule.count_batch_barrier(rank, incarnation, fence.round, is_finite=is_finite)
            if self.schedule.batch_barriers:
                self.waits.begin()
        else:
            order = self.schedule.count_fetch_barrier(rank, incarnation, fence.round)
        self._start(order)
        return BarrierAnswer(round=self.schedule.open, missing=tuple(self.schedule.missing), notice=self.waits.notice)

    # ------------------------------------------------------------------ members

    async def freeze(self) -> FrozenRounds:
        """Wait for a running update, and from then on count no barrier until members are installed.

        Raises RoundPending after `FREEZE_SECONDS` while standbys are missing. That wait has its own limit.
        """
        while True:
            try:
                async with asyncio.timeout(FREEZE_SECONDS):
                    self.check_failure()
                    await self._hold_updates()
                    frozen = self.schedule.freeze().model_copy(update={"is_readable": self.is_readable})
                    await self.wait_until_held(wait_seconds=math.inf)
                    return frozen
            except TimeoutError:
                if self.standbys is not None and (missing := self.standbys.describe_missing()):
                    raise RoundPending(f"a change of members waits for {missing}", missing=[]) from None

    async def _hold_updates(self) -> None:
        """Wait for a running apply. None follows it until members are installed."""
        async with self.waits.condition:
            self.schedule.hold()
            while self.schedule.applying is not None:
                self.check_failure()
                await self.waits.condition.wait()

    async def install_members(self, membership: Membership) -> None:
        """Install a set of members, which may complete the batch barrier."""
        self.membership = membership
        was_paused = self.schedule.is_paused
        self._start(self.schedule.install_members(membership))
        if was_paused or not self.schedule.batch_barriers:
            self.waits.since = None  # the waiting trainers have left, or waited for an administrator
        await self.waits.notify()

    # ------------------------------------------------------------------ apply

    def _start(self, order: Apply[StagedBlock] | None) -> None:
        if order is None:
            return
        if (since := self.waits.since) is not None:
            self.metrics.barrier_wait.observe(asyncio.get_running_loop().time() - since)
        self._begin(self._measure(order) if order is self.schedule.measuring else self._apply(order))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        # A task of the run, not of the request that completed the barrier: that client may disconnect.
        round_ = self.schedule.open
        self._apply_task = asyncio.create_task(self._fail_on_error(round_, work), name=f"apply round {round_}")

    async def _fail_on_error(self, round_: Round, work: Coroutine[Any, Any, None]) -> None:
        """Do this work. An error ends the run for all trainers."""
        try:
            await work
        except GradpostError as error:
            await self.end(error, is_failure=True)
        except Exception as error:
            log.exception("apply failed", round=round_)
            text = f"the optimizer of pserver {self.index} failed in round {round_}: {error}"
            await self.end(Ended(text, code="apply_failed"), is_failure=True)

    async def _measure(self, apply: Apply[StagedBlock]) -> None:
        controls = self.membership.controls_at(apply.round)
        measured = await self.run_update(self._measure_job, apply, controls)
        async with self.waits.condition:
            if self.schedule.measuring is apply:  # else the members have changed meanwhile
                self._measured, self.waits.since = measured, None
                self.waits.condition.notify_all()

    def _find_measured(self, apply: Apply[StagedBlock] | None) -> Measured | None:
        return self._measured if self._measured is not None and self._measured.apply is apply else None

    async def _apply(self, apply: Apply[StagedBlock], coefficient: float = 1.0) -> None:
        self.metrics.disagreements.inc(self._warnings.check_round(apply))
        begin = perf_counter()
        await self._revoke_reply()
        if coefficient != 1:
            await self.run_update(self.shard.aggregator.scale, coefficient)
        reply = await self._step_when_logged(apply)
        try:
            async with asyncio.timeout(self.installed.patience_seconds):
                await self.snapshot_if_due()
        except TimeoutError as error:
            raise self.storage_failed(f"begin a snapshot after round {apply.round}", error) from error
        self.stalls_at = math.inf
        self.metrics.apply_seconds.observe(perf_counter() - begin)
        if self.standbys is not None:
            await self.standbys.wait_for_joining(apply.round)
        await self.wait_until_held(apply.round, math.inf)
        await self._finish_round(apply, reply)

    async def _revoke_reply(self) -> None:
        """Wait for the last readers of the reply, whose values are about to change, and end the slow ones.

        All members have read it, since their fetch barriers have arrived. With `max_delay` the reply is a copy.
        """
        if not self.schedule.max_delay and (reply := self._reply) is not None:
            self._reply = None
            await reply.revoke()

    async def _step_when_logged(self, apply: Apply[StagedBlock]) -> Reply:
        """Step as soon as the disk accepts the update. A full or hanging disk fails the run in the end."""
        loop = asyncio.get_running_loop()
        deadline, next_report = loop.time() + self.installed.patience_seconds, 0.0
        # A write may block, as may its thread.
        run = self.run_update if self.installed.durability == "none" else self.compute.run
        self.stalls_at = loop.time() + STALLED_SECONDS + self.shard.values.nbytes / STALLED_BYTES_PER_SECOND
        while True:
            try:
                async with asyncio.timeout_at(max(deadline, self.stalls_at)):
                    reply = await run(self._step, apply)
            except OSError as error:  # also the end of the time
                self.metrics.log_failures.inc()
                if loop.time() + LOG_RETRY_SECONDS >= deadline or self.failure is not None:
                    raise self.storage_failed(f"log round {apply.round}", error) from error
                if loop.time() >= next_report:
                    log.error("the log cannot be written; the round waits", round=apply.round, error=str(error))
                    next_report = loop.time() + LOG_REPORT_SECONDS
                self._disk_trouble = f"the disk of pserver {self.index}: {error}"
                await asyncio.sleep(LOG_RETRY_SECONDS)
            else:
                self._disk_trouble = ""
                return reply

    # ------------------------------------------------------------------ jobs of the compute thread

    def _measure_job(self, apply: Apply[StagedBlock], controls: Controls) -> Measured:
        """Aggregate the contributions in rank order, and compute the norm of the blocks that will be stepped.

        The digest in the norm is the same on every pserver. It names frozen parameters, too, so that no trainer adds
        norms from before and after a change that freezes one.
        """
        gradient, present = self._aggregate(apply, controls)
        digest = xxhash.xxh3_64_hexdigest(repr((apply.identity, sorted(controls.frozen))).encode())
        norm = ShardNorm(digest, self.shard.aggregator.sum_of_squares(present))
        return Measured(apply, gradient, present, norm)

    def _aggregate(self, apply: Apply[StagedBlock], controls: Controls) -> tuple[Tensor, tuple[str, ...]]:
        """Return the gradient, and the blocks that are stepped with it: none of frozen parameters."""
        contributions = () if apply.nonfinite else apply.contributions
        parts, rows = split_blocks([staged.blocks for staged in contributions])
        gradient, present = self.shard.aggregator.aggregate(parts, rows, is_measured=self.schedule.clips)
        if frozen := frozenset(controls.frozen):
            place = self.shard.layout.place
            present = tuple(name for name in present if place[name].block.parameter not in frozen)
        return gradient, present

    def _step(self, apply: Apply[StagedBlock]) -> Reply:
        """Aggregate unless done, log, step, and encode the reply. Raises OSError before anything has changed."""
        measured, controls, shard = self._find_measured(apply), self.membership.controls_at(apply.round), self.shard
        history = self.schedule.history_after(apply, measured.norm if measured else None)
        gradient, present = (measured.gradient, measured.present) if measured else self._aggregate(apply, controls)
        hyper_parameters = controls.override_rates(apply.hyper_parameters)
        loaded = find_loaded([contribution.slots for contribution in apply.contributions])
        if self.storage.has_log:
            logged = None if len(present) == len(shard.layout.places) else present
            data, num_rows = shard.aggregator.encode(logged)
            update = LoggedUpdate(
                apply.round, apply.ranks, hyper_parameters, logged, apply.nonfinite,
                norm=measured.norm if measured else None,
                shard=None if apply.round % DIGEST_ROUNDS else shard.digest(),
                loaded=loaded.describe() if loaded else None, rows=num_rows,
            )  # fmt: skip
            self.storage.log.append(update, [*data, *(loaded.parts() if loaded else ())])
        reach_failpoint("apply.before")
        self._changed.update(dict.fromkeys(shard.apply(gradient, present, hyper_parameters, loaded), apply.round))
        self.metrics.touched_rows.inc(shard.changes.num_newest)
        reach_failpoint("apply.after")
        self.stepped_history = history
        return self._encode(history)

    def _encode(self, history: History) -> Reply:
        """Return the shard's version as the reply for all trainers.

        Its parts are views of the values, which `_revoke_reply` ends; with `max_delay` they are copies, since a member
        may still read a version when its push of a later round arrives.
        """
        round_, shard = self.shard.version, self.shard
        pulled = self._pulled.read(copied=self.schedule.max_delay > 0)
        base = round_ - 1 - (self.schedule.max_delay if shard.layout.sparse else 0)
        rows = shard.encode_changes(base) if shard.layout.sparse else None
        metadata = self._describe_version(history)
        versioned = VersionedBlocks(pulled, dict(self._changed), metadata, base, shard.borrow_deltas(), rows)
        versioned.parts(base)  # the frame for most trainers, made on this thread
        return Reply(round_, versioned.parts(), versioned)

    def _describe_version(self, history: History) -> dict[str, str]:
        skipped = Pulled(self.shard.version, None, history.nonfinite.get(self.shard.version, ()))
        return {**self.metadata(self.shard.version), **skipped.to_metadata()}

    async def snapshot_if_due(self) -> None:
        """Begin a snapshot of the shard's version, if one is due after its round."""
        if self.writer.begin_if_due(self.shard.version):
            with contextlib.suppress(TryAgain):  # the writer has logged the error, and the log has the round
                await self.write_snapshot(self.stepped_history)

    async def _finish_round(self, apply: Apply[StagedBlock], reply: Reply) -> None:
        async with self.waits.condition:
            self._measured = None
            following = self.schedule.finish_apply(self.stepped_history)
            self.waits.note_round(apply.round)  # its readers submit their jobs before the next apply begins
            self._reply, self.waits.since = reply, None
            if self.schedule.batch_barriers:
                self.waits.begin()
            self._start(following)
            self.waits.condition.notify_all()
        self.metrics.rounds.inc()
        if apply.nonfinite:
            self.metrics.skipped.inc()
            log.warning("round skipped: gradients contain NaN or infinity", round=apply.round, trainer=apply.nonfinite)

    async def wait_for_apply(self) -> None:
        """Wait for the running apply."""
        while self._apply_task is not None and not self._apply_task.done():  # an apply may begin the next one
            await asyncio.wait([self._apply_task])

    # ------------------------------------------------------------------ pulls

    async def open_reads(self) -> None:
        """Serve the shard's version, which is complete."""
        self._reply = await self.compute.run(self._encode, self.schedule.history)

    async def get(self, fence: Fence, pull: Pull) -> Reply:
        """Return version `pull.round`, or with `max_delay` a newer one. Raises StaleRound, and as `wait_for` does."""
        reply = await self.wait_for(pull.wait_seconds, lambda: self._find_reply(fence))
        if self.standbys is not None and not self.standbys.acknowledge(reply.round):  # the restored version
            await self.wait_until_held(reply.round, pull.wait_seconds)
            reply = await self.wait_for(0.0, lambda: self._find_reply(fence))
        if pull.names or (self.shard.layout.sparse and not reply.has_rows_since(pull.base)):
            version, chunks = await self.compute.run(self._encode_blocks, pull)
            await self.wait_until_held(version, pull.wait_seconds)
            self.check_fence(fence)
            if not self._serves(version, fence):
                raise StaleRound(f"round {fence.round} has been overwritten", current=version)
            reply = Reply(version, chunks)
        return reply

    def _encode_blocks(self, pull: Pull) -> tuple[Round, Parts]:
        metadata = self._describe_version(self.stepped_history)  # of the values, since jobs run one at a time
        if pull.names:
            return self.shard.version, self.shard.encode(pull.names, metadata, pulled=True)
        return self.shard.version, self.shard.encode_since(pull.base, metadata)

    def _admit_get(self, fence: Fence) -> None:
        self.check_fence(fence)
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
        return await self.wait_for(pull.wait_seconds, lambda: self._find_norm(fence, pull.norm))

    def _find_norm(self, fence: Fence, agreed: AgreedNorm | None) -> NormAnswer | Wait:
        """Return the norm, or why it is not there yet. The first global norm that matches begins the step."""
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
        if not agreed.own.is_same(measured.norm):
            raise NormChanged(f"the gradient of round {fence.round} changed after its norm was sent", round=fence.round)
        if rounds.measuring is not None:
            assert self.installed.max_grad_norm is not None
            coefficient = clip_coefficient(agreed.norm, self.installed.max_grad_norm)
            self._begin(self._apply(rounds.accept_norm(), coefficient))
        return self._describe_wait(fence)

    def _describe_wait(self, fence: Fence) -> Wait:
        """Return the reason why a request waits for the open round. Starts the clock of the wait, unless it runs."""
        if not self.is_readable:
            return self.describe_wait_for_values()
        rounds, since = self.schedule, self.waits.begin()
        missing: Sequence[Rank] = rounds.missing
        standbys = self.standbys.describe_missing() if self.standbys else ""
        cause = name_trainers(missing) or self._disk_trouble or standbys or "its apply"
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
        is_late = not (rounds.is_paused or rounds.applying is not None or is_measuring)
        return Wait(f"round {fence.round}", cause, missing, owed, since if is_late else None, {"round": rounds.open})

    # ------------------------------------------------------------------ checkpoints and inspection

    async def wait_for_newest(self, round_: Round, *, is_over: bool) -> Round:
        """Return the newest round that is applied or being applied; if it is this one, wait until it is applied."""
        if self.schedule.applying is not None and round_ == self.schedule.open and self._apply_task is not None:
            await asyncio.wait([self._apply_task])  # the apply may have decided already that no checkpoint is due
        return self.schedule.applied if self.schedule.applying is None else self.schedule.open

    async def read_after_round(self, round_: Round | None, read: Read[T], wait_seconds: float) -> T:
        """Read the shard right after a round, or as it is, once standbys hold it: see `Run.read_after_round`."""
        rounds = self.schedule
        if round_ is None or (round_ == rounds.applied and rounds.applying is None):  # no update comes between
            return await self.read_now(read)
        if round_ <= rounds.applied:
            raise StaleRound(f"round {round_} is over", current=rounds.applied)
        self.check_failure()
        try:
            await self.waits.wait_for_round(round_, wait_seconds)
        except TimeoutError:
            text = f"round {round_} waits for {name_trainers(rounds.missing) or 'its apply'}"
            raise RoundPending(text, missing=rounds.missing, round=rounds.open) from None
        self.check_failure()
        return await self.compute.run(self._read_at, round_, read)

    def _read_at(self, round_: Round, read: Read[T]) -> T:
        if self.shard.version != round_:
            raise StaleRound(f"round {round_} is over", current=self.shard.version)
        return read(self.metadata(round_))

    # ------------------------------------------------------------------ the end

    async def end_when_applied(self, reason: GradpostError) -> bool:
        """End the run now; a running apply continues. A round whose apply failed counts as being applied."""
        await self.end(reason)
        await self.wait_for_apply()
        return self.schedule.applying is None
