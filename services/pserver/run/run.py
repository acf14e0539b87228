"""One run on one pserver: fences, waits, replies and checkpoints, the same in all modes.

The run lives on the event loop. Its `Schedule`, a pure state machine, makes the decisions synchronously; its `Executor`
carries them out: `schedule.py` names their files. Tensor work goes to the compute thread. The fence is checked again
after every `await`, since the round, the member or the run may have ended meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import xxhash

from ps_protocol.errors import (
    BadInput,
    Conflict,
    GradpostError,
    NonFiniteGradient,
    NotReady,
    RoundPending,
    RoundTimeout,
    StaleRound,
    StorageFailed,
    TrainerLost,
    TryAgain,
)
from ps_protocol.fence import Fence
from ps_protocol.membership import FrozenRounds, InstallMembers, InstallRun
from ps_protocol.plan import SlicePlan
from ps_protocol.requests import PushAnswer
from ps_protocol.vocabulary import Incarnation, PserverIndex, Rank, Round
from services.runtime.compute import ComputeExecutor
from services.runtime.logs import get_logger

from ..durable.checkpoint_writer import CheckpointWriter, Destination
from ..durable.storage import Restored, RunStorage
from ..metrics import LoadMeter, PserverMetrics
from ..shard.bodies import Body
from ..shard.shard import Shard
from ..shard.tensors import QUICK_BYTES, StagedBlock, check_blocks, find_nonfinite
from .read_pushes import measure_largest_body, read_buffers, read_initial_blocks, read_push
from .schedule import Executor, Read, Schedule, Wait, name_trainers
from .staging import Admission, check_member, digest_contribution

log = get_logger()

T = TypeVar("T")

FAILURES_OF_TRAINERS = (TrainerLost, RoundTimeout)  # they end a run, and leave its shards intact


class Run:
    """The state of one run on one pserver. Lives on the event loop; only `compute` touches tensors."""

    def __init__(
        self,
        install: InstallRun,
        index: PserverIndex,
        make_executor: Callable[[Run, Restored | None], Executor],
        *,
        compute: ComputeExecutor,
        metrics: PserverMetrics,
        storage: RunStorage | None = None,
        restored: Restored | None = None,
    ) -> None:
        """Resume with `restored`, if there is one, else wait for initial values."""
        self.install = install
        self.index = index
        self.compute = compute
        self.metrics = metrics
        self.storage = storage
        self.plan = SlicePlan.from_json(install.plan)
        self.shard = restored.shard if restored else Shard(self.plan, index)
        self.membership = install.membership
        self.failure: GradpostError | None = None
        self.is_readable = False  # all initial values have arrived
        self.waiting_since: float | None = None  # when the wait for the missing trainers began, by the loop's clock
        self._buffers = {spec.name: spec for spec in self.plan.buffers if spec.pserver == index}
        self.max_body_bytes, self.max_body_tensors = measure_largest_body(self.plan, index, self.shard.layout)
        self.pushed_bytes = 0
        self.pulled_bytes = 0
        self.transports: set[str] = set()  # HTTP versions of the data requests
        self.notice = ""  # of the coordinator, about lost trainers
        self.writer = CheckpointWriter(storage, install.checkpoint_rounds, metrics)
        self.identity = {"run": install.run, "attempt": str(install.attempt)}  # in the metadata of each reply
        self.condition = asyncio.Condition()
        self.meter = LoadMeter(metrics)
        self._publishing = asyncio.Lock()
        self.executor = make_executor(self, restored)
        self.executor.install_members(install.membership)  # last: it may begin an apply

    @property
    def schedule(self) -> Schedule[StagedBlock]:
        """The members, their contributions and their progress."""
        return self.executor.schedule

    @property
    def round(self) -> Round:
        """The number of applied rounds; in asynchronous modes, the number of applied contributions."""
        return self.schedule.applied

    @property
    def members(self) -> Mapping[Rank, Incarnation]:
        """The trainers that take part, and their incarnations."""
        return self.schedule.members

    @property
    def missing(self) -> list[Rank]:
        """The ranks that other trainers wait for or, before version 0, the uploader of its values."""
        return self.executor.missing if self.is_readable else [self.install.uploader]

    # ------------------------------------------------------------------ fences

    def check_fence(self, fence: Fence) -> None:
        """Raise an error if the addressee of a request is stale, or the failure that ended the run."""
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
            raise NotReady("the initial values are not complete", waiting_for=f"trainer {self.install.uploader}")

    def check_names(self, names: Sequence[str]) -> None:
        """Raise BadInput unless this shard has all of these blocks."""
        for name in names:
            if name not in self.shard.layout.place:
                raise BadInput(f"block {name!r} is not on pserver {self.index}", code="unknown_block")

    # ------------------------------------------------------------------ initial values

    def admit_initial(self, fence: Fence) -> Admission:
        """Check an upload of initial values: round 0, from the elected trainer."""
        self.check_fence(fence)
        self.check_member(fence)
        if fence.round != 0 or fence.rank != self.install.uploader:
            text = f"the initial values must be uploaded by trainer {self.install.uploader}, as round 0"
            raise Conflict(text, code="stale_trainer")
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
        self.waiting_since = None  # there is progress
        await self.compute.run(store)
        await self.publish_initial()
        return PushAnswer(status="staged", staged=len(body.frame.tensors), complete=self.shard.is_initialised)

    async def publish_initial(self) -> None:
        """Make the first version readable once every value has arrived; without blocks, immediately.

        A restored shard begins with the version that was restored.
        """
        async with self._publishing:
            if self.shard.is_initialised and not self.is_readable:
                await self._publish()
        await self.notify()  # even without a version, since the time-out of its readers begins again

    async def _publish(self) -> None:
        self.check_failure()
        if self.storage is not None and self.shard.version == 0 and 0 not in self.storage.checkpoints:
            await self._persist_initial(self.storage)
        self.check_failure()
        await self.executor.open_reads()
        self.is_readable = True
        self.waiting_since = None

    async def _persist_initial(self, storage: RunStorage) -> None:
        """Write the initial values as checkpoint 0, before a trainer can read them."""
        try:
            snapshot = partial(storage.snapshot, self.shard, self.schedule.copy_history(), copies=False)
            await self.writer.write_and_wait(0, await self.compute.run(snapshot))
        except OSError as error:
            await self.fail(self.storage_failed("write checkpoint 0", error))

    def storage_failed(self, what: str, error: OSError) -> StorageFailed:
        """Return the error for a disk that fails where durability needs it."""
        return StorageFailed(f"pserver {self.index} cannot {what}: {error}", pserver=self.index)

    def metadata(self, round_: Round) -> dict[str, str]:
        """Return the metadata of a reply with this version."""
        return {**self.identity, "round": str(round_)}

    # ------------------------------------------------------------------ pushes and pulls

    def admit_push(self, fence: Fence) -> Admission:
        """Check a push before its body is read, and again before it is staged."""
        self.check_fence(fence)
        self.check_readable()  # nothing may be stepped before version 0 can be read
        return self.schedule.admit(fence.rank, fence.trainer_incarnation, fence.round)

    async def push(self, fence: Fence, body: Body) -> PushAnswer:
        """Validate and stage one bucket. A repeated push gets the same answer; an error changes nothing.

        In asynchronous modes the push that completes a step is answered once the whole step is queued.
        """
        push = read_push(body, self.shard.layout, self.plan, is_async=self.install.consistency.is_async)
        is_finite = await self._check_finite(fence, push.blocks, len(body.buffer))
        if self.admit_push(fence) == "already_applied":
            return PushAnswer(status="already_applied", duplicates=push.num_entries, finite=is_finite)
        staged = self.executor.stage(fence, push)
        if push.blocks:
            self.metrics.staged_blocks.inc(staged.num_new)
        self.pushed_bytes += len(body.buffer)
        if staged.is_complete:
            await self.executor.commit(fence)
        known, complete = push.num_entries - staged.num_new, staged.is_complete
        return PushAnswer(status="staged", staged=staged.num_new, duplicates=known, complete=complete, finite=is_finite)

    async def _check_finite(self, fence: Fence, blocks: Mapping[str, StagedBlock], num_bytes: int) -> bool:
        """Return whether the blocks contain neither NaN nor infinity, and count and log a push that does.

        Under `allow` blocks are not read. Raises NonFiniteGradient under `reject`, and BadInput for wrong indices.
        """
        if self.plan.wire.push == "topk":
            await self.compute.run(check_blocks, blocks)
        if self.install.nonfinite == "allow" or not blocks:
            return True
        is_quick = num_bytes <= QUICK_BYTES
        culprit = find_nonfinite(blocks) if is_quick else await self.compute.run(find_nonfinite, blocks)
        if culprit is None:
            return True
        self.metrics.nonfinite.inc()
        log.warning("NaN or infinity in a gradient", trainer=fence.rank, round=fence.round, block=culprit)
        if self.install.nonfinite == "reject":
            raise NonFiniteGradient(
                f"trainer {fence.rank} pushed NaN or infinity in block {culprit!r} in round {fence.round}; "
                "nothing of this push was staged"
            )
        return False

    async def get_slots(self, fence: Fence, keys: Sequence[str]) -> Sequence[bytes]:
        """Return a frame of optimizer state as of the request's round: see `Shard.encode_state`.

        In the asynchronous modes it is the newest state. Raises BadInput, StaleRound, TryAgain.
        """

        def encode() -> tuple[Round, list[bytes]]:
            return self.shard.version, self.shard.encode_state(keys, self.metadata(fence.round), fence.rank)

        self.check_readable()
        self.check_member(fence)
        version, chunks = await self.compute.run(encode)
        self.check_fence(fence)
        self.schedule.check_state(fence.rank, fence.trainer_incarnation, fence.round, version)
        return chunks

    async def get_buffers(self, fence: Fence) -> Sequence[bytes]:
        """Return a frame of this shard's buffers, which no round changes, for a member."""
        self.check_fence(fence)
        self.check_member(fence)
        self.check_readable()
        return await self.compute.run(lambda: self.shard.encode([], self.metadata(0), with_buffers=True))

    # ------------------------------------------------------------------ waiting

    async def wait_for(self, fence: Fence, wait_seconds: float, find: Callable[[], T | None]) -> T:
        """Return what `find` returns as soon as it is not None; an error that it raises ends the wait.

        Raises RoundPending after `wait_seconds` (the caller asks again), NotReady before version 0, and RoundTimeout
        when trainers have been missing for the round time-out.
        """
        deadline = asyncio.get_running_loop().time() + wait_seconds
        async with self.condition:
            while (found := find()) is None:
                until = self._note_wait(fence, deadline)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(until):
                        await self.condition.wait()
        return found

    def _note_wait(self, fence: Fence, deadline: float) -> float:
        """Return the time until which a request waits before its next check. Raises the error that ends its wait."""
        if self.is_readable:
            wait = self.executor.note_wait(fence)
        else:
            self.note_waiting()
            missing, facts = [self.install.uploader], {"round": self.schedule.open}
            wait = Wait("version 0", "its values", missing, "upload the initial values", self.waiting_since, facts)
        limit = self.install.round_timeout_seconds
        timeout_at = float("inf") if wait.since is None or self.schedule.is_paused else wait.since + limit
        now = asyncio.get_running_loop().time()
        if now >= timeout_at:
            who = name_trainers(wait.missing) or "the coordinator"
            text = f"{who} did not {wait.owed} within {limit:g} s"
            raise RoundTimeout(text, missing=list(wait.missing), **wait.facts)
        if now >= deadline:
            self.check_readable()
            notice = f" ({self.notice})" if self.notice else ""
            text = f"{wait.what} waits for {wait.cause}{notice}"
            raise RoundPending(text, missing=list(wait.missing), **wait.facts)
        return min(deadline, timeout_at)

    def note_waiting(self) -> None:
        """Note that trainers wait for others from now on, unless a wait is noted."""
        if self.waiting_since is None:
            self.waiting_since = asyncio.get_running_loop().time()

    @property
    def waiting_seconds(self) -> float:
        """The seconds for which requests have been waiting for the missing trainers; 0 while the run is paused."""
        since = self.executor.waiting_since if self.is_readable else self.waiting_since
        if since is None or self.schedule.is_paused:
            return 0.0
        return asyncio.get_running_loop().time() - since

    async def notify(self) -> None:
        """Make every waiting request check its condition again."""
        async with self.condition:
            self.condition.notify_all()

    # ------------------------------------------------------------------ members and the end

    async def freeze(self) -> FrozenRounds:
        """Wait for a running update, and from then on count no barrier until members are installed."""
        self.check_failure()
        await self.executor.hold_updates()
        return self.schedule.freeze().model_copy(update={"is_readable": self.is_readable})

    async def install_members(self, message: InstallMembers) -> None:
        """Replace the set of members by a newer one and notify the waiting requests. Ends a freeze."""
        self.membership = message.membership
        self.executor.install_members(message.membership)
        await self.notify()

    async def fail(self, failure: GradpostError) -> None:
        """End every wait with this failure, and log the first one."""
        if self.failure is None:
            ranks = failure.facts.get("missing", failure.facts.get("ranks"))
            facts = {} if ranks is None else {"trainer": ranks}
            log.error("run failed", reason=failure.detail, round=self.schedule.open, code=failure.code, **facts)
            self.writer.heartbeat_is_due.set()  # the waiting trainers get the failure now, and may exit soon
        await self.end(failure)

    async def end(self, reason: GradpostError) -> None:
        """End every wait with `reason`, and refuse later requests with it. A later reason has no effect."""
        if self.failure is None:
            self.failure = copy.copy(reason)  # its traceback would keep this run and its shard
        self.executor.close(reason)
        await self.notify()

    async def stop(self) -> None:
        """End every wait, and persist the content of the shard, before the process ends."""
        if self.storage is not None and self.storage.is_over:
            await self.writer.prune_folder()  # no heartbeat reply may have reported the last complete checkpoint
        has_log = self.storage is not None and self.storage.has_log
        if self.failure is not None and (has_log or not isinstance(self.failure, FAILURES_OF_TRAINERS)):
            return  # what is acknowledged is in the log, or the shard is not intact
        text = f"pserver {self.index} is stopping and may be restarted; send the request again"
        await self.executor.end_waits(TryAgain(text))
        await self.executor.wait_for_apply()
        await self.writer.wait_for_writes("folder")
        is_persisted = self.storage is None or self.shard.version in self.storage.rounds
        if not is_persisted and self.is_readable and self.executor.is_idle:
            with contextlib.suppress(TryAgain):  # it was logged
                await self.write_checkpoint("folder")
        await self.writer.wait_for_writes()

    async def wait_for_writes(self) -> None:
        """Wait for the running apply, and for the checkpoints that are being written."""
        await self.executor.wait_for_apply()
        await self.writer.wait_for_writes()

    async def finish(self) -> None:
        """Wait until no work of this ended run remains on a thread or a disk."""
        await self.wait_for_writes()
        async with self._publishing:  # checkpoint 0 may be about to be written
            pass
        if self.storage is not None:
            self.storage.close()

    # ------------------------------------------------------------------ checkpoints and inspection

    def require_storage(self) -> RunStorage:
        """Return the storage, if a checkpoint can be made now or soon. Raises NotReady, or the run's failure."""
        self.check_failure()
        self.check_readable()
        if self.storage is None:
            raise NotReady(f"pserver {self.index} has no state folder", waiting_for="a state folder")
        return self.storage

    async def want_checkpoint(self, round_: Round, *, is_over: bool = False) -> None:
        """Write a checkpoint after this round, or number of contributions: immediately if it is the newest one.

        `is_over` marks the last checkpoint of the run, which waits for the checkpoints before it. Raises StaleRound if
        the round is over, TryAgain while another checkpoint is being written.
        """
        self.require_storage()
        if is_over:
            await self.wait_for_writes()
        newest = await self.executor.wait_for_newest(round_, is_over=is_over)
        storage = self.require_storage()
        if round_ < newest:
            raise StaleRound(f"round {round_} is over", current=newest)
        if round_ > newest:
            self.writer.request_round(round_)
        elif round_ not in storage.checkpoints and not self.writer.is_writing(round_):
            self.writer.check_room()
            await self.executor.begin_checkpoint(round_, "place")

    async def write_checkpoint(self, destination: Destination) -> None:
        """Copy the shard as it is, and begin to write the copy. Raises TryAgain."""
        await self.writer.copy_and_write(self.shard, self.schedule.copy_history(), destination, self.compute)

    async def read_now(self, read: Read[T], extra: Mapping[str, str] | None = None) -> T:
        """Return what `read` returns between two updates, on the compute thread; `extra` joins its metadata."""
        return await self.compute.run(lambda: read({**self.metadata(self.shard.version), **(extra or {})}))

    async def digest(self) -> str:
        """Return a digest of all that a request could change: values, optimizer state, barriers, contributions."""
        staged = xxhash.xxh3_128()
        progress = self.round, self.schedule.describe(), self.executor.num_queued
        staged.update(repr(progress).encode())
        for round_, rank, contribution in self.schedule.staged():
            digest_contribution(staged, (round_, rank), contribution)
        return f"{await self.compute.run(self.shard.digest)}-{staged.hexdigest()}"
