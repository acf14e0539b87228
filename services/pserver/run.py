"""One run on one pserver: the rounds, the shard and the `asyncio.Condition` that guards them.

Decisions are made synchronously by `Rounds`; this class does the waiting and hands tensor work to the compute
thread. After every `await` the fence is checked again, since a round, a member or the run may have gone meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import xxhash

from ps_protocol.errors import (
    ApplyFailed,
    GradpostError,
    NonFiniteGradient,
    NotReady,
    RoundPending,
    RoundTimeout,
    StaleRound,
    StaleTrainer,
    UnknownBlock,
    error_from_problem,
)
from ps_protocol.fence import Fence
from ps_protocol.messages import BarrierAnswer, InstallMembers, InstallRun, PushAnswer
from ps_protocol.plan import SlicePlan
from ps_protocol.vocabulary import PserverIndex, Rank, Round
from services.runtime.compute import ComputeExecutor
from services.runtime.logs import get_logger

from .bodies import Body
from .metrics import PserverMetrics
from .pushes import read_blocks, read_buffers, read_completion
from .rounds import Apply, Rounds
from .shard import Shard
from .tensors import StagedBlock, find_nonfinite

log = get_logger()

BarrierKind = Literal["batch", "fetch"]


@dataclass(frozen=True, slots=True)
class Reply:
    """The frame of one version, shared by everyone who gets it: the same bytes, encoded once."""

    round: Round
    chunks: Sequence[bytes]

    @property
    def num_bytes(self) -> int:
        """Content-Length of the reply."""
        return sum(map(len, self.chunks))


class PserverRun:
    """Everything a pserver holds for one run. Lives on the event loop; tensors are touched on `compute` only."""

    def __init__(
        self, install: InstallRun, index: PserverIndex, compute: ComputeExecutor, metrics: PserverMetrics
    ) -> None:
        self.install = install
        self.index = index
        self.plan = SlicePlan.from_json(install.plan)
        self.shard = Shard(self.plan, index)
        self.rounds: Rounds[StagedBlock] = Rounds(install.members)
        self.members_number = install.number
        self.failure: GradpostError | None = None
        assert self.plan.optimizer is not None  # a run always has one
        self._optimizer = self.plan.optimizer
        self._buffers = {spec.name: spec for spec in self.plan.buffers if spec.pserver == index}
        # Of all that lives here, on the wire.
        self.num_bytes = self.plan.shard_bytes(index) + sum(spec.num_bytes for spec in self._buffers.values())
        self.pushed_bytes = 0
        self.pulled_bytes = 0
        self.transports: set[str] = set()  # HTTP versions of the data requests
        self._condition = asyncio.Condition()
        self._compute = compute
        self._metrics = metrics
        self._reply: Reply | None = None  # of the applied round, once it may be read
        # Since when, by the loop's clock, somebody waits for the initial values or at the open round's batch barrier.
        self._waiting_since: float | None = None
        self._apply_task: asyncio.Task[None] | None = None
        self._disagreement_was_said = False

    # ------------------------------------------------------------------ fences

    def check_fence(self, fence: Fence) -> None:
        """Raise what is stale about a request's addressee, or the failure that ended the run."""
        fence.check_addressee(
            run=self.install.run,
            attempt=self.install.attempt,
            plan=self.plan.digest,
            pserver=self.index,
            pserver_incarnation=self.install.incarnation,
        )
        if self.failure is not None:
            raise copy.copy(self.failure)  # its traceback would collect the frames, and bodies, of every request

    def admit_push(self, fence: Fence) -> Literal["open", "already_applied"]:
        """Check a push before its body is read, and again before it is staged."""
        self.check_fence(fence)
        if self._reply is None:  # nothing may be stepped before version 0 can be read
            raise NotReady("the initial values are not complete", waiting_for=self._uploader_name)
        return self.rounds.admit(fence.rank, fence.trainer_incarnation, fence.round)

    def admit_initial(self, fence: Fence) -> Literal["open", "already_applied"]:
        """Check an upload of initial values: round 0, from the elected trainer."""
        self.check_fence(fence)
        self.rounds.check_member(fence.rank, fence.trainer_incarnation)
        if fence.round != 0 or fence.rank != self.install.uploader:
            raise StaleTrainer(f"the initial values are round 0 and come from {self._uploader_name}")
        return "already_applied" if self.shard.is_initialised else "open"

    @property
    def _uploader_name(self) -> str:
        return f"trainer {self.install.uploader}"

    # ------------------------------------------------------------------ push

    async def push(self, fence: Fence, body: Body) -> PushAnswer:
        """Validate and stage one bucket. Answers as before if it was staged before; changes nothing on an error."""
        num_blocks, hyper_parameters = read_completion(body.frame.metadata, self._optimizer)
        blocks = read_blocks(body, self.shard.layout)
        if self.install.nonfinite == "reject" and blocks:
            culprit = await self._compute.run(find_nonfinite, blocks)
            if culprit is not None:
                self._metrics.nonfinite.inc()
                raise NonFiniteGradient(
                    f"trainer {fence.rank} pushed NaN or infinity in block {culprit!r} in round {fence.round}; "
                    "nothing of this push was staged"
                )
        if self.admit_push(fence) == "already_applied":
            return PushAnswer(status="already_applied", duplicates=len(blocks))
        staged = self.rounds.blocks_arrived(fence.rank, blocks, num_blocks, hyper_parameters)
        self.pushed_bytes += len(body.buffer)
        self._metrics.staged_blocks.inc(staged)
        complete = self.rounds.contributions[fence.rank].is_complete
        return PushAnswer(status="staged", staged=staged, duplicates=len(blocks) - staged, complete=complete)

    async def set_initial(self, fence: Fence, body: Body) -> PushAnswer:
        """Store initial values and buffers; the run is readable at version 0 once all of them are here."""
        buffers = read_buffers(body, self._buffers)
        blocks = read_blocks(body, self.shard.layout, skip=self._buffers)

        def store() -> None:
            if not self.shard.is_initialised:  # a late duplicate must not overwrite what has been stepped since
                for name, block in blocks.items():
                    self.shard.set_initial(name, block.tensor())
                for entry in buffers:
                    self.shard.set_initial_buffer(entry.name, body.view(entry))

        if self.admit_initial(fence) == "already_applied":
            await self.publish_initial()  # the request that stored the last value may have ended before it did this
            return PushAnswer(status="already_applied", duplicates=len(body.frame.tensors))
        self._waiting_since = None  # there is progress
        await self._compute.run(store)
        await self.publish_initial()
        return PushAnswer(status="staged", staged=len(body.frame.tensors), complete=self.shard.is_initialised)

    async def publish_initial(self) -> None:
        """Make version 0 readable once every value is here; a shard without blocks is so from the start."""
        if self._reply is not None:
            return
        reply = await self._compute.run(self._encode_initial)
        async with self._condition:
            if reply is not None and self._reply is None:
                self._reply = reply
                self._waiting_since = None
            self._condition.notify_all()

    def _encode_initial(self) -> Reply | None:
        ready = self.shard.is_initialised and self.shard.version == 0
        return self._encode(0) if ready else None

    # ------------------------------------------------------------------ barriers

    def barrier_arrived(self, fence: Fence, kind: BarrierKind) -> BarrierAnswer:
        """Count a barrier; starts the apply that it completes. Never waits."""
        self.check_fence(fence)
        if kind == "batch":
            apply = self.rounds.batch_barrier_arrived(fence.rank, fence.trainer_incarnation, fence.round)
            if self.rounds.batch_barriers:
                self._somebody_waits()
        else:
            apply = self.rounds.fetch_barrier_arrived(fence.rank, fence.trainer_incarnation, fence.round)
        self._start(apply)
        return BarrierAnswer(round=self.rounds.open, missing=tuple(self.rounds.missing))

    async def install_members(self, message: InstallMembers) -> None:
        """Take over a newer set of members, or the failure that ends every wait; an older number changes nothing."""
        if message.run != self.install.run or message.number <= self.members_number:
            return
        self.members_number = message.number
        if message.failure is not None:
            await self._fail(error_from_problem(message.failure))
            return
        apply = self.rounds.members_changed(message.members)
        self._start(apply)
        if not self.rounds.batch_barriers:
            self._waiting_since = None  # those who waited have left
        async with self._condition:
            self._condition.notify_all()

    async def end(self, reason: GradpostError) -> None:
        """End every wait with `reason`, and refuse with it whatever comes later; the first reason stands."""
        if self.failure is None:
            self.failure = reason
        async with self._condition:
            self._condition.notify_all()

    # ------------------------------------------------------------------ apply

    def _start(self, apply: Apply[StagedBlock] | None) -> None:
        # A task of the run, not of the request that completed the barrier: that client may go away.
        if apply is not None:
            self._warn_of_disagreement(apply)
            if self._waiting_since is not None:
                self._metrics.barrier_wait.observe(asyncio.get_running_loop().time() - self._waiting_since)
            self._apply_task = asyncio.create_task(self._apply(apply), name=f"apply round {apply.round}")

    async def _apply(self, apply: Apply[StagedBlock]) -> None:
        try:
            with self._metrics.apply_seconds.time():
                reply = await self._compute.run(self._step, apply)
        except Exception as error:
            log.exception("apply failed", round=apply.round)
            await self._fail(
                ApplyFailed(f"the optimizer of pserver {self.index} failed in round {apply.round}: {error}")
            )
            return
        async with self._condition:
            self.rounds.round_applied()
            self._reply = reply
            self._waiting_since = None
            self._condition.notify_all()
        self._metrics.rounds.inc()

    def _step(self, apply: Apply[StagedBlock]) -> Reply:
        """On the compute thread: aggregate in rank order, step, and encode what everybody will get."""
        contributions = [{name: b.tensor() for name, b in c.blocks.items()} for c in apply.contributions]
        gradient, present = self.shard.aggregate(contributions)
        self.shard.apply(gradient, present, apply.hyper_parameters)
        return self._encode(apply.round)

    def _encode(self, round_: Round) -> Reply:
        return Reply(round_, self.shard.encode(metadata=self._metadata(round_)))

    def _metadata(self, round_: Round) -> dict[str, str]:
        return {"run": self.install.run, "attempt": str(self.install.attempt), "round": str(round_)}

    def _warn_of_disagreement(self, apply: Apply[StagedBlock]) -> None:
        for rank, contribution in zip(apply.ranks, apply.contributions, strict=True):
            if contribution.hyper_parameters != apply.hyper_parameters:
                self._metrics.disagreements.inc()
                if not self._disagreement_was_said:
                    self._disagreement_was_said = True
                    log.warning(
                        "trainers push different hyper-parameters; the lowest rank's count",
                        round=apply.round, used=f"trainer {apply.ranks[0]}", ignored=f"trainer {rank}",
                    )  # fmt: skip

    async def _fail(self, failure: GradpostError) -> None:
        if self.failure is None:
            log.error(
                "run failed", round=self.rounds.open, code=failure.code, reason=failure.detail, **_culprits(failure)
            )
        await self.end(failure)

    # ------------------------------------------------------------------ inspection

    async def inspect(self, names: Sequence[str]) -> Sequence[bytes]:
        """Frame of these blocks as they are now, all of one version, which stands in the metadata."""
        if self._reply is None:
            raise NotReady("the initial values are not complete", waiting_for=self._uploader_name)
        self.check_names(names)
        _, chunks = await self._compute.run(self._encode_some, list(names))
        return chunks

    async def get_buffers(self, fence: Fence) -> Reply:
        """The buffers that live here, for a member; no round changes them, so they are version 0."""
        self.check_fence(fence)
        self.rounds.check_member(fence.rank, fence.trainer_incarnation)
        if self._reply is None:
            raise NotReady("the initial values are not complete", waiting_for=self._uploader_name)
        return Reply(0, await self._compute.run(self.shard.encode_buffers, self._metadata(0)))

    async def digest(self) -> str:
        """Of everything that a request could change: values, slots, steps, barriers and staged contributions."""
        rounds = self.rounds
        barriers = (rounds.applied, sorted(rounds.batch_barriers), sorted(rounds.fetch_barriers))
        staged = xxhash.xxh3_128(repr(barriers).encode())
        for rank, contribution in sorted(rounds.contributions.items()):
            staged.update(repr((rank, contribution.num_blocks, contribution.hyper_parameters)).encode())
            for name, block in sorted(contribution.blocks.items()):
                staged.update(name.encode())
                staged.update(block.body.view(block.entry))
        return f"{await self._compute.run(self.shard.digest)}-{staged.hexdigest()}"

    # ------------------------------------------------------------------ get

    async def get(self, fence: Fence, wait_seconds: float, names: Sequence[str] = ()) -> Reply:
        """Return exactly version `fence.round`, waiting up to `wait_seconds` for it.

        Raises RoundPending after that (the caller asks again), RoundTimeout when a trainer has been missing for the
        round time-out, StaleRound when the version has been overwritten.
        """
        self.check_names(names)
        reply = await self._wait_for_round(fence, wait_seconds)
        if names:
            version, chunks = await self._compute.run(self._encode_some, list(names))
            self.check_fence(fence)
            if version != fence.round:
                raise StaleRound(f"round {fence.round} has been overwritten", current=version)
            reply = Reply(version, chunks)
        return reply

    def check_names(self, names: Sequence[str]) -> None:
        """Raise UnknownBlock unless all of these blocks are here."""
        for name in names:
            if name not in self.shard.layout.place:
                raise UnknownBlock(f"block {name!r} is not on pserver {self.index}")

    def _encode_some(self, names: list[str]) -> tuple[Round, Sequence[bytes]]:
        # The compute thread runs one job at a time, so the version belongs to the values.
        version = self.shard.version
        return version, self.shard.encode(names, metadata=self._metadata(version))

    async def _wait_for_round(self, fence: Fence, wait_seconds: float) -> Reply:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_seconds
        async with self._condition:
            while True:
                self.check_fence(fence)
                self.rounds.admit(fence.rank, fence.trainer_incarnation, max(fence.round, 0))
                if self._reply is not None and self._reply.round == fence.round:
                    return self._reply
                if self._reply is not None and self._reply.round > fence.round:
                    raise StaleRound(f"round {fence.round} has been overwritten", current=self._reply.round)
                self._somebody_waits()
                until = min(deadline, self._round_deadline())
                if until <= loop.time():
                    raise self._still_waiting(fence.round)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(until):
                        await self._condition.wait()

    def _somebody_waits(self) -> None:
        if self._waiting_since is None:
            self._waiting_since = asyncio.get_running_loop().time()

    def _round_deadline(self) -> float:
        if self._waiting_since is None or self.rounds.applying is not None:
            return float("inf")
        return self._waiting_since + self.install.round_timeout_seconds

    def _still_waiting(self, round_: Round) -> GradpostError:
        missing = self.missing
        if self._round_deadline() <= asyncio.get_running_loop().time():
            owed = f"reach the batch barrier of round {self.rounds.open}"
            if self._reply is None:
                owed = "upload the initial values"
            return RoundTimeout(
                f"{name_trainers(missing)} did not {owed} within the round time-out of "
                f"{self.install.round_timeout_seconds:g} s",
                missing=missing, round=self.rounds.open,
            )  # fmt: skip
        if self._reply is None:
            return NotReady("the initial values are not complete", waiting_for=self._uploader_name)
        return RoundPending(
            f"round {round_} waits for {name_trainers(missing) or 'its apply'}", missing=missing, round=self.rounds.open
        )

    @property
    def missing(self) -> list[Rank]:
        """Whom everybody waits for: at the open batch barrier or, before version 0, for its values."""
        return [self.install.uploader] if self._reply is None else self.rounds.missing

    @property
    def waiting_seconds(self) -> float:
        """How long somebody has been waiting for the missing trainers."""
        return 0.0 if self._waiting_since is None else asyncio.get_running_loop().time() - self._waiting_since


def _culprits(failure: GradpostError) -> dict[str, object]:
    """Who is to blame, for the log: the facts of an error that name trainers or a pserver."""
    return {
        name: failure.facts[key] for key, name in (("ranks", "trainer"), ("missing", "trainer")) if key in failure.facts
    }


def name_trainers(ranks: Sequence[Rank]) -> str:
    """`trainer 1` or `trainers 1, 3`."""
    return f"trainer{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}" if ranks else ""
