"""One run on one pserver: what all modes share. `sync_run.py` and `async_run.py` hold what they do not.

The run lives on the event loop. Decisions are made synchronously by pure state machines; this class and its children
do the waiting and hand tensor work to the compute thread. After every `await` the fence is checked again, since a
round, a member or the run may have gone meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias, TypeVar

import xxhash

from ps_protocol.errors import (
    BadInput,
    Conflict,
    GradpostError,
    NonFiniteGradient,
    NotReady,
    RoundTimeout,
    StorageFailed,
    TrainerLost,
    TryAgain,
)
from ps_protocol.fence import Fence
from ps_protocol.messages import BarrierAnswer, FrozenRounds, InstallMembers, InstallRun, PserverLoad, PushAnswer
from ps_protocol.norms import AgreedNorm
from ps_protocol.plan import SlicePlan
from ps_protocol.slots import SLOTS, StepState
from ps_protocol.vocabulary import Incarnation, PserverIndex, Rank, Round
from services.runtime.compute import ComputeExecutor
from services.runtime.logs import get_logger

from .admission import Admission, check_member
from .bodies import Body
from .checkpoint_writer import CheckpointWriter, Destination
from .durable.storage import Restored, RunStorage
from .history import History
from .metrics import LoadMeter, PserverMetrics
from .pushes import read_buffers, read_initial_blocks, read_slots
from .reply import Reply
from .shard import MASTER_BYTES, Shard
from .tensors import StagedBlock, check_blocks, find_nonfinite

log = get_logger()

T = TypeVar("T")

Read: TypeAlias = Callable[[Mapping[str, str]], T]
BarrierKind = Literal["batch", "fetch"]
FAILURES_OF_TRAINERS = (TrainerLost, RoundTimeout)  # they end a run, and leave its shards intact


class PserverRun(ABC):
    """Everything a pserver holds for one run. Lives on the event loop; tensors are touched on `compute` only."""

    def __init__(
        self,
        install: InstallRun,
        index: PserverIndex,
        compute: ComputeExecutor,
        metrics: PserverMetrics,
        storage: RunStorage | None = None,
        restored: Restored | None = None,
    ) -> None:
        self.install = install
        self.index = index
        self.plan = SlicePlan.from_json(install.plan)
        self._identity = {"run": install.run, "attempt": str(install.attempt)}  # in the metadata of each reply
        self.shard = restored.shard if restored else Shard(self.plan, index)
        self.storage = storage
        self.failure: GradpostError | None = None
        self.is_readable = False  # every initial value is here
        assert self.plan.optimizer is not None  # a run always has one
        self._optimizer = self.plan.optimizer
        self._buffers = {spec.name: spec for spec in self.plan.buffers if spec.pserver == index}
        # Of all that lives here, on the wire.
        own = self.plan.shard_bytes(index) + sum(spec.num_bytes for spec in self._buffers.values())
        num_kinds = len(SLOTS[self._optimizer.name]) + 1  # slots and masters
        slots = num_kinds * MASTER_BYTES * sum(block.num_elements for block in self.plan.shards[index])
        self.num_bytes = max(own, self.plan.pushed_bytes(index), slots)
        pushed = sum(len(place.pushed) for place in self.shard.layout.places)
        num_blocks = len(self.plan.shards[index])
        self.num_tensors = max(pushed, num_blocks + len(self._buffers), num_blocks * num_kinds)  # of a body, at most
        self.pushed_bytes = 0
        self.pulled_bytes = 0
        self.transports: set[str] = set()  # HTTP versions of the data requests
        self.notice = ""  # what the coordinator says of those who were lost
        self.writer = CheckpointWriter(storage, install.checkpoint_rounds, metrics)
        self._meter = LoadMeter(metrics)
        self._condition = asyncio.Condition()
        self._compute = compute
        self._metrics = metrics
        self._publishing = asyncio.Lock()
        # Since when, by the loop's clock, somebody waits for the missing ones.
        self._waiting_since: float | None = None

    @property
    def open_round(self) -> Round:
        """What is being worked on, for those who look for the cause of a failure."""
        return self.round

    @property
    def num_queued(self) -> int:
        """Gradients that wait in queues of blocks."""
        return 0

    # ------------------------------------------------------------------ what a mode decides

    @property
    @abstractmethod
    def round(self) -> Round:
        """How far the run is here: applied rounds, or contributions."""

    @property
    @abstractmethod
    def members(self) -> Mapping[Rank, Incarnation]:
        """Those who take part."""

    @property
    @abstractmethod
    def missing(self) -> list[Rank]:
        """Whom everybody waits for."""

    @abstractmethod
    def admit_push(self, fence: Fence) -> Admission:
        """Check a push before its body is read, and again before it is staged."""

    @abstractmethod
    async def push(self, fence: Fence, body: Body) -> PushAnswer:
        """Validate and stage one bucket. Answers as before if it was staged before; changes nothing on an error."""

    @abstractmethod
    def count_barrier(self, fence: Fence, kind: BarrierKind, *, is_finite: bool = True) -> BarrierAnswer:
        """Count a barrier, and with a batch barrier the trainer's verdict on its gradient. Never waits."""

    @abstractmethod
    async def get(
        self, fence: Fence, wait_seconds: float, names: Sequence[str] = (), norm: AgreedNorm | None = None
    ) -> Reply:
        """The parameters that belong to a request's round, waiting up to `wait_seconds` for them.

        `norm` is the global one of the round's gradient, where that is clipped.
        """

    async def get_slots(self, fence: Fence, keys: Sequence[str]) -> Sequence[bytes]:
        """A frame of the optimizer's slots for a member, as of the request's round: see `Shard.encode_state`.

        Raises BadInput, StaleRound, TryAgain. In the asynchronous modes it is what there is now.
        """

        def encode() -> tuple[Round, list[bytes]]:
            return self.shard.version, self.shard.encode_state(keys, self._metadata(fence.round), fence.rank)

        self.check_readable()
        self.check_member(fence)
        version, chunks = await self._compute.run(encode)
        self.check_fence(fence)
        self.check_member(fence)
        self._check_slots(fence, version)
        return chunks

    @abstractmethod
    def _check_slots(self, fence: Fence, version: Round) -> None:
        """Raise what is wrong with slots of this version, if anything is."""

    def read_slots(self, body: Body) -> dict[str, StagedBlock | StepState]:
        """The slots of a pushed body. Raises what is wrong with them."""
        body.is_recurring = False
        return read_slots(body, self.shard.layout, self._optimizer)

    @abstractmethod
    async def _freeze(self) -> FrozenRounds:
        """Let a running apply end, and from then on count no barrier until members are installed."""

    @abstractmethod
    def set_members(self, message: InstallMembers | InstallRun) -> None:
        """Take over a newer set of members."""

    @abstractmethod
    def describe_trainers(self) -> dict[str, Any]:
        """Where each trainer stands, as members of PserverState."""

    @abstractmethod
    def _publish(self, reply: Reply) -> None:
        """Version 0 is complete; this is its frame."""

    @abstractmethod
    def _digest_staged(self, digest: xxhash.xxh3_128) -> None:
        """Add everything that a request could change besides the shard."""

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
        self.check_failure()

    def check_failure(self) -> None:
        """Raise the failure that ended the run, if one did."""
        if self.failure is not None:
            raise copy.copy(self.failure)  # its traceback would collect the frames, and bodies, of every request

    def check_member(self, fence: Fence) -> None:
        """Raise Conflict unless the request is from the current life of a member."""
        check_member(self.members, fence.rank, fence.trainer_incarnation)

    def check_readable(self) -> None:
        """Raise NotReady before version 0 can be read."""
        if not self.is_readable:
            raise NotReady("the initial values are not complete", waiting_for=self.uploader_name)

    def check_names(self, names: Sequence[str]) -> None:
        """Raise BadInput unless all of these blocks are here."""
        for name in names:
            if name not in self.shard.layout.place:
                raise BadInput(f"block {name!r} is not on pserver {self.index}", code="unknown_block")

    @property
    def uploader_name(self) -> str:
        """Who brings the initial values."""
        return f"trainer {self.install.uploader}"

    # ------------------------------------------------------------------ initial values

    def admit_initial(self, fence: Fence) -> Admission:
        """Check an upload of initial values: round 0, from the elected trainer."""
        self.check_fence(fence)
        self.check_member(fence)
        if fence.round != 0 or fence.rank != self.install.uploader:
            raise Conflict(f"the initial values are round 0 and come from {self.uploader_name}", code="stale_trainer")
        return "already_applied" if self.shard.is_initialised else "open"

    async def set_initial(self, fence: Fence, body: Body) -> PushAnswer:
        """Store initial values and buffers; the run is readable at version 0 once all of them are here."""
        buffers = read_buffers(body, self._buffers)
        blocks = read_initial_blocks(body, self.shard.layout, skip=self._buffers)

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
        async with self._publishing:
            if self.is_readable:
                return
            self.check_failure()
            reply = await self._compute.run(self._encode_initial)
            if reply is not None and self.storage is not None:
                await self._persist_initial(self.storage)
        async with self._condition:
            if reply is not None and not self.is_readable:
                self.is_readable = True
                self._publish(reply)
                self._waiting_since = None
            self._condition.notify_all()

    def _encode_initial(self) -> Reply | None:
        # A restored shard begins with what it was restored to.
        return self._encode(self.shard.version) if self.shard.is_initialised else None

    async def _persist_initial(self, storage: RunStorage) -> None:
        """The initial values are checkpoint 0: it is on the disk before anybody has seen them."""
        if self.shard.version == 0 and 0 not in storage.checkpoints:
            try:
                write = await self._compute.run(storage.snapshot_unchanging, self.shard, self._history())
                await self.writer.write_and_wait(0, write)
            except OSError as error:
                await self.fail(self.storage_failed("write checkpoint 0", error))
            self.check_failure()

    def storage_failed(self, what: str, error: OSError) -> StorageFailed:
        """The error for a disk that does not take what durability demands."""
        return StorageFailed(f"pserver {self.index} cannot {what}: {error}", pserver=self.index)

    def _encode(self, round_: Round) -> Reply:
        return Reply(round_, self.shard.encode(metadata=self._metadata(round_), pulled=True))

    def _metadata(self, round_: Round) -> dict[str, str]:
        return {**self._identity, "round": str(round_)}

    # ------------------------------------------------------------------ pushes

    async def check_finite(self, fence: Fence, blocks: Mapping[str, StagedBlock]) -> bool:
        """Whether the blocks hold neither NaN nor infinity; under `allow` nobody looks. Counts and logs what does.

        Raises NonFiniteGradient under `reject`, and BadInput for indices that are none.
        """
        if self.plan.wire.push == "topk":
            await self._compute.run(check_blocks, blocks)
        if self.install.nonfinite == "allow" or not blocks:
            return True
        culprit = await self._compute.run(find_nonfinite, blocks)
        if culprit is None:
            return True
        self._metrics.nonfinite.inc()
        log.warning("NaN or infinity in a gradient", trainer=fence.rank, round=fence.round, block=culprit)
        if self.install.nonfinite == "reject":
            raise NonFiniteGradient(
                f"trainer {fence.rank} pushed NaN or infinity in block {culprit!r} in round {fence.round}; "
                "nothing of this push was staged"
            )
        return False

    # ------------------------------------------------------------------ members and the end

    async def freeze(self) -> FrozenRounds:
        """Stand still until members are installed."""
        self.check_failure()
        return await self._freeze()

    @abstractmethod
    async def wait_until_changeable(self) -> None:
        """Wait until members may be changed."""

    async def install_members(self, message: InstallMembers) -> None:
        """Take over a set of members, at once, and tell those who wait. It ends a freeze."""
        self.set_members(message)
        async with self._condition:
            self._condition.notify_all()

    async def fail(self, failure: GradpostError) -> None:
        """End every wait with this failure, and say so once."""
        if self.failure is None:
            facts = {"round": self.open_round, "code": failure.code, **_culprits(failure)}
            log.error("run failed", reason=failure.detail, **facts)
            self.writer.heartbeat_is_due.set()  # the trainers that wait hear of it now, and are perhaps gone soon
        await self.end(failure)

    async def end(self, reason: GradpostError) -> None:
        """End every wait with `reason`, and refuse with it whatever comes later; the first reason stands."""
        if self.failure is None:
            self.failure = copy.copy(reason)  # its traceback would keep this run and its shard
        async with self._condition:
            self._condition.notify_all()

    # ------------------------------------------------------------------ waiting

    def _note_waiting(self) -> None:
        if self._waiting_since is None:
            self._waiting_since = asyncio.get_running_loop().time()

    @property
    def waiting_seconds(self) -> float:
        """How long somebody has been waiting for the missing trainers."""
        return 0.0 if self._waiting_since is None else asyncio.get_running_loop().time() - self._waiting_since

    def make_timeout(self, ranks: Sequence[Rank], owed: str, **facts: Any) -> RoundTimeout:
        """The error for those who have waited for the round time-out: who did not do what; nobody: the coordinator."""
        limit = self.install.round_timeout_seconds
        text = f"{name_trainers(ranks) or 'the coordinator'} did not {owed} within the round time-out of {limit:g} s"
        return RoundTimeout(text, missing=list(ranks), **facts)

    # ------------------------------------------------------------------ checkpoints

    @abstractmethod
    async def want_checkpoint(self, round_: Round, *, is_over: bool = False) -> None:
        """Write a checkpoint after this round: at once if it is the newest.

        Raises StaleRound if it is over, TryAgain while others are being written. `is_over` says that nobody pushes any
        more, so that this one is the last: it waits for those.
        """

    async def stop(self) -> None:
        """The process is about to end: whoever waits here is sent away, and what is held is written down."""
        if self.storage is not None and self.storage.is_over:
            await self.writer.prune_folder()  # the coordinator may have said in no heartbeat what is complete
        if self.failure is not None and not self._needs_last_checkpoint(self.failure):
            return
        await self._end_waits(TryAgain("this pserver stops; it may be back"))
        await self._finish_apply()
        await self.writer.wait_for_writes("folder")
        is_kept = self.storage is None or self.shard.version in self.storage.rounds
        if self.storage is not None and not is_kept and self.is_readable and self.is_idle:
            with contextlib.suppress(TryAgain):  # it has been said
                await self._checkpoint_now(self.storage, "folder")
        await self.writer.wait_for_writes()

    def _needs_last_checkpoint(self, failure: GradpostError) -> bool:
        """Return whether the shard is intact after this failure, and in no log."""
        has_log = self.storage is not None and self.storage.has_log
        return isinstance(failure, FAILURES_OF_TRAINERS) and not has_log

    async def _checkpoint_now(self, storage: RunStorage, destination: Destination) -> None:
        """Copy the shard as it is. Raises TryAgain."""
        snapshot = self._compute.run(
            partial(storage.snapshot, self.shard, self._history(), is_own=destination == "folder")
        )
        await self.writer.snapshot_and_write(self.shard.version, destination, snapshot)

    async def wait_for_writes(self) -> None:
        """Wait until what was to be applied is, and what was to be written."""
        await self._finish_apply()
        await self.writer.wait_for_writes()

    async def _end_waits(self, reason: GradpostError) -> None:
        """End every wait before the process ends."""
        await self.end(reason)

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits to be applied, so that the shard is what was acknowledged."""
        return True

    @abstractmethod
    async def _finish_apply(self) -> None:
        """Wait for what is being applied."""

    def require_storage(self) -> RunStorage:
        """The storage, if a checkpoint can be made now or soon; else raises NotReady, or what ended the run."""
        self.check_failure()
        self.check_readable()
        if self.storage is None:
            raise NotReady("this pserver keeps nothing on a disk", waiting_for="a state folder")
        return self.storage

    def _history(self) -> History:
        """What the newest rounds were made of, for those who go on from a checkpoint."""
        return History()

    async def finish(self) -> None:
        """After the end: wait until nothing of this run is computed or written any more."""
        await self.wait_for_writes()
        async with self._publishing:  # checkpoint 0 may be about to be written
            pass
        if self.storage is not None:
            self.storage.close()

    # ------------------------------------------------------------------ inspection

    def describe_load(self) -> PserverLoad:
        """Where it stands and what it has done so far."""
        trainers = self.describe_trainers()
        return PserverLoad(
            batch_barriers=trainers.get("batch_barriers", ()),
            participants=trainers.get("participants", ()),
            clocks=trainers.get("clocks", {}),
            num_blocks=len(self.plan.shards[self.index]),
            shard_bytes=self.plan.shard_bytes(self.index),
            pushed_bytes=self.pushed_bytes,
            pulled_bytes=self.pulled_bytes,
            num_queued=self.num_queued + self._meter.num_held,
            **self._meter.read(),
        )

    async def read_now(self, make: Read[T], more: Mapping[str, str] | None = None) -> T:
        """What `make` finds between two updates, on the compute thread; it is given the metadata of the version."""
        return await self._compute.run(lambda: make({**self._metadata(self.shard.version), **(more or {})}))

    @abstractmethod
    async def read_after_round(self, round_: Round | None, make: Read[T], wait_seconds: float) -> T:
        """The same right after a round, waiting so long for it; without one, after some whole round.

        Raises StaleRound if it is over, RoundPending. In asynchronous modes there are no rounds: it is a cut between
        contributions, all of those before it being applied to all blocks, and none behind it.
        """

    def _encode_blocks(self, names: list[str]) -> tuple[Round, Sequence[bytes]]:
        # The compute thread runs one job at a time, so the version belongs to the values.
        version = self.shard.version
        return version, self.shard.encode(names, metadata=self._metadata(version), pulled=True)

    async def get_buffers(self, fence: Fence) -> Reply:
        """The buffers that live here, for a member; no round changes them, so they are version 0."""
        self.check_fence(fence)
        self.check_member(fence)
        self.check_readable()
        return Reply(0, await self._compute.run(self.shard.encode_buffers, self._metadata(0)))

    async def digest(self) -> str:
        """Of everything that a request could change: values, slots, steps, barriers and staged contributions."""
        staged = xxhash.xxh3_128()
        self._digest_staged(staged)
        return f"{await self._compute.run(self.shard.digest)}-{staged.hexdigest()}"


def _culprits(failure: GradpostError) -> dict[str, object]:
    """Who is to blame, for the log: the facts of an error that name trainers or a pserver."""
    return {
        name: failure.facts[key] for key, name in (("ranks", "trainer"), ("missing", "trainer")) if key in failure.facts
    }


def name_trainers(ranks: Sequence[Rank]) -> str:
    """`trainer 1` or `trainers 1, 3`."""
    return f"trainer{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}" if ranks else ""
