"""One run on one pserver: what all modes share. `sync_run.py` and `async_run.py` add the rules of their modes.

The run lives on the event loop. Pure state machines make the decisions synchronously; this class and its children wait
and hand tensor work to the compute thread. The fence is checked again after every `await`, since the round, the member
or the run may have ended meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
from ps_protocol.membership import FrozenRounds, InstallMembers, InstallRun
from ps_protocol.messages import BarrierAnswer, PserverLoad, PushAnswer
from ps_protocol.norms import AgreedNorm
from ps_protocol.optimizers import SLOTS, StepState
from ps_protocol.plan import SlicePlan
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

Read: TypeAlias = Callable[[Mapping[str, str]], T]  # reads the shard; its argument is the metadata of the version
BarrierKind = Literal["batch", "fetch"]
FAILURES_OF_TRAINERS = (TrainerLost, RoundTimeout)  # they end a run, and leave its shards intact


@dataclass(frozen=True, slots=True)
class RunSetup:
    """The parts that a run is made of; `restored` is the shard that it resumes with."""

    install: InstallRun
    index: PserverIndex
    compute: ComputeExecutor
    metrics: PserverMetrics
    storage: RunStorage | None = None
    restored: Restored | None = None


class PserverRun(ABC):
    """The state of one run on one pserver. Lives on the event loop; only `compute` touches tensors."""

    def __init__(self, setup: RunSetup) -> None:
        self.install = install = setup.install
        self.index = setup.index
        self.plan = SlicePlan.from_json(install.plan)
        self.shard = setup.restored.shard if setup.restored else Shard(self.plan, setup.index)
        self.storage = setup.storage
        self.failure: GradpostError | None = None
        self.is_readable = False  # all initial values have arrived
        assert self.plan.optimizer is not None  # a run always has one
        self._optimizer = self.plan.optimizer
        self._buffers = {spec.name: spec for spec in self.plan.buffers if spec.pserver == setup.index}
        self.max_body_bytes, self.max_body_tensors = self._measure_largest_body()
        self.pushed_bytes = 0
        self.pulled_bytes = 0
        self.transports: set[str] = set()  # HTTP versions of the data requests
        self.notice = ""  # of the coordinator, about lost trainers
        self.writer = CheckpointWriter(setup.storage, install.checkpoint_rounds, setup.metrics)
        self._identity = {"run": install.run, "attempt": str(install.attempt)}  # in the metadata of each reply
        self._meter = LoadMeter(setup.metrics)
        self._condition = asyncio.Condition()
        self._compute = setup.compute
        self._metrics = setup.metrics
        self._publishing = asyncio.Lock()
        self._waiting_since: float | None = None  # when the wait for the missing trainers began, by the loop's clock

    def _measure_largest_body(self) -> tuple[int, int]:
        """Return the bytes and the number of tensors that a request about this shard contains at most."""
        blocks = self.plan.shards[self.index]
        stored_bytes = self.plan.shard_bytes(self.index) + sum(spec.num_bytes for spec in self._buffers.values())
        num_kinds = len(SLOTS[self._optimizer.name]) + 1  # slots and masters
        slot_bytes = num_kinds * MASTER_BYTES * sum(block.num_elements for block in blocks)
        num_pushed = sum(len(place.pushed) for place in self.shard.layout.places)
        return (
            max(stored_bytes, self.plan.pushed_bytes(self.index), slot_bytes),
            max(num_pushed, len(blocks) + len(self._buffers), len(blocks) * num_kinds),
        )

    # ------------------------------------------------------------------ what a mode decides

    @property
    @abstractmethod
    def round(self) -> Round:
        """The number of applied rounds, or in asynchronous modes of applied contributions."""

    @property
    def open_round(self) -> Round:
        """The round that a failure is reported with."""
        return self.round

    @property
    @abstractmethod
    def members(self) -> Mapping[Rank, Incarnation]:
        """The trainers that take part, and their incarnations."""

    @property
    @abstractmethod
    def missing(self) -> list[Rank]:
        """The ranks that other trainers wait for."""

    @property
    def num_queued(self) -> int:
        """Gradients in the queues of blocks."""
        return 0

    @abstractmethod
    def admit_push(self, fence: Fence) -> Admission:
        """Check a push before its body is read, and again before it is staged."""

    @abstractmethod
    async def push(self, fence: Fence, body: Body) -> PushAnswer:
        """Validate and stage one bucket. A repeated push gets the same answer; an error changes nothing."""

    @abstractmethod
    def count_barrier(self, fence: Fence, kind: BarrierKind, *, is_finite: bool = True) -> BarrierAnswer:
        """Count a barrier, and with a batch barrier the trainer's verdict on its gradient. Never waits."""

    @abstractmethod
    async def get(
        self, fence: Fence, wait_seconds: float, names: Sequence[str] = (), norm: AgreedNorm | None = None
    ) -> Reply:
        """Return the parameters of a request's round, waiting up to `wait_seconds` for them.

        `norm` is the global norm of the round's gradient, where gradients are clipped.
        """

    @abstractmethod
    def _check_slots(self, fence: Fence, version: Round) -> None:
        """Raise StaleRound or TryAgain unless optimizer state of this version may answer the request."""

    @abstractmethod
    async def freeze(self) -> FrozenRounds:
        """Wait for a running apply, and from then on count no barrier until members are installed."""

    @abstractmethod
    async def wait_until_changeable(self) -> None:
        """Wait until members may be changed."""

    @abstractmethod
    def set_members(self, message: InstallMembers | InstallRun) -> None:
        """Replace the set of members by a newer one."""

    @abstractmethod
    async def want_checkpoint(self, round_: Round, *, is_over: bool = False) -> None:
        """Write a checkpoint after this round: at once if it is the newest round.

        `is_over` marks the last checkpoint of the run, which waits for the checkpoints before it. Raises StaleRound if
        the round is over, TryAgain while another checkpoint is being written.
        """

    @abstractmethod
    async def _finish_apply(self) -> None:
        """Wait for the running apply."""

    @property
    @abstractmethod
    def is_idle(self) -> bool:
        """True if the shard contains everything that was acknowledged."""

    @abstractmethod
    async def read_after_round(self, round_: Round | None, read: Read[T], wait_seconds: float) -> T:
        """Read the whole shard right after a round, waiting up to `wait_seconds` for it; None is any whole round.

        In asynchronous modes the shard is read between contributions: all blocks contain the same ones. Raises
        StaleRound if the round is over, RoundPending.
        """

    @abstractmethod
    def describe_trainers(self) -> dict[str, Any]:
        """Return the progress of each trainer, as members of PserverState."""

    @abstractmethod
    def _open_reads(self, reply: Reply) -> None:
        """Serve version 0, which is complete; `reply` is its frame."""

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
        """Raise Conflict unless the request is from the current incarnation of a member."""
        check_member(self.members, fence.rank, fence.trainer_incarnation)

    def check_readable(self) -> None:
        """Raise NotReady before version 0 can be read."""
        if not self.is_readable:
            raise NotReady("the initial values are not complete", waiting_for=self.uploader_name)

    def check_names(self, names: Sequence[str]) -> None:
        """Raise BadInput unless this shard has all of these blocks."""
        for name in names:
            if name not in self.shard.layout.place:
                raise BadInput(f"block {name!r} is not on pserver {self.index}", code="unknown_block")

    @property
    def uploader_name(self) -> str:
        """The name of the trainer that uploads the initial values."""
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
        """Store initial values and buffers; the last one makes the run readable at version 0."""
        buffers = read_buffers(body, self._buffers)
        blocks = read_initial_blocks(body, self.shard.layout, skip=self._buffers)

        def store() -> None:
            if not self.shard.is_initialised:  # a late duplicate must not overwrite later steps
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
        """Make version 0 readable once every value has arrived; a shard without blocks is readable at once."""
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
                self._open_reads(reply)
                self._waiting_since = None
            self._condition.notify_all()

    def _encode_initial(self) -> Reply | None:
        # A restored shard begins with the version that was restored.
        return self._encode(self.shard.version) if self.shard.is_initialised else None

    async def _persist_initial(self, storage: RunStorage) -> None:
        """Write the initial values as checkpoint 0, before a trainer can read them."""
        if self.shard.version == 0 and 0 not in storage.checkpoints:
            try:
                snapshot = partial(storage.snapshot, self.shard, self._history(), copies=False)
                write = await self._compute.run(snapshot)
                await self.writer.write_and_wait(0, write)
            except OSError as error:
                await self.fail(self.storage_failed("write checkpoint 0", error))
            self.check_failure()

    def storage_failed(self, what: str, error: OSError) -> StorageFailed:
        """Return the error for a disk that fails where durability needs it."""
        return StorageFailed(f"pserver {self.index} cannot {what}: {error}", pserver=self.index)

    def _encode(self, round_: Round) -> Reply:
        return Reply(round_, self.shard.encode(metadata=self._metadata(round_), pulled=True))

    def _metadata(self, round_: Round) -> dict[str, str]:
        return {**self._identity, "round": str(round_)}

    # ------------------------------------------------------------------ pushes and pulls

    async def check_finite(self, fence: Fence, blocks: Mapping[str, StagedBlock]) -> bool:
        """Return whether the blocks contain neither NaN nor infinity, and count and log a push that does.

        Under `allow` blocks are not read. Raises NonFiniteGradient under `reject`, and BadInput for wrong indices.
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

    def read_slots(self, body: Body) -> dict[str, StagedBlock | StepState]:
        """Return the optimizer state in a pushed body. Raises BadInput."""
        body.is_recurring = False
        return read_slots(body, self.shard.layout, self._optimizer)

    async def get_slots(self, fence: Fence, keys: Sequence[str]) -> Sequence[bytes]:
        """Return a frame of optimizer state as of the request's round: see `Shard.encode_state`.

        In the asynchronous modes it is the newest state. Raises BadInput, StaleRound, TryAgain.
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

    async def get_buffers(self, fence: Fence) -> Sequence[bytes]:
        """Return a frame of this shard's buffers, which no round changes, for a member."""
        self.check_fence(fence)
        self.check_member(fence)
        self.check_readable()
        return await self._compute.run(lambda: self.shard.encode([], self._metadata(0), with_buffers=True))

    # ------------------------------------------------------------------ members and the end

    async def install_members(self, message: InstallMembers) -> None:
        """Replace the set of members and notify the waiting requests. Ends a freeze."""
        self.set_members(message)
        await self._notify()

    async def _notify(self) -> None:
        async with self._condition:
            self._condition.notify_all()

    async def fail(self, failure: GradpostError) -> None:
        """End every wait with this failure, and log the first one."""
        if self.failure is None:
            ranks = failure.facts.get("missing", failure.facts.get("ranks"))
            facts = {} if ranks is None else {"trainer": ranks}
            log.error("run failed", reason=failure.detail, round=self.open_round, code=failure.code, **facts)
            self.writer.heartbeat_is_due.set()  # the waiting trainers get the failure now, and may exit soon
        await self.end(failure)

    async def end(self, reason: GradpostError) -> None:
        """End every wait with `reason`, and refuse later requests with it; the first reason stands."""
        if self.failure is None:
            self.failure = copy.copy(reason)  # its traceback would keep this run and its shard
        await self._notify()

    async def stop(self) -> None:
        """Before the process ends: end every wait, and persist what the shard contains."""
        if self.storage is not None and self.storage.is_over:
            await self.writer.prune_folder()  # no heartbeat reply may have reported the last complete checkpoint
        if self.failure is not None and not self._needs_last_checkpoint(self.failure):
            return
        await self._end_waits(TryAgain("this pserver is stopping; send this again, since it may come back"))
        await self._finish_apply()
        await self.writer.wait_for_writes("folder")
        is_persisted = self.storage is None or self.shard.version in self.storage.rounds
        if self.storage is not None and not is_persisted and self.is_readable and self.is_idle:
            with contextlib.suppress(TryAgain):  # it was logged
                await self._checkpoint_now(self.storage, "folder")
        await self.writer.wait_for_writes()

    def _needs_last_checkpoint(self, failure: GradpostError) -> bool:
        """Return whether the shard is intact after this failure, and in no log."""
        has_log = self.storage is not None and self.storage.has_log
        return isinstance(failure, FAILURES_OF_TRAINERS) and not has_log

    async def _end_waits(self, reason: GradpostError) -> None:
        await self.end(reason)

    async def wait_for_writes(self) -> None:
        """Wait for the running apply, and for the checkpoints that are being written."""
        await self._finish_apply()
        await self.writer.wait_for_writes()

    async def finish(self) -> None:
        """After the end: wait until no work of this run is left on a thread or a disk."""
        await self.wait_for_writes()
        async with self._publishing:  # checkpoint 0 may be about to be written
            pass
        if self.storage is not None:
            self.storage.close()

    # ------------------------------------------------------------------ waiting

    def _note_waiting(self) -> None:
        if self._waiting_since is None:
            self._waiting_since = asyncio.get_running_loop().time()

    @property
    def waiting_seconds(self) -> float:
        """The seconds for which requests have been waiting for the missing trainers."""
        return 0.0 if self._waiting_since is None else asyncio.get_running_loop().time() - self._waiting_since

    def make_timeout(self, ranks: Sequence[Rank], owed: str, **facts: Any) -> RoundTimeout:
        """Return the error for requests that waited for the round time-out for these ranks, or for the coordinator."""
        limit = self.install.round_timeout_seconds
        text = f"{name_trainers(ranks) or 'the coordinator'} did not {owed} within the round time-out of {limit:g} s"
        return RoundTimeout(text, missing=list(ranks), **facts)

    # ------------------------------------------------------------------ checkpoints and inspection

    async def _checkpoint_now(self, storage: RunStorage, destination: Destination) -> None:
        """Begin a checkpoint of the current shard. Raises TryAgain."""
        snapshot = self._compute.run(
            partial(storage.snapshot, self.shard, self._history(), is_own=destination == "folder")
        )
        await self.writer.snapshot_and_write(self.shard.version, destination, snapshot)

    def require_storage(self) -> RunStorage:
        """Return the storage, if a checkpoint can be made now or soon. Raises NotReady, or the run's failure."""
        self.check_failure()
        self.check_readable()
        if self.storage is None:
            raise NotReady("this pserver keeps nothing on a disk", waiting_for="a state folder")
        return self.storage

    def _history(self) -> History:
        """Return the newest rounds' history, which a checkpoint contains."""
        return History()

    async def read_now(self, read: Read[T], extra: Mapping[str, str] | None = None) -> T:
        """Return what `read` returns between two updates, on the compute thread; `extra` joins its metadata."""
        return await self._compute.run(lambda: read({**self._metadata(self.shard.version), **(extra or {})}))

    def describe_amounts(self) -> dict[str, int]:
        """Return the sizes that PserverLoad and PserverState have in common."""
        return {
            "num_blocks": len(self.plan.shards[self.index]),
            "shard_bytes": self.plan.shard_bytes(self.index),
            "pushed_bytes": self.pushed_bytes,
            "pulled_bytes": self.pulled_bytes,
        }

    def describe_load(self) -> PserverLoad:
        """Return the progress and the work so far, for the heartbeat."""
        trainers = self.describe_trainers()
        return PserverLoad(
            batch_barriers=trainers.get("batch_barriers", ()),
            participants=trainers.get("participants", ()),
            clocks=trainers.get("clocks", {}),
            **self.describe_amounts(),
            num_queued=self.num_queued + self._meter.num_held,
            **self._meter.read(),
        )

    async def digest(self) -> str:
        """Return a digest of all that a request could change: values, optimizer state, barriers, contributions."""
        staged = xxhash.xxh3_128()
        self._digest_staged(staged)
        return f"{await self._compute.run(self.shard.digest)}-{staged.hexdigest()}"


def name_trainers(ranks: Sequence[Rank]) -> str:
    """Return `trainer 1` or `trainers 1, 3`."""
    return f"trainer{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}" if ranks else ""
