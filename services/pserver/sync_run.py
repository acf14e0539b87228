"""A synchronous run: rounds between batch and fetch barriers, guarded by one `asyncio.Condition`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import xxhash

from ps_protocol.errors import Ended, GradpostError, NormChanged, NotReady, RoundPending, StaleRound, TryAgain
from ps_protocol.fence import Fence
from ps_protocol.membership import FrozenRounds, InstallMembers, InstallRun
from ps_protocol.messages import BarrierAnswer, NormAnswer, PushAnswer
from ps_protocol.norms import AgreedNorm, clip_coefficient
from ps_protocol.routes import STATES_KEY
from ps_protocol.vocabulary import Incarnation, Rank, Round
from services.runtime.logs import get_logger

from .admission import Admission
from .bodies import Body
from .checkpoint_writer import Destination, Write
from .history import History
from .pushes import read_blocks, read_completion, read_num_slots
from .reply import Reply
from .round_work import Measured, RoundWork
from .rounds import Apply, Measure, Rounds
from .run import BarrierKind, PserverRun, Read, RunSetup, name_trainers
from .tensors import StagedBlock, digest_contribution

log = get_logger()

T = TypeVar("T")

LOG_RETRY_SECONDS = 0.5  # between tries to write to a full disk


class SyncRun(PserverRun):
    """A run in which `Rounds` makes the decisions. The reply of the applied round is encoded once, for all trainers."""

    def __init__(self, setup: RunSetup) -> None:
        super().__init__(setup)
        install, restored = setup.install, setup.restored
        self.rounds: Rounds[StagedBlock] = Rounds(
            install.membership.members,
            install.consistency.max_delay,
            applied=restored.round if restored else 0,
            history=restored.history if restored else None,
            clips=install.max_grad_norm is not None,
        )
        self.membership = install.membership
        # With `max_delay` a member may still read a version when its push of a later round arrives.
        self._work = RoundWork(self.shard, self.storage, self._identity, borrows=not self.rounds.max_delay)
        self._reply: Reply | None = None  # of the applied round, once it may be read
        self._measured: Measured | None = None  # waits for its global norm, or is being applied
        self._apply_task: asyncio.Task[None] | None = None
        self._has_warned_about_disagreement = False
        self._disk_trouble = ""  # why the log of the open round is not written yet
        self.set_members(install)  # last: it may begin an apply

    @property
    def round(self) -> Round:
        """The newest applied round."""
        return self.rounds.applied

    @property
    def open_round(self) -> Round:
        """The round that trainers push for."""
        return self.rounds.open

    @property
    def members(self) -> Mapping[Rank, Incarnation]:
        """The trainers whose barriers count."""
        return self.rounds.members

    @property
    def missing(self) -> list[Rank]:
        """The ranks missing at the open batch barrier or, before version 0, the uploader of its values."""
        return self.rounds.missing if self.is_readable else [self.install.uploader]

    @property
    def waiting_seconds(self) -> float:
        """The seconds for which requests have been waiting for the missing trainers; 0 while the run is paused."""
        return 0.0 if self.rounds.is_paused else super().waiting_seconds

    def describe_trainers(self) -> dict[str, Any]:
        """Return the barriers of the open round."""
        rounds = self.rounds
        return {
            "batch_barriers": tuple(sorted(rounds.batch_barriers)),
            "fetch_barriers": tuple(sorted(rounds.fetch_barriers)),
            "participants": rounds.history.participants.get(rounds.applied, ()),
        }

    # ------------------------------------------------------------------ pushes and barriers

    def admit_push(self, fence: Fence) -> Admission:
        """Check a push before its body is read, and again before it is staged."""
        self.check_fence(fence)
        self.check_readable()  # nothing may be stepped before version 0 can be read
        return self.rounds.admit(fence.rank, fence.trainer_incarnation, fence.round)

    async def push(self, fence: Fence, body: Body) -> PushAnswer:
        """Validate and stage one bucket. A repeated push gets the same answer; an error changes nothing."""
        metadata = body.frame.metadata
        if STATES_KEY in metadata:
            slots = self.read_slots(body)
            if self.admit_push(fence) == "already_applied":
                return PushAnswer(status="already_applied", duplicates=len(slots))
            staged = self.rounds.stage_slots(fence.rank, slots, fence.round)
            return self._answer_push(fence, staged, len(slots))
        num_blocks, hyper_parameters = read_completion(metadata, self._optimizer)
        num_slots = read_num_slots(metadata)
        blocks = read_blocks(body, self.shard.layout)
        is_finite = await self.check_finite(fence, blocks)
        if self.admit_push(fence) == "already_applied":
            return PushAnswer(status="already_applied", duplicates=len(blocks), finite=is_finite)
        staged = self.rounds.stage_blocks(fence.rank, blocks, num_blocks, hyper_parameters, fence.round, num_slots)
        self.pushed_bytes += len(body.buffer)
        self._metrics.staged_blocks.inc(staged)
        return self._answer_push(fence, staged, len(blocks), is_finite=is_finite)

    def _answer_push(self, fence: Fence, num_staged: int, num_pushed: int, *, is_finite: bool = True) -> PushAnswer:
        complete = self.rounds.is_complete(fence.rank, fence.round)
        return PushAnswer(
            status="staged", staged=num_staged, duplicates=num_pushed - num_staged, complete=complete, finite=is_finite
        )

    def count_barrier(self, fence: Fence, kind: BarrierKind, *, is_finite: bool = True) -> BarrierAnswer:
        """Count a barrier, and start the apply that it completes. Never waits."""
        self.check_fence(fence)
        rank, incarnation = fence.rank, fence.trainer_incarnation
        if kind == "batch":
            if self.install.nonfinite != "skip_round":
                is_finite = True  # other policies ignore the trainer's verdict
            order = self.rounds.count_batch_barrier(rank, incarnation, fence.round, is_finite=is_finite)
            if self.rounds.batch_barriers:
                self._note_waiting()
        else:
            order = self.rounds.count_fetch_barrier(rank, incarnation, fence.round)
        self._start(order)
        return BarrierAnswer(round=self.rounds.open, missing=tuple(self.rounds.missing), notice=self.notice)

    # ------------------------------------------------------------------ members

    async def freeze(self) -> FrozenRounds:
        """Wait for a running apply, and from then on count no barrier until members are installed."""
        self.check_failure()
        async with self._condition:
            self.rounds.is_frozen = True  # so that no apply follows the running one
            while self.rounds.applying is not None:
                self.check_failure()
                await self._condition.wait()
            return self.rounds.freeze().model_copy(update={"is_readable": self.is_readable})

    async def wait_until_changeable(self) -> None:
        """Return at once, since a running apply does not depend on the members."""

    def set_members(self, message: InstallMembers | InstallRun) -> None:
        """Replace the set of members by a newer one, which may complete the batch barrier."""
        was_paused = self.rounds.is_paused
        self.membership = message.membership
        self._start(self.rounds.install_members(message.membership))
        if was_paused or not self.rounds.batch_barriers:
            self._waiting_since = None  # the waiting trainers have left, or waited for an administrator

    # ------------------------------------------------------------------ apply

    def _start(self, order: Apply[StagedBlock] | Measure[StagedBlock] | None) -> None:
        if order is None:
            return
        if self._waiting_since is not None:
            self._metrics.barrier_wait.observe(asyncio.get_running_loop().time() - self._waiting_since)
        self._begin(self._measure(order.apply) if isinstance(order, Measure) else self._apply(order))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        # A task of the run, not of the request that completed the barrier: that client may disconnect.
        self._apply_task = asyncio.create_task(work, name=f"apply round {self.rounds.open}")

    @contextlib.asynccontextmanager
    async def _fail_on_error(self, round_: Round) -> AsyncIterator[None]:
        """End the run for all trainers with an error that is raised in the block."""
        try:
            yield
        except GradpostError as error:
            await self.fail(error)
        except Exception as error:
            log.exception("apply failed", round=round_)
            await self.fail(
                Ended(f"the optimizer of pserver {self.index} failed in round {round_}: {error}", code="apply_failed")
            )

    async def _measure(self, apply: Apply[StagedBlock]) -> None:
        async with self._fail_on_error(apply.round):
            measured = await self._compute.run(self._work.measure, apply, self.membership.controls_at(apply.round))
            async with self._condition:
                if self.rounds.measuring is apply:  # else the members have changed meanwhile
                    self._measured = measured
                    self._waiting_since = None
                    self._condition.notify_all()

    def _find_measured(self, apply: Apply[StagedBlock] | None) -> Measured | None:
        return self._measured if self._measured is not None and self._measured.apply is apply else None

    async def _apply(self, apply: Apply[StagedBlock], coefficient: float = 1.0) -> None:
        self._warn_about_disagreement(apply)
        async with self._fail_on_error(apply.round):
            with self._metrics.apply_seconds.time():
                await self._revoke_reply()
                if coefficient != 1:
                    await self._compute.run(self._work.clip, coefficient)
                reply = await self._step_when_logged(apply)
            await self._finish_round(apply, reply)

    async def _revoke_reply(self) -> None:
        """Wait for the last readers of the reply, whose values are about to change, and end the slow ones.

        All members have read it, since their fetch barriers have arrived. With `max_delay` it is a copy.
        """
        if self.rounds.max_delay:
            return
        reply, self._reply = self._reply, None
        if reply is not None:
            await reply.revoke()

    async def _step_when_logged(self, apply: Apply[StagedBlock]) -> Reply:
        """Step as soon as the disk accepts the update. A full disk fails the run after the round time-out."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.install.round_timeout_seconds
        while True:
            try:
                reply, checkpoint = await self._compute.run(self._step, apply)
            except OSError as error:
                self._metrics.log_failures.inc()
                if loop.time() >= deadline or self.failure is not None:
                    raise self.storage_failed(f"log round {apply.round}", error) from error
                log.error("the log cannot be written; the round waits", round=apply.round, error=str(error))
                self._disk_trouble = f"the disk of pserver {self.index}: {error}"
                await asyncio.sleep(LOG_RETRY_SECONDS)
            else:
                self._disk_trouble = ""
                if checkpoint is not None:
                    self.writer.begin_write(apply.round, *checkpoint)
                return reply

    def _step(self, apply: Apply[StagedBlock]) -> tuple[Reply, tuple[Destination, Write] | None]:
        """Step on the compute thread. Returns the reply, and the writer of a checkpoint if one is due."""
        measured = self._find_measured(apply)
        history = self.rounds.history_after(apply, measured.norm if measured else None)
        reply = self._work.step(apply, self.membership.controls_at(apply.round), measured, history.outcome(apply.round))
        return reply, self._snapshot_if_due(apply, history)

    def _snapshot_if_due(self, apply: Apply[StagedBlock], history: History) -> tuple[Destination, Write] | None:
        destination = self.writer.choose_destination(apply.round)
        if self.storage is None or destination is None:
            return None
        return destination, self.storage.snapshot(self.shard, history, is_own=destination == "folder")

    async def _finish_round(self, apply: Apply[StagedBlock], reply: Reply) -> None:
        async with self._condition:
            measured, self._measured = self._find_measured(apply), None
            following = self.rounds.finish_apply(measured.norm if measured else None)
            self._work.captures.expire_rounds(apply.round)
            self._reply = reply
            self._waiting_since = None
            if self.rounds.batch_barriers:
                self._note_waiting()
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
                if not self._has_warned_about_disagreement:
                    self._has_warned_about_disagreement = True
                    log.warning(
                        "trainers push different hyper-parameters; the lowest rank's count",
                        round=apply.round, used=f"trainer {apply.ranks[0]}", ignored=f"trainer {rank}",
                    )  # fmt: skip

    @property
    def is_idle(self) -> bool:
        """True if no round is being applied. A round whose apply failed counts as being applied."""
        return self.rounds.applying is None

    async def _finish_apply(self) -> None:
        while self._apply_task is not None and not self._apply_task.done():  # one may have begun the next
            await asyncio.wait([self._apply_task])

    async def end(self, reason: GradpostError) -> None:
        """End the waits for captures, too."""
        await super().end(reason)
        self._work.captures.end(reason)

    # ------------------------------------------------------------------ checkpoints and inspection

    def _encode(self, round_: Round) -> Reply:
        return self._work.encode(round_, self.rounds.history.outcome(round_))

    def _open_reads(self, reply: Reply) -> None:
        self._reply = reply

    def _history(self) -> History:
        return self.rounds.history.copy()

    async def want_checkpoint(self, round_: Round, *, is_over: bool = False) -> None:
        """Write a checkpoint after this round: see PserverRun."""
        storage = self.require_storage()
        if is_over:
            await self.writer.wait_for_writes()
        if self.rounds.applying is not None and round_ == self.rounds.open and self._apply_task is not None:
            await asyncio.wait([self._apply_task])  # it may have decided already that no checkpoint is due
            storage = self.require_storage()
        applied = self.rounds.applied if self.rounds.applying is None else self.rounds.open
        if round_ < applied:
            raise StaleRound(f"round {round_} is over", current=applied)
        if round_ > self.rounds.applied:
            self.writer.request_round(round_)
        elif round_ not in storage.checkpoints and not self.writer.is_writing(round_):
            self.writer.check_room()
            await self._checkpoint_now(storage, "place")

    async def read_after_round(self, round_: Round | None, read: Read[T], wait_seconds: float) -> T:
        """Read the shard right after a round, or as it is: see PserverRun."""
        rounds = self.rounds
        if round_ is None or (round_ == rounds.applied and rounds.applying is None):  # then no update comes between
            return await self.read_now(read)
        if round_ <= rounds.applied:
            raise StaleRound(f"round {round_} is over", current=rounds.applied)
        self.check_failure()
        metadata = self._metadata(round_)
        try:
            return await self._work.captures.wait_for_round(
                round_, lambda: read(metadata), wait_seconds, rounds.applied
            )
        except TimeoutError:
            text = f"round {round_} waits for {name_trainers(self.missing) or 'its apply'}"
            raise RoundPending(text, missing=self.missing, round=rounds.open) from None

    def _digest_staged(self, digest: xxhash.xxh3_128) -> None:
        rounds = self.rounds
        barriers = (rounds.applied, sorted(rounds.batch_barriers), sorted(rounds.fetch_barriers))
        digest.update(repr(barriers).encode())
        for round_, rank, contribution in rounds.staged():
            digest_contribution(digest, (round_, rank), contribution)

    # ------------------------------------------------------------------ pulls

    def _admit_get(self, fence: Fence) -> None:
        self.check_fence(fence)
        self.rounds.admit_get(fence.rank, fence.trainer_incarnation, fence.round)

    def _check_slots(self, fence: Fence, version: Round) -> None:
        # The next round is not applied before this trainer's barrier, so the state of the round can be read.
        self._admit_get(fence)
        if version > fence.round:
            raise StaleRound(f"round {fence.round} has been overwritten", current=version)
        if version < fence.round:
            raise TryAgain(f"round {fence.round} is not applied on this pserver yet", current=version)

    async def get(
        self, fence: Fence, wait_seconds: float, names: Sequence[str] = (), norm: AgreedNorm | None = None
    ) -> Reply:
        """Return version `fence.round`, or with `max_delay` a newer one, waiting up to `wait_seconds` for it.

        Raises RoundPending after that (the caller asks again), RoundTimeout when a trainer has been missing for the
        round time-out, StaleRound when the version has been overwritten.
        """
        self.check_names(names)
        reply = await self._wait_for_round(fence, wait_seconds, norm)
        if names:
            version, chunks = await self._compute.run(self._encode_blocks, list(names))
            self.check_fence(fence)
            if not self._serves(version, fence):
                raise StaleRound(f"round {fence.round} has been overwritten", current=version)
            reply = Reply(version, chunks)
        return reply

    def _encode_blocks(self, names: list[str]) -> tuple[Round, Sequence[bytes]]:
        # The compute thread runs one job at a time, so the version belongs to the values.
        version = self.shard.version
        return version, self.shard.encode(names, metadata=self._metadata(version), pulled=True)

    async def _wait_for_round(self, fence: Fence, wait_seconds: float, norm: AgreedNorm | None) -> Reply:
        deadline = asyncio.get_running_loop().time() + wait_seconds
        async with self._condition:
            while True:
                self._admit_get(fence)
                if self._reply is not None and self._serves(self._reply.round, fence):
                    return self._reply
                if self._reply is not None and self._reply.round > fence.round:
                    raise StaleRound(f"round {fence.round} has been overwritten", current=self._reply.round)
                if norm is not None and (measured := self._find_norm(fence.round)) is not None:
                    self._accept_norm(norm, measured)
                await self._wait_for_change(fence.round, deadline)

    def _serves(self, version: Round, fence: Fence) -> bool:
        """Return whether this version may be the answer: with `max_delay` the newest is better than an old one."""
        return version == fence.round or (version > fence.round and self.rounds.max_delay > 0)

    async def get_norm(self, fence: Fence, wait_seconds: float, agreed: AgreedNorm | None = None) -> NormAnswer:
        """Return the norm of this shard's part of a round's gradient, waiting up to `wait_seconds` for it.

        The global norm, `agreed`, lets the round be stepped, and the answer waits until that round is over. The answer
        for a round that is over is the norm that was sent then, if one was. Raises as `get`.
        """
        deadline = asyncio.get_running_loop().time() + wait_seconds
        async with self._condition:
            while True:
                self._admit_get(fence)
                if fence.round <= self.rounds.applied:
                    norm = self.rounds.history.norms.get(fence.round)
                    return NormAnswer() if norm is None else NormAnswer(**norm._asdict())
                if (measured := self._find_norm(fence.round)) is not None:
                    if agreed is None:
                        return NormAnswer(**measured.norm._asdict())
                    self._accept_norm(agreed, measured)
                await self._wait_for_change(fence.round, deadline)

    def _find_norm(self, round_: Round) -> Measured | None:
        """Return what was measured for a round that is neither dropped, by a change of members, nor over."""
        measured = self._find_measured(self.rounds.measuring) or self._find_measured(self.rounds.applying)
        return measured if measured is not None and measured.apply.round == round_ else None

    def _accept_norm(self, agreed: AgreedNorm, measured: Measured) -> None:
        """Step the round with the first norm that matches. Raises NormChanged for the norm of another gradient."""
        assert self.install.max_grad_norm is not None
        if not agreed.own.is_same(measured.norm):
            round_ = measured.apply.round
            raise NormChanged(
                f"the gradient of round {round_} is another one since its norm was asked for", round=round_
            )
        if self.rounds.measuring is not None:
            coefficient = clip_coefficient(agreed.norm, self.install.max_grad_norm)
            self._begin(self._apply(self.rounds.accept_norm(), coefficient))

    async def _wait_for_change(self, round_: Round, deadline: float) -> None:
        """Wait for a change of the run's state, within the condition. Raises RoundPending, RoundTimeout, NotReady."""
        self._note_waiting()
        until = min(deadline, self._round_deadline())
        if until <= asyncio.get_running_loop().time():
            raise self._make_wait_error(round_)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                await self._condition.wait()

    def _round_deadline(self) -> float:
        measuring = self.rounds.measuring
        is_busy = self.rounds.applying is not None or (measuring is not None and self._find_measured(measuring) is None)
        if self._waiting_since is None or is_busy or self.rounds.is_paused:
            return float("inf")
        return self._waiting_since + self.install.round_timeout_seconds

    def _make_wait_error(self, round_: Round) -> GradpostError:
        rounds, missing = self.rounds, self.missing
        if self._round_deadline() <= asyncio.get_running_loop().time():
            if rounds.is_frozen:
                return self.make_timeout([], "end a change of members", round=rounds.open)
            owed = f"reach the batch barrier of round {rounds.open}"
            if rounds.measuring is not None:
                missing, owed = sorted(self.members), f"bring the global norm of round {rounds.open}"
            if not self.is_readable:
                owed = "upload the initial values"
            return self.make_timeout(missing, owed, round=rounds.open)
        if not self.is_readable:
            return NotReady("the initial values are not complete", waiting_for=self.uploader_name)
        if rounds.is_frozen:
            waits = "the coordinator, in the middle of a change of members"
        elif rounds.is_paused:
            waits = "an administrator, who has paused the run"
        elif rounds.measuring is not None:
            waits = "its global norm"
        else:
            waits = name_trainers(missing) or self._disk_trouble or "its apply"
        notice = f" ({self.notice})" if self.notice else ""
        return RoundPending(f"round {round_} waits for {waits}{notice}", missing=missing, round=rounds.open)
