"""An asynchronous run: a queue and a worker for each block, and pulls beside them (ADR 5).

push ──staged until the step is complete──► logged ──► into all its queues at once ──► each block's worker steps it
pull ──waits for clocks (its own, or with `max_staleness` those of all trainers)─────► reads as `read_consistency` says

Contributions are numbered in the order in which they are committed. A checkpoint of number n is made while none is
being committed and every queue is empty, so that it contains exactly the first n contributions. The log has the later
ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NoReturn, TypeVar

import xxhash

from ps_protocol.errors import Conflict, GradpostError, RoundPending, StaleRound, TryAgain
from ps_protocol.fence import Fence
from ps_protocol.membership import NO_CONTROLS, FrozenRounds, InstallMembers, InstallRun
from ps_protocol.messages import BarrierAnswer, PushAnswer
from ps_protocol.norms import AgreedNorm
from ps_protocol.optimizers import HyperParameters
from ps_protocol.routes import APPLIED_KEY, HISTORY_KEY, STATES_KEY
from ps_protocol.vocabulary import Incarnation, Rank, Round
from services.runtime.failpoints import reach_failpoint
from services.runtime.logs import get_logger

from .admission import Admission
from .block_queue import BlockQueue, Update
from .bodies import Body
from .checkpoint_writer import Destination
from .clocks import Clocks
from .contribution import Contribution
from .durable.storage import RunStorage
from .durable.update_log import Update as LoggedUpdate
from .history import History
from .optimizer_blocks import LoadedState
from .pauses import HeldPushes, Pauses
from .pulls import Pull, Pulls, compensate_gradient, divide_rates
from .pushes import read_blocks, read_completion, read_computed_on, read_num_slots
from .reading import Reader, make_reader
from .reply import Reply
from .run import FAILURES_OF_TRAINERS, BarrierKind, PserverRun, Read, RunSetup, name_trainers
from .tensors import StagedBlock, digest_contribution, view_bytes

log = get_logger()

T = TypeVar("T")

HOLD_SECONDS = 10.0  # a push that has waited for room for so long has to be sent again


@dataclass(frozen=True, slots=True)
class _Wait:
    """A trainer's pull that waits for others, `since` by the loop's clock."""

    step: Round
    since: float


class AsyncRun(PserverRun):
    """A run in which `Clocks` makes the decisions. The round of a request is its trainer's step."""

    def __init__(self, setup: RunSetup) -> None:
        super().__init__(setup)
        restored = setup.restored
        self._rules = setup.install.consistency
        self.clocks: Clocks[StagedBlock] = Clocks(
            {},
            self._rules,
            applied=restored.round if restored else 0,
            steps=restored.history.steps if restored else None,
            # Its log may have lost its end, even if it looks whole; and no trainer is at an uncommitted step.
            is_short=restored is not None,
        )
        self._pulls = Pulls(self._rules.max_delay, self._make_restored_pull() if restored else None)
        self._queues: dict[str, BlockQueue] = {}  # none before version 0
        self._held = HeldPushes(self._queues)
        self._pauses = Pauses(self._condition, self._held)
        self._log_fails_since: float | None = None
        self._reader: Reader | None = None
        self.controls = NO_CONTROLS
        self._waits: dict[Rank, _Wait] = {}
        self.set_members(setup.install)

    def _make_restored_pull(self) -> Pull:
        """Return the pull that the trainers of an earlier incarnation of this pserver are assumed to have made."""
        values = self.shard.values.clone() if self._rules.compensation == "dc" else None
        return Pull(dict(self.shard.versions), values)

    @property
    def round(self) -> Round:
        """The number of contributions of which every block is applied."""
        return self.clocks.applied

    @property
    def members(self) -> Mapping[Rank, Incarnation]:
        """The trainers whose clocks count."""
        return self.clocks.members

    @property
    def missing(self) -> list[Rank]:
        """The ranks that the longest waiting pull waits for or, before version 0, the uploader of its values."""
        if not self.is_readable:
            return [self.install.uploader]
        _, others = min(self._open_waits(), default=(0.0, ()))
        return list(others)

    @property
    def waiting_seconds(self) -> float:
        """The seconds for which the longest waiting pull has been waiting."""
        if not self.is_readable:
            return super().waiting_seconds
        if self.controls.is_paused:
            return 0.0
        now = asyncio.get_running_loop().time()
        return max((now - since for since, _ in self._open_waits()), default=0.0)

    def _open_waits(self) -> Iterator[tuple[float, tuple[Rank, ...]]]:
        """Yield the beginning and the missing ranks of each pull that the clocks still hold back.

        A trainer whose pull was answered with RoundPending may never come back, so the clocks decide.
        """
        for rank, wait in self._waits.items():
            if others := self._others(rank, self.clocks.find_missing(rank, wait.step)):
                yield wait.since, others

    @staticmethod
    def _others(rank: Rank, missing: Iterable[Rank]) -> tuple[Rank, ...]:
        return tuple(other for other in missing if other != rank)

    @property
    def num_queued(self) -> int:
        """Gradients in all queues."""
        return sum(queue.num_updates for queue in self._queues.values())

    def describe_trainers(self) -> dict[str, Any]:
        """Return the clocks of all trainers."""
        return {"clocks": self.clocks.clocks}

    # ------------------------------------------------------------------ pushes

    def admit_push(self, fence: Fence) -> Admission:
        """Check a push before its body is read, and again before it is staged."""
        self.check_fence(fence)
        self.check_readable()
        return self.clocks.admit(fence.rank, fence.trainer_incarnation, fence.round)

    async def push(self, fence: Fence, body: Body) -> PushAnswer:
        """Validate and stage one bucket; the one that completes a step is answered once all of it is queued.

        Waits for room in the queues. Raises TryAgain if there is none for long: all stays staged, and the same push
        has to be sent again.
        """
        metadata = body.frame.metadata
        if STATES_KEY in metadata:
            slots = self.read_slots(body)
            if self.admit_push(fence) == "already_applied":
                return PushAnswer(status="already_applied", duplicates=len(slots))
            self._skip_lost_steps(fence)
            return await self._queue_if_complete(fence, self.clocks.stage_slots(fence.rank, slots), len(slots))
        num_blocks, hyper_parameters = read_completion(metadata, self._optimizer)
        num_slots = read_num_slots(metadata)
        computed_on = read_computed_on(metadata) if num_blocks is not None else None
        blocks = read_blocks(body, self.shard.layout)
        await self.check_finite(fence, blocks)
        if self.admit_push(fence) == "already_applied":
            return PushAnswer(status="already_applied", duplicates=len(blocks))
        self._skip_lost_steps(fence)
        self._check_blocks_run(blocks)
        if computed_on is not None:
            self.clocks.check_delay(fence.rank, fence.round, computed_on)
            self._pulls.find_pull(fence.rank, computed_on)
        staged = self.clocks.stage_blocks(fence.rank, blocks, num_blocks, hyper_parameters, computed_on, num_slots)
        self.pushed_bytes += len(body.buffer)
        self._metrics.staged_blocks.inc(staged)
        return await self._queue_if_complete(fence, staged, len(blocks))

    async def _queue_if_complete(self, fence: Fence, num_staged: int, num_pushed: int) -> PushAnswer:
        complete = self.clocks.staged(fence.rank).is_complete
        if complete:
            await self._queue(fence)
        return PushAnswer(status="staged", staged=num_staged, duplicates=num_pushed - num_staged, complete=complete)

    def _skip_lost_steps(self, fence: Fence) -> None:
        if num_lost := self.clocks.skip_lost_steps(fence.rank, fence.round):
            log.error(
                "steps that an earlier incarnation of this pserver acknowledged are lost",
                trainer=fence.rank, lost=num_lost, next=fence.round,
            )  # fmt: skip

    async def _queue(self, fence: Fence) -> None:
        """Log the whole contribution and put it into all its queues at once, waiting until all of them have room.

        Raises TryAgain if it cannot be logged, and StorageFailed once that has failed for the round time-out.
        """
        loop = asyncio.get_running_loop()
        begin = loop.time()
        blocks = self.clocks.staged(fence.rank).blocks.keys()
        logging: asyncio.Task[None] | None = None
        async with self._condition:
            try:
                with self._held.hold(blocks):
                    while self.admit_push(fence) == "open":  # else a repeated push has queued it meanwhile
                        self._check_blocks_run(blocks)
                        if self._pauses.may_commit and self._held.is_ready(blocks):
                            self._pauses.note_commit()
                            has_log = self.storage is not None and self.storage.has_log
                            if has_log or self.clocks.staged(fence.rank).slots:
                                logging = self._pauses.begin_pause(self._log_and_commit(fence.rank))
                            else:
                                self._commit(fence.rank)
                            break
                        if loop.time() >= begin + HOLD_SECONDS:
                            raise self._make_hold_error(blocks)
                        with self._metrics.held_pushes.track_inprogress(), contextlib.suppress(TimeoutError):
                            async with asyncio.timeout_at(begin + HOLD_SECONDS):
                                await self._condition.wait()
            finally:
                self._condition.notify_all()  # pushes that waited behind; and an empty contribution advances a clock
        self._metrics.held_seconds.observe(loop.time() - begin)
        if logging is not None:
            await asyncio.shield(logging)  # it belongs to the run: this client may disconnect

    def _make_hold_error(self, blocks: Iterable[str]) -> GradpostError:
        if self.controls.is_paused:
            return RoundPending("the run is paused by an administrator; send this again")
        full = self._held.find_full_queues(blocks)
        what = f"the queue of block {full[0]!r} is full" if full else "this pserver is busy"
        return TryAgain(f"{what}; send this again", code="queue_full", blocks=full[:10])

    def _check_blocks_run(self, names: Iterable[str]) -> None:
        for name in names:
            if (failure := self._queues[name].failure) is not None:
                raise copy.copy(failure)

    def _commit(self, rank: Rank) -> None:
        computed_on = self.clocks.staged(rank).computed_on
        assert computed_on is not None  # it came with the last push
        pull = self._pulls.find_pull(rank, computed_on)
        committed = self.clocks.commit(rank)
        committed.contribution.hyper_parameters = self._get_hyper_parameters(committed.contribution)
        for name, block in committed.contribution.blocks.items():
            if self._is_frozen(name):
                self.clocks.count_applied_block(committed)
            else:
                self._queues[name].put_update(Update(committed, block, pull))
        self.shard.version = self.clocks.applied  # if all of its blocks are frozen
        if (destination := self.writer.choose_destination(committed.number)) is not None:
            self._begin_checkpoint(committed.number, destination)

    def _get_hyper_parameters(self, contribution: Contribution[StagedBlock]) -> list[HyperParameters]:
        assert contribution.hyper_parameters is not None  # it is complete
        return self.controls.override_rates(contribution.hyper_parameters)

    def _is_frozen(self, name: str) -> bool:
        return self.shard.layout.place[name].block.parameter in self.controls.frozen

    def count_barrier(self, fence: Fence, kind: BarrierKind, *, is_finite: bool = True) -> BarrierAnswer:
        """Raise Conflict (`mode_mismatch`), since these modes have no barriers."""
        self.check_fence(fence)
        raise Conflict(
            f"a {kind} barrier belongs to the synchronous mode",
            code="mode_mismatch", expected="no barrier", actual=self._rules.mode,
        )  # fmt: skip

    # ------------------------------------------------------------------ log and checkpoints

    async def _log_and_commit(self, rank: Rank) -> None:
        """Log a complete contribution, and then commit it to the queues, and its optimizer state to the shard."""
        contribution = self.clocks.staged(rank)
        present = [place.name for place in self.shard.layout.places if place.name in contribution.blocks]
        names = tuple(name for name in present if not self._is_frozen(name))
        origin = self.clocks.members[rank], self.clocks.open_steps[rank]
        hyper_parameters = self._get_hyper_parameters(contribution)
        loaded = LoadedState.from_staged(contribution.slots)
        update = LoggedUpdate(
            self.clocks.num_committed + 1, (rank,), hyper_parameters, names, origin=origin, counter=rank
        )
        try:
            await asyncio.to_thread(self._append, update, [contribution.blocks[name] for name in names], loaded)
        except OSError as error:
            await self._handle_failed_append(self.storage_failed(f"log step {origin[1]} of trainer {rank}", error))
        self._log_fails_since = None
        if loaded:
            await self._drain()
            self.check_failure()
            await self._compute.run(self.shard.load_slots, loaded)
        self._commit(rank)

    def _append(self, update: LoggedUpdate, blocks: Sequence[StagedBlock], loaded: LoadedState | None) -> None:
        if self.storage is not None:
            self.storage.append(update, [view_bytes(block.tensor().float()) for block in blocks], loaded)

    async def _handle_failed_append(self, failure: GradpostError) -> NoReturn:
        """Make the trainers send again, until the round time-out for a full disk has passed."""
        now = asyncio.get_running_loop().time()
        self._metrics.log_failures.inc()
        log.error("the log cannot be written; the push has to be sent again", error=failure.detail)
        self._log_fails_since = self._log_fails_since or now
        if now - self._log_fails_since >= self.install.round_timeout_seconds:
            await self.fail(failure)
            raise copy.copy(failure)
        raise TryAgain(f"{failure.detail}; send this again")

    def _begin_checkpoint(self, number: Round, destination: Destination) -> None:
        if self.storage is not None:
            self._pauses.begin_pause(self._drain_and_snapshot(self.storage, number, destination))

    async def _drain_and_snapshot(self, storage: RunStorage, number: Round, destination: Destination) -> None:
        await self._drain()
        if self.failure is not None or not self.is_idle:
            return
        self.clocks.set_committed(number)
        self.shard.version = number
        await self._checkpoint_now(storage, destination)

    async def _drain(self) -> None:
        """Wait until everything that was committed is applied, or a block has stopped."""

        def is_over() -> bool:
            return self.is_idle or not all(queue.is_working for queue in self._queues.values())

        async with self._condition:
            await self._condition.wait_for(is_over)

    @property
    def is_idle(self) -> bool:
        """True if everything that was committed is applied."""
        return self.num_queued == 0 and all(queue.failure is None for queue in self._queues.values())

    def _history(self) -> History:
        return History(steps=self.clocks.newest_steps)

    async def want_checkpoint(self, round_: Round, *, is_over: bool = False) -> None:
        """Write a checkpoint after this many contributions: see PserverRun."""
        storage = self.require_storage()
        if is_over:
            await self.wait_for_writes()
        await self._pauses.wait_for_turn()
        committed = self.clocks.num_committed
        if round_ < committed:
            raise StaleRound(f"later contributions than {round_} have been committed", current=committed)
        if round_ > committed and not is_over:
            self.writer.request_round(round_)
        elif round_ not in storage.checkpoints and not self.writer.is_writing(round_):
            self.writer.check_room()
            self._begin_checkpoint(round_, "place")

    async def read_after_round(self, round_: Round | None, read: Read[T], wait_seconds: float) -> T:
        """Read the shard between two contributions: see PserverRun. Pushes wait meanwhile."""
        found: list[T] = []

        async def drain_and_read() -> None:
            await self._drain()
            self.check_failure()
            self._check_blocks_run(self._queues)
            extra = {APPLIED_KEY: str(self.clocks.applied), HISTORY_KEY: self._history().to_json()}
            found.append(await self.read_now(read, extra))

        await self._pauses.wait_for_turn_and_pause(drain_and_read)
        return found[0]

    async def _finish_apply(self) -> None:
        await self._pauses.wait_for_turn()
        await self._compute.run(lambda: None)  # jobs run in order: the earlier ones are done

    async def _end_waits(self, reason: GradpostError) -> None:
        """Apply everything that was committed first, so that the last checkpoint contains all of it."""

        async def drain_and_end() -> None:
            await self._drain()
            await self.end(reason)

        await self._pauses.wait_for_turn_and_pause(drain_and_end)

    # ------------------------------------------------------------------ apply

    def _open_reads(self, reply: Reply) -> None:
        rules = self._rules
        for name in self.shard.layout.place:
            self._queues[name] = BlockQueue(name, max_queued=rules.max_queued, apply=self._apply, changed=self._notify)
        keep_values = rules.compensation == "dc"
        self._reader = make_reader(
            rules.read_consistency, self.shard, self._compute, self._queues, keep_values=keep_values
        )

    async def _apply(self, name: str, update: Update) -> None:
        begin = perf_counter()
        await self._compute.run(self._step, name, update)
        self._metrics.apply_seconds.observe(perf_counter() - begin)
        before = self.clocks.applied
        self.clocks.count_applied_block(update.committed)
        self.shard.version = self.clocks.applied
        self._metrics.rounds.inc(self.clocks.applied - before)
        self._metrics.updates.inc()

    def _step(self, name: str, update: Update) -> None:
        """Step one block, on the compute thread."""
        rules = self._rules
        staleness = self.shard.versions[name] - update.pull.versions[name]
        self._metrics.staleness.observe(staleness)
        gradient = update.block.tensor()
        hyper_parameters = update.committed.contribution.hyper_parameters
        assert hyper_parameters is not None  # it is complete
        place = self.shard.layout.place[name]
        if rules.compensation == "dc" and not place.is_mean:
            assert update.pull.values is not None
            pulled = update.pull.values[place.begin : place.end]
            gradient = compensate_gradient(gradient, self.shard.block(name), pulled, rules.dc_lambda)
        elif rules.compensation == "divide":
            hyper_parameters = divide_rates(hyper_parameters, staleness)
        reach_failpoint("apply.before")
        self.shard.apply_block(name, gradient, hyper_parameters, counter=update.committed.rank)
        reach_failpoint("apply.after")

    # ------------------------------------------------------------------ pulls

    def _check_slots(self, fence: Fence, version: Round) -> None:
        """Accept any version, since there is no common round."""

    async def get(
        self, fence: Fence, wait_seconds: float, names: Sequence[str] = (), norm: AgreedNorm | None = None
    ) -> Reply:
        """Return the newest parameters, once the clocks allow it to a trainer that has pushed step `fence.round`.

        Raises RoundPending after `wait_seconds` (the caller asks again), RoundTimeout when other trainers have been
        missing for the round time-out.
        """
        self.check_names(names)
        await self._wait_for_clocks(fence, wait_seconds)
        assert self._reader is not None  # version 0 exists
        metadata = {**self._metadata(fence.round), APPLIED_KEY: str(self.clocks.applied)}
        reading = await self._reader.read(names or None, metadata)
        self.check_fence(fence)
        self.check_member(fence)
        self._pulls.record_pull(fence.rank, fence.round, reading.pull)
        return Reply(fence.round, reading.chunks)

    async def _wait_for_clocks(self, fence: Fence, wait_seconds: float) -> None:
        loop = asyncio.get_running_loop()
        begin = loop.time()
        try:
            async with self._condition:
                while (until := self._find_wait_end(fence, begin + wait_seconds)) is not None:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout_at(until):
                            await self._condition.wait()
        except RoundPending:
            raise  # the trainer asks again, and its round time-out goes on
        except BaseException:
            self._waits.pop(fence.rank, None)
            raise
        self._waits.pop(fence.rank, None)
        self._metrics.barrier_wait.observe(loop.time() - begin)

    def _find_wait_end(self, fence: Fence, deadline: float) -> float | None:
        """Return until when a pull waits before the clocks are checked again, or None if it may be answered now.

        Raises the error that ends the wait.
        """
        now = asyncio.get_running_loop().time()
        self.check_fence(fence)
        self.check_member(fence)
        if not self.is_readable:
            self._note_waiting()
            return self._find_initial_wait_end(now, deadline)
        missing = self.clocks.find_missing(fence.rank, fence.round)
        if not missing:
            return None
        self._check_blocks_run(self._queues)
        others = self._others(fence.rank, missing)
        known = self._waits.get(fence.rank)
        since = known.since if known is not None and known.step == fence.round else now
        timeout_at = since + self.install.round_timeout_seconds
        if others:
            self._waits[fence.rank] = _Wait(fence.round, since)
            if self.controls.is_paused:
                timeout_at = deadline  # no trainer is late
            elif now >= timeout_at:
                raise self.make_timeout(others, f"let trainer {fence.rank} go on after step {fence.round}")
        else:
            self._waits.pop(fence.rank, None)
        if now >= deadline:
            raise RoundPending(
                f"step {fence.round} of trainer {fence.rank} waits for {name_trainers(others) or 'its own update'}",
                missing=list(others), clocks=self.clocks.clocks,
            )  # fmt: skip
        return min(deadline, timeout_at) if others else deadline

    def _find_initial_wait_end(self, now: float, deadline: float) -> float:
        assert self._waiting_since is not None
        timeout_at = self._waiting_since + self.install.round_timeout_seconds
        if now >= timeout_at:
            raise self.make_timeout((self.install.uploader,), "upload the initial values")
        if now >= deadline:
            self.check_readable()
        return min(deadline, timeout_at)

    # ------------------------------------------------------------------ members and the end

    async def freeze(self) -> FrozenRounds:
        """Wait for the contribution that is being logged; contributions are applied one by one, and go on."""
        self.check_failure()
        await self._pauses.wait_for_turn()
        return FrozenRounds(
            applied=self.clocks.num_committed, is_readable=self.is_readable, opens=self.clocks.open_steps
        )

    async def wait_until_changeable(self) -> None:
        """Wait for the contribution that is being logged, which counts for the members before the change."""
        await self._pauses.wait_for_turn()

    def set_members(self, message: InstallMembers | InstallRun) -> None:
        """Replace the set of members by a newer one: trainers that left are not waited for any more."""
        members = message.membership.members
        for rank, incarnation in self.clocks.members.items():
            if members.get(rank) != incarnation:
                self._pulls.forget_trainer(rank)
                self._waits.pop(rank, None)
        self.clocks.install_members(message.membership)
        was_paused, self.controls = self.controls.is_paused, message.membership.newest_controls
        self._held.is_paused = self.controls.is_paused
        if was_paused:
            self._waits.clear()  # their round time-outs begin again

    async def end(self, reason: GradpostError) -> None:
        """End the workers, too, and drop the queued updates, unless a trainer's failure ends the run: see `stop`."""
        if not isinstance(reason, FAILURES_OF_TRAINERS):
            for queue in self._queues.values():
                queue.close()
        await super().end(reason)
        if self._reader is not None:
            self._reader.close(reason)

    async def finish(self) -> None:
        """Drop the queues, too: their workers refer to this run, and with it to its shard."""
        await super().finish()
        self._queues.clear()

    def _digest_staged(self, digest: xxhash.xxh3_128) -> None:
        digest.update(repr((self.clocks.clocks, [queue.num_updates for queue in self._queues.values()])).encode())
        for rank in sorted(self.clocks.members):
            digest_contribution(digest, (0, rank), self.clocks.staged(rank))
