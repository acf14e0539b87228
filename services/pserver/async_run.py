"""An asynchronous run: a queue and a worker for each block, and gets beside them (seeds 000 and 004).

push ──staged until the step is complete──► logged ──► into all its queues at once ──► each block's worker steps it
get  ──waits for clocks (own, or with `max_staleness` everybody's)──────────────────► reads as `read_consistency` says

Contributions are numbered in the order in which they are taken. A checkpoint of number n is made while nothing is taken
and every queue is empty, so that it holds the first n contributions and nothing else; the log has those behind it.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
from collections.abc import Iterable, Iterator, KeysView, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NoReturn, TypeVar

import xxhash

from ps_protocol.errors import Conflict, GradpostError, RoundPending, StaleRound, TryAgain
from ps_protocol.fence import Fence
from ps_protocol.membership import NO_CONTROLS
from ps_protocol.messages import BarrierAnswer, FrozenRounds, InstallMembers, InstallRun, PushAnswer
from ps_protocol.norms import AgreedNorm
from ps_protocol.optimizers import HyperParameters
from ps_protocol.routes import APPLIED_KEY, HISTORY_KEY, STATES_KEY
from ps_protocol.vocabulary import Incarnation, PserverIndex, Rank, Round
from services.runtime.compute import ComputeExecutor
from services.runtime.failpoints import reach_failpoint
from services.runtime.logs import get_logger

from .admission import Admission
from .block_queue import BlockQueue, Update
from .bodies import Body
from .checkpoint_writer import Destination
from .clocks import Clocks
from .contribution import Contribution
from .durable.storage import Restored, RunStorage
from .durable.update_log import Update as LoggedUpdate
from .history import History
from .metrics import PserverMetrics
from .optimizer_blocks import LoadedState
from .pauses import Pauses
from .pulls import Pull, Pulls, compensate_gradient, divide_rates
from .pushes import read_blocks, read_completion, read_computed_on, read_num_slots
from .reading import Reader, make_reader
from .reply import Reply
from .run import FAILURES_OF_TRAINERS, BarrierKind, PserverRun, Read, name_trainers
from .tensors import StagedBlock, digest_contribution, view_bytes

log = get_logger()

T = TypeVar("T")

HOLD_SECONDS = 10.0  # how long a push waits for room before its sender is asked to send it again


@dataclass(frozen=True, slots=True)
class _Wait:
    """A trainer's get that waits for others."""

    step: Round
    since: float  # by the loop's clock


class AsyncRun(PserverRun):
    """Decisions are made by `Clocks`. In this mode a request's round is its trainer's step."""

    def __init__(
        self,
        install: InstallRun,
        index: PserverIndex,
        compute: ComputeExecutor,
        metrics: PserverMetrics,
        storage: RunStorage | None = None,
        restored: Restored | None = None,
    ) -> None:
        super().__init__(install, index, compute, metrics, storage, restored)
        self._rules = install.consistency
        self.clocks: Clocks[StagedBlock] = Clocks(
            {},
            self._rules,
            applied=restored.round if restored else 0,
            steps=restored.history.steps if restored else None,
            # Its log may have lost its end, even if it looks whole; and no trainer is at a step before it was taken.
            is_short=restored is not None,
        )
        self._pulls = Pulls(self._rules.max_delay, self._make_restored_pull() if restored else None)
        self._pauses = Pauses(self._condition)
        self._log_fails_since: float | None = None
        self._queues: dict[str, BlockQueue] = {}  # none before version 0
        self._reader: Reader | None = None
        self.controls = NO_CONTROLS
        self._held: list[KeysView[str]] = []  # blocks of each push that waits for room, the longest waiting first
        self._waits: dict[Rank, _Wait] = {}
        self.set_members(install)

    def _make_restored_pull(self) -> Pull:
        """What every trainer is taken to have pulled from the earlier life of this pserver."""
        values = self.shard.values.clone() if self._rules.compensation == "dc" else None
        return Pull(dict(self.shard.versions), values)

    @property
    def round(self) -> Round:
        """Contributions that are applied completely."""
        return self.clocks.applied

    @property
    def members(self) -> Mapping[Rank, Incarnation]:
        """Those whose clocks count."""
        return self.clocks.members

    @property
    def missing(self) -> list[Rank]:
        """Whom the longest waiting get waits for or, before version 0, for its values."""
        if not self.is_readable:
            return [self.install.uploader]
        _, others = min(self._open_waits(), default=(0.0, ()))
        return list(others)

    @property
    def waiting_seconds(self) -> float:
        """How long it has been waiting."""
        if not self.is_readable:
            return super().waiting_seconds
        if self.controls.is_paused:
            return 0.0
        now = asyncio.get_running_loop().time()
        return max((now - since for since, _ in self._open_waits()), default=0.0)

    def _open_waits(self) -> Iterator[tuple[float, tuple[Rank, ...]]]:
        """Since when, and for whom, as far as the clocks do not allow it yet: who was sent away may never come back."""
        for rank, wait in self._waits.items():
            if others := self._others(rank, self.clocks.find_missing(rank, wait.step)):
                yield wait.since, others

    @staticmethod
    def _others(rank: Rank, waits: Iterable[Rank]) -> tuple[Rank, ...]:
        return tuple(other for other in waits if other != rank)

    @property
    def num_queued(self) -> int:
        """Gradients in all queues."""
        return sum(queue.num_updates for queue in self._queues.values())

    def describe_trainers(self) -> dict[str, Any]:
        """Everybody's clock."""
        return {"clocks": self.clocks.clocks}

    # ------------------------------------------------------------------ push

    def admit_push(self, fence: Fence) -> Admission:
        """Check a push before its body is read, and again before it is staged."""
        self.check_fence(fence)
        self.check_readable()
        return self.clocks.admit(fence.rank, fence.trainer_incarnation, fence.round)

    async def push(self, fence: Fence, body: Body) -> PushAnswer:
        """Validate and stage one bucket; the one that completes a step is answered once all of it is queued.

        Waits for room in the queues; raises TryAgain if there is none for long. The same push again then tries
        again; what is staged stays.
        """
        if STATES_KEY in body.frame.metadata:
            return await self._push_slots(fence, body)
        num_blocks, hyper_parameters = read_completion(body.frame.metadata, self._optimizer)
        num_slots = read_num_slots(body.frame.metadata)
        computed_on = read_computed_on(body.frame.metadata) if num_blocks is not None else None
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
        return await self._staged(fence, staged, len(blocks))

    async def _push_slots(self, fence: Fence, body: Body) -> PushAnswer:
        """Slots that a trainer has loaded, as a part of its contribution."""
        slots = self.read_slots(body)
        if self.admit_push(fence) == "already_applied":
            return PushAnswer(status="already_applied", duplicates=len(slots))
        self._skip_lost_steps(fence)
        return await self._staged(fence, self.clocks.stage_slots(fence.rank, slots), len(slots))

    async def _staged(self, fence: Fence, num_new: int, num_pushed: int) -> PushAnswer:
        complete = self.clocks.staged(fence.rank).is_complete
        if complete:
            await self._queue(fence)
        return PushAnswer(status="staged", staged=num_new, duplicates=num_pushed - num_new, complete=complete)

    def _skip_lost_steps(self, fence: Fence) -> None:
        if num_lost := self.clocks.skip_lost_steps(fence.rank, fence.round):
            log.error(
                "an earlier life of this pserver has taken steps that it did not keep",
                trainer=fence.rank, lost=num_lost, next=fence.round,
            )  # fmt: skip

    async def _queue(self, fence: Fence) -> None:
        """Put the whole contribution into all its queues at once, waiting until every one of them has room.

        It is logged before. If that fails, TryAgain is raised, or once it has failed for long StorageFailed.
        """
        loop = asyncio.get_running_loop()
        begin = loop.time()
        blocks = self.clocks.staged(fence.rank).blocks.keys()
        logging: asyncio.Task[None] | None = None
        async with self._condition:
            self._held.append(blocks)
            try:
                while self.admit_push(fence) == "open":  # else another try of this push has queued it meanwhile
                    self._check_blocks_run(blocks)
                    if self._pauses.may_commit and self._is_ready(blocks):
                        self._pauses.note_commit()
                        has_log = self.storage is not None and self.storage.has_log
                        if has_log or self.clocks.staged(fence.rank).slots:
                            logging = self._pauses.begin_pause(self._log_and_commit(fence.rank))
                        else:
                            self._take(fence.rank)
                        break
                    if loop.time() >= begin + HOLD_SECONDS:
                        if self.controls.is_paused:
                            raise RoundPending("the run is paused by an administrator; send this again")
                        full = self._full_queues(blocks)
                        what = f"the queue of block {full[0]!r} is full" if full else "this pserver is busy"
                        raise TryAgain(f"{what}; send this again", code="queue_full", blocks=full[:10])
                    with self._metrics.held_pushes.track_inprogress(), contextlib.suppress(TimeoutError):
                        async with asyncio.timeout_at(begin + HOLD_SECONDS):
                            await self._condition.wait()
            finally:
                self._held = [other for other in self._held if other is not blocks]
                self._condition.notify_all()  # who stood behind; and an empty contribution advances a clock
        self._metrics.held_seconds.observe(loop.time() - begin)
        if logging is not None:
            await asyncio.shield(logging)  # it belongs to the run: this client may go away

    def _full_queues(self, blocks: Iterable[str]) -> list[str]:
        return [name for name in blocks if not self._queues[name].has_room]

    def _is_ready(self, blocks: KeysView[str]) -> bool:
        """Whether a push could be taken if there were no pauses."""
        return not self.controls.is_paused and not self._full_queues(blocks) and self._is_next(blocks)

    def _has_ready_push(self) -> bool:
        return any(map(self._is_ready, self._held))

    def _is_next(self, blocks: KeysView[str]) -> bool:
        """Whether no push has waited longer for one of these blocks, which would else never find room in all of its."""
        earlier = itertools.takewhile(lambda held: held is not blocks, self._held)
        return all(blocks.isdisjoint(held) for held in earlier)

    def _take(self, rank: Rank) -> None:
        computed_on = self.clocks.staged(rank).computed_on
        assert computed_on is not None  # a complete contribution has said so
        pull = self._pulls.find_pull(rank, computed_on)
        taken = self.clocks.commit(rank)
        taken.contribution.hyper_parameters = self._get_hyper_parameters(taken.contribution)
        for name, block in taken.contribution.blocks.items():
            if self._is_frozen(name):
                self.clocks.count_applied_block(taken)
            else:
                self._queues[name].put_update(Update(taken, block, pull))
        self.shard.version = self.clocks.applied  # if all of its blocks are frozen
        if (destination := self.writer.choose_destination(taken.number)) is not None:
            self._cut(taken.number, destination)

    # ------------------------------------------------------------------ log and checkpoints

    async def _log_and_commit(self, rank: Rank) -> None:
        """Write a complete contribution into the log, and only then into the queues, and its slots into the shard."""
        contribution = self.clocks.staged(rank)
        here = [place.name for place in self.shard.layout.places if place.name in contribution.blocks]
        names = tuple(name for name in here if not self._is_frozen(name))
        life, step = self.clocks.members[rank], self.clocks.open_steps[rank]
        numbers = self._get_hyper_parameters(contribution)
        loaded = LoadedState.from_staged(contribution.slots)
        update = LoggedUpdate(
            self.clocks.num_committed + 1, (rank,), numbers, names, origin=(life, step), counter=rank,
            loaded=loaded.describe() if loaded else None,
        )  # fmt: skip
        try:
            await asyncio.to_thread(self._append, update, [contribution.blocks[name] for name in names], loaded)
        except OSError as error:
            await self._append_failed(self.storage_failed(f"log step {step} of trainer {rank}", error))
        self._log_fails_since = None
        if loaded:
            await self._drain()
            self.check_failure()
            await self._compute.run(self.shard.load_slots, loaded)
        self._take(rank)

    def _get_hyper_parameters(self, contribution: Contribution[StagedBlock]) -> list[HyperParameters]:
        assert contribution.hyper_parameters is not None  # it is complete
        return self.controls.override_rates(contribution.hyper_parameters)

    def _is_frozen(self, name: str) -> bool:
        return self.shard.layout.place[name].block.parameter in self.controls.frozen

    def _append(self, update: LoggedUpdate, blocks: Sequence[StagedBlock], loaded: LoadedState | None) -> None:
        if self.storage is not None:
            behind = loaded.parts() if loaded else ()
            self.storage.append(update, [*(view_bytes(block.tensor().float()) for block in blocks), *behind])

    async def _append_failed(self, failure: GradpostError) -> NoReturn:
        """A full disk gets the round time-out to be emptied; until then the trainers send again."""
        now = asyncio.get_running_loop().time()
        self._metrics.log_failures.inc()
        log.error("the log cannot be written; the push has to come again", error=failure.detail)
        self._log_fails_since = self._log_fails_since or now
        if now - self._log_fails_since >= self.install.round_timeout_seconds:
            await self.fail(failure)
            raise copy.copy(failure)
        raise TryAgain(f"{failure.detail}; send this again")

    def _cut(self, number: Round, destination: Destination) -> None:
        """Make a checkpoint of this number."""
        if self.storage is not None:
            self._pauses.begin_pause(self._drain_and_snapshot(self.storage, number, destination))

    async def _drain_and_snapshot(self, storage: RunStorage, number: Round, destination: Destination) -> None:
        await self._drain()
        if self.failure is not None or not self.is_idle:
            return
        self.clocks.pass_to(number)
        self.shard.version = number
        await self._checkpoint_now(storage, destination)

    async def _drain(self) -> None:
        """Wait until everything that was taken is applied, or never will be."""

        def is_over() -> bool:
            return self.is_idle or not all(queue.is_working for queue in self._queues.values())

        async with self._condition:
            await self._condition.wait_for(is_over)

    @property
    def is_idle(self) -> bool:
        """Whether everything that was taken is applied."""
        return self.num_queued == 0 and all(queue.failure is None for queue in self._queues.values())

    def _history(self) -> History:
        return History(steps=self.clocks.newest_steps)

    async def want_checkpoint(self, round_: Round, *, is_over: bool = False) -> None:
        """See PserverRun; here a round is a number of contributions. Once the run is over it is made at once."""
        storage = self.require_storage()
        if is_over:
            await self.wait_for_writes()
        await self._pauses.wait_for_turn(self._has_ready_push)
        taken = self.clocks.num_committed
        if round_ < taken:
            raise StaleRound(f"contribution {round_} was taken before others", current=taken)
        if round_ > taken and not is_over:
            self.writer.request_round(round_)
        elif round_ not in storage.checkpoints and not self.writer.is_writing(round_):
            self.writer.check_room()
            self._cut(round_, "place")

    async def read_after_round(self, round_: Round | None, make: Read[T], wait_seconds: float) -> T:
        """See PserverRun; pushes wait until what was taken before is applied, and has been looked at."""
        found: list[T] = []

        async def drain_and_look() -> None:
            await self._drain()
            self.check_failure()
            self._check_blocks_run(self._queues)
            cut = {APPLIED_KEY: str(self.clocks.applied), HISTORY_KEY: self._history().to_json()}
            found.append(await self.read_now(make, cut))

        await self._pauses.wait_for_turn_and_pause(self._has_ready_push, drain_and_look)
        return found[0]

    async def _finish_apply(self) -> None:
        await self._pauses.wait_for_turn(self._has_ready_push)
        await self._compute.run(lambda: None)  # jobs run in order: those before it are done

    async def _end_waits(self, reason: GradpostError) -> None:
        """What was taken is applied first, so that the last checkpoint holds all of it."""

        async def drain_and_end() -> None:
            await self._drain()
            await self.end(reason)

        await self._pauses.wait_for_turn_and_pause(self._has_ready_push, drain_and_end)

    def _check_blocks_run(self, names: Iterable[str]) -> None:
        for name in names:
            if (failure := self._queues[name].failure) is not None:
                raise copy.copy(failure)

    def count_barrier(self, fence: Fence, kind: BarrierKind, *, is_finite: bool = True) -> BarrierAnswer:
        """There are no barriers: raises Conflict (`mode_mismatch`)."""
        self.check_fence(fence)
        raise Conflict(
            f"a {kind} barrier belongs to the synchronous mode",
            code="mode_mismatch", expected="no barrier", actual=self._rules.mode,
        )  # fmt: skip

    # ------------------------------------------------------------------ apply

    def _publish(self, reply: Reply) -> None:
        rules = self._rules
        self._queues = {
            name: BlockQueue(name, max_queued=rules.max_queued, apply=self._apply, changed=self._wake_all)
            for name in self.shard.layout.place
        }
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
        numbers = update.committed.contribution.hyper_parameters
        assert numbers is not None  # a complete contribution has them
        place = self.shard.layout.place[name]
        if rules.compensation == "dc" and not place.is_mean:
            assert update.pull.values is not None
            pulled = update.pull.values[place.begin : place.end]
            gradient = compensate_gradient(gradient, self.shard.block(name), pulled, rules.dc_lambda)
        elif rules.compensation == "divide":
            numbers = divide_rates(numbers, staleness)
        reach_failpoint("apply.before")
        self.shard.apply_block(name, gradient, numbers, counter=update.committed.rank)
        reach_failpoint("apply.after")

    async def _wake_all(self) -> None:
        async with self._condition:
            self._condition.notify_all()

    # ------------------------------------------------------------------ get

    def _check_slots(self, fence: Fence, version: Round) -> None:
        """There is no common round: each block is as it is."""

    async def get(
        self, fence: Fence, wait_seconds: float, names: Sequence[str] = (), norm: AgreedNorm | None = None
    ) -> Reply:
        """The newest parameters, once the clocks allow it to a trainer that has pushed step `fence.round`.

        Raises RoundPending if that takes longer than `wait_seconds` (the caller asks again), RoundTimeout when others
        have been waited for during the round time-out.
        """
        self.check_names(names)
        await self._wait_for_clocks(fence, wait_seconds)
        assert self._reader is not None  # there is a version 0
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
                while (until := self._may_wait(fence, begin + wait_seconds)) is not None:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout_at(until):
                            await self._condition.wait()
        except RoundPending:
            raise  # it will ask again, and its patience has begun
        except BaseException:
            self._waits.pop(fence.rank, None)
            raise
        self._waits.pop(fence.rank, None)
        self._metrics.barrier_wait.observe(loop.time() - begin)

    def _may_wait(self, fence: Fence, deadline: float) -> float | None:
        """Until when this get may wait before it looks again; None if it need not. Raises what ends the wait."""
        now = asyncio.get_running_loop().time()
        self.check_fence(fence)
        self.check_member(fence)
        if not self.is_readable:
            self._note_waiting()
            return self._wait_for_initial(now, deadline)
        waits = self.clocks.find_missing(fence.rank, fence.round)
        if not waits:
            return None
        self._check_blocks_run(self._queues)
        others = self._others(fence.rank, waits)
        known = self._waits.get(fence.rank)
        since = known.since if known is not None and known.step == fence.round else now
        patience = since + self.install.round_timeout_seconds
        if others:
            self._waits[fence.rank] = _Wait(fence.round, since)
            if self.controls.is_paused:
                patience = deadline  # nobody is late
            elif now >= patience:
                raise self.make_timeout(others, f"let trainer {fence.rank} go on after step {fence.round}")
        else:
            self._waits.pop(fence.rank, None)
        if now >= deadline:
            raise RoundPending(
                f"step {fence.round} of trainer {fence.rank} waits for {name_trainers(others) or 'its own update'}",
                missing=list(others), clocks=self.clocks.clocks,
            )  # fmt: skip
        return min(deadline, patience) if others else deadline

    def _wait_for_initial(self, now: float, deadline: float) -> float:
        assert self._waiting_since is not None
        patience = self._waiting_since + self.install.round_timeout_seconds
        if now >= patience:
            raise self.make_timeout((self.install.uploader,), "upload the initial values")
        if now >= deadline:
            self.check_readable()
        return min(deadline, patience)

    # ------------------------------------------------------------------ members and the end

    async def _freeze(self) -> FrozenRounds:
        """Nothing has to stand still but the log: each contribution is applied by itself."""
        await self._pauses.wait_for_turn(self._has_ready_push)
        return FrozenRounds(
            applied=self.clocks.num_committed, is_readable=self.is_readable, opens=self.clocks.open_steps
        )

    async def wait_until_changeable(self) -> None:
        """See PserverRun; a contribution that is being logged counts for the members before."""
        await self._pauses.wait_for_turn(self._has_ready_push)

    def set_members(self, message: InstallMembers | InstallRun) -> None:
        """Take over a newer set of members: nobody waits any more for those who are gone."""
        members = message.membership.members
        for rank, incarnation in self.clocks.members.items():
            if members.get(rank) != incarnation:
                self._pulls.forget_trainer(rank)
                self._waits.pop(rank, None)
        self.clocks.install_members(message.membership)
        was_paused, self.controls = self.controls.is_paused, message.membership.newest_controls
        if was_paused:
            self._waits.clear()  # their patience begins anew

    async def end(self, reason: GradpostError) -> None:
        """End the workers, too, and drop what is queued. After a trainer's failure they apply it: see `stop`."""
        if not isinstance(reason, FAILURES_OF_TRAINERS):
            for queue in self._queues.values():
                queue.close()
        await super().end(reason)
        if self._reader is not None:
            self._reader.close(reason)

    async def finish(self) -> None:
        """Let go of the queues, too: their workers refer to this run, and with it to its shard."""
        await super().finish()
        self._queues.clear()

    def _digest_staged(self, digest: xxhash.xxh3_128) -> None:
        digest.update(repr((self.clocks.clocks, [queue.num_updates for queue in self._queues.values()])).encode())
        for rank in sorted(self.clocks.members):
            digest_contribution(digest, (0, rank), self.clocks.staged(rank))
