"""The pserver: its identity and the run that it serves, one after another; or, as a standby, the one that it repeats.

A standby refuses all but reads until it is promoted:

PUT fence ──► the replica stays as it is ──► PUT promote ──► this process is the pserver, and reads no file
                        │
                        └── the coordinator names a later incarnation ──► the standby follows again
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from functools import partial

from ps_protocol.errors import (
    BadModel,
    Conflict,
    GradpostError,
    NotReady,
    StalePserver,
    StaleRun,
    StorageFailed,
    TryAgain,
    error_from_problem,
)
from ps_protocol.frames import FrameLimits
from ps_protocol.membership import (
    Freeze,
    FrozenRounds,
    HeldRun,
    InstallMembers,
    InstallRun,
    PserverRegistered,
    RegisterPserver,
    RequiredStandbys,
    WantCheckpoint,
)
from ps_protocol.messages import PserverHeartbeat, PserverHeartbeatReply
from ps_protocol.plan import SlicePlan
from ps_protocol.standbys import FenceStandby
from ps_protocol.vocabulary import PROTOCOL_VERSION, Incarnation, PserverIndex, Round
from services.runtime.compute import ComputeExecutor
from services.runtime.failpoints import reach_failpoint
from services.runtime.logs import bind_facts, get_logger
from services.runtime.storage import DamagedFile

from .durable.disk import Disk
from .durable.snapshot_writer import Publisher
from .durable.storage import Ranges, Restored, RunStorage
from .following.follower import Follower
from .metrics import PserverMetrics
from .run.queue_run import QueueRun
from .run.run import Run
from .run.staging import MembershipChanges
from .run.sync_run import SyncRun
from .shard.bodies import BufferPool, InFlight

log = get_logger()

MAX_ENDED_RUNS = 1000
FRAME_ROOM_BYTES = 1024  # room in a frame besides its only block


class Pserver:
    """The identity of this process, which the coordinator assigns, and its run. Lives on the event loop."""

    def __init__(
        self,
        compute: ComputeExecutor,
        metrics: PserverMetrics,
        limits: FrameLimits,
        in_flight: InFlight,
        disk: Disk,
    ) -> None:
        self.disk = disk
        self.address = ""  # its base URL, http2 and `local`: as in `RegisterPserver`
        self.http2 = True
        self.local: str | None = None
        self.follower: Follower | None = None  # while this process is a standby
        self.instance = secrets.token_hex(16)  # of the process, so that a registration can be retried
        self.index: PserverIndex | None = None
        self.incarnation: Incarnation | None = None
        self.publisher = Publisher(disk.find_place)
        self.pool = BufferPool()
        self.limits = limits
        self.in_flight = in_flight
        self._compute = compute
        self.metrics = metrics
        self.promoted: PserverRegistered | None = None  # the newest registration as a pserver of this standby
        self.is_stopping = False  # the shard is being persisted before the process ends
        self.heartbeat_is_due = asyncio.Event()  # the next one, or report of a standby, has to be sent at once
        self._run: Run | None = None
        self._changes = MembershipChanges()  # of the served run, or of the run in the newest request
        self._installing = asyncio.Lock()
        self.promoting = asyncio.Lock()
        self._searching = asyncio.Lock()
        self._ended_runs: deque[str] = deque(maxlen=MAX_ENDED_RUNS)  # no late installation restarts one of them
        metrics.staged_bytes.set_function(lambda: self.pool.used_bytes)
        metrics.in_flight_bytes.set_function(lambda: self.in_flight.num_bytes)
        metrics.pooled_bytes.set_function(lambda: self.pool.idle_bytes)
        metrics.round.set_function(lambda: self._run.round if self._run else 0)
        metrics.log_bytes.set_function(lambda: self._storage.log.num_bytes if self._storage else 0)
        metrics.checkpoint_round.set_function(lambda: max(self._storage.rounds, default=0) if self._storage else 0)
        metrics.queued.set_function(lambda: self._run.describe_progress().get("num_queued", 0) if self._run else 0)
        metrics.missing.set_function(lambda: len(self._run.late[0]) if self._run else 0)
        metrics.waiting_seconds.set_function(lambda: self._run.late[1] if self._run else 0)
        metrics.disk_free.set_function(lambda: disk.measure_usage()[1])
        metrics.disk_size.set_function(lambda: disk.measure_usage()[0])

    @property
    def _storage(self) -> RunStorage | None:
        return None if self._run is None else self._run.storage

    @property
    def run(self) -> Run:
        """The current run. Raises NotReady without one, and StalePserver (`not_leader`) in a standby."""
        self._check_leads()
        if self._run is None:
            raise NotReady("this pserver has no run yet", waiting_for="the cluster to be complete")
        return self._run

    @property
    def shown(self) -> Run | None:
        """The current run, or in a standby the replica, for readers."""
        return self._run if self.follower is None else self.follower.replica

    def require_shown(self) -> Run:
        """Return the current run, or in a standby the replica. Raises NotReady without one."""
        return self.run if self.follower is None else self.follower.require_replica()

    @property
    def missing(self) -> str | None:
        """The missing condition of a ready process, as text; None if nothing is missing."""
        if self.follower is not None:
            return self.follower.missing
        return "registration with the coordinator" if self.index is None else None

    def _check_leads(self) -> None:
        if self.follower is not None:
            raise self.follower.refusal

    async def begin_again(self) -> None:
        """Forget identity, run and folder, as if this process had just started: it takes another role."""
        self.index = self.incarnation = self.follower = None
        self.instance = secrets.token_hex(16)
        async with self._installing:
            await self._replace_run(None, StalePserver("this process takes another role"))
            self._changes = MembershipChanges()
            self.metrics.checkpoint_time.set(0)
            self.disk.close()

    def make_registration(
        self, index: PserverIndex | None, previous: Incarnation, held: HeldRun | None
    ) -> RegisterPserver:
        """Return the message with which this process registers. `held` is the run in its folder or its memory."""
        return RegisterPserver(
            protocol=PROTOCOL_VERSION, instance=self.instance, address=self.address, http2=self.http2, local=self.local,
            index=index, previous=previous, held=held,
        )  # fmt: skip

    async def open_folder(self, index: PserverIndex | None) -> HeldRun | None:
        """End the current run, lock the folder, and restore the run in it, before a registration.

        Damaged files are passed over. Raises FolderTaken if another process holds the folder, StorageFailed if it
        cannot be used, and TryAgain if its contents cannot be read now.
        """
        async with self._installing:
            await self._replace_run(None, StalePserver("the pserver is being registered again"))
            self._changes = MembershipChanges()
            try:
                await asyncio.to_thread(self.disk.open, self.index if index is None else index)
            except OSError as error:
                if self.disk.folder is not None:
                    folder = self.disk.folder.path
                    raise TryAgain(f"pserver {self.disk.index} cannot read its state in {folder}: {error}") from error
                text = f"the pserver cannot use its state folder: {error}. Set a state_dir that it can write to"
                raise StorageFailed(text) from error
            return self.disk.held

    async def adopt_identity(self, answer: PserverRegistered) -> None:
        """Adopt the identity that the coordinator assigned; a run of an earlier identity is dropped.

        Raises FolderTaken if another process holds the folder of this index, StorageFailed if it cannot be written.
        """
        if (self.index, self.incarnation) == (answer.index, answer.incarnation):
            return
        async with self._installing:  # the coordinator may send a run before the disk is done with the identity
            self.index, self.incarnation = answer.index, answer.incarnation
            bind_facts(pserver=answer.index)
            await self._write_identity(answer)
            identity = f"pserver {answer.index} incarnation {answer.incarnation}"
            await self._replace_run(None, StalePserver("the pserver was registered again", current=identity))

    async def fence(self, message: FenceStandby) -> RegisterPserver:
        """Fence the replica: see `Follower.fence`. Return the registration of this process as the pserver."""
        async with self.promoting:
            follower = self._require_follower()
            replica = await follower.fence(message)
            held = replica.storage.describe_held(replica.restored)
            return self.make_registration(follower.index, replica.installed.incarnation, held)

    async def promote(self, answer: PserverRegistered) -> None:
        """Become the pserver, which holds the run of the replica until it is installed. Repeating changes nothing.

        Raises NotReady, StalePserver, and StorageFailed, after which the request can be repeated.
        """
        async with self.promoting:
            if self.follower is None and (self.index, self.incarnation) == (answer.index, answer.incarnation):
                return
            follower = self._require_follower()
            follower.check_release(answer)
            await self._write_identity(answer)
            replica = await follower.release(answer)
            self.disk.adopt_replica(replica.restored)
            await self.adopt_identity(answer)
            self.follower, self.promoted = None, answer
            log.info("promoted", pserver=answer.index, incarnation=answer.incarnation, round=replica.round)

    def _require_follower(self) -> Follower:
        if self.follower is None:
            raise StalePserver(f"this process is pserver {self.index}, and no standby", current=self.incarnation)
        return self.follower

    async def _write_identity(self, answer: PserverRegistered) -> None:
        """Write the identity to the disk, unless it is there. Raises FolderTaken, and StorageFailed."""
        disk = self.disk
        if (disk.index, disk.previous_incarnation) == (answer.index, answer.incarnation):
            return
        try:
            await asyncio.to_thread(disk.write_incarnation, answer.index, answer.incarnation)
        except OSError as error:
            text = f"pserver {answer.index} cannot write its identity: {error}. Set a state_dir that it can write to"
            raise StorageFailed(text) from error

    async def _replace_run(self, run: Run | None, reason: GradpostError) -> None:
        """Replace the run. Requests to the old one, also in the middle of a body, fail with the reason."""
        old, self._run = self._run, run
        bind_facts(run=run.installed.run if run else None)
        self.pool.free_idle()
        if old is not None:
            await old.close(reason)

    async def install_run(self, message: InstallRun) -> None:
        """Start serving a run. A repeated installation changes nothing but the members, if they are newer."""
        async with self._installing:
            self._check_leads()
            if message.incarnation != self.incarnation or self.index is None:
                raise StalePserver(
                    f"the installation is for another incarnation of pserver {self.index}",
                    expected=self.incarnation, actual=message.incarnation,
                )  # fmt: skip
            await self._install_run(message)

    async def _install_run(self, message: InstallRun) -> None:
        current = self._run
        if current is not None and (current.installed.run, current.installed.attempt) == (message.run, message.attempt):
            if current.installed.plan != message.plan:
                raise Conflict(f"run {message.run} is installed with another slice plan on pserver {self.index}")
            self._require_standbys(message.required)
            members = InstallMembers(
                run=message.run, attempt=message.attempt, number=message.number, membership=message.membership
            )
            await self._change_members(current, members)
            return
        if current is not None and current.installed.run == message.run and message.attempt < current.installed.attempt:
            raise StaleRun(f"attempt {message.attempt} has been rolled back", current=current.installed.attempt)
        assert self.index is not None
        if message.run in self._ended_runs:
            text = f"run {message.run} has ended on pserver {self.index}"
            raise StaleRun(text, current=current.installed.run if current else None)
        changes = self._changes_of(message.run)
        changes.check_change(message.number)
        if message.durability != "none":
            message.consistency.check_log(f"durability {message.durability}")
        self._check_size(message.plan, self.index)  # before the shard is allocated
        if current is not None and current.installed.run != message.run:
            self._ended_runs.append(current.installed.run)
        if current is not None and current.installed.run == message.run and current.standbys is not None:
            current.standbys.require(message.required)  # another attempt may know a later set
            message = message.model_copy(update={"required": current.standbys.required})
        del current  # its shard is freed before another is allocated
        await self._replace_run(None, StaleRun(f"pserver {self.index} serves another run now", current=message.run))
        reach_failpoint("open.before")
        storage, restored = await self._open_storage(message)
        reach_failpoint("open.after")
        run = (QueueRun if message.consistency.is_async else SyncRun)(
            message, self.index, compute=self._compute, pool=self.pool, metrics=self.metrics, storage=storage,
            restored=restored, publisher=self.publisher, report=self.heartbeat_is_due.set,
        )  # fmt: skip
        await self._replace_run(run, StaleRun(f"pserver {self.index} serves another run now", current=message.run))
        changes.end_change(message.number)
        await run.publish()
        self.heartbeat_is_due.set()  # the coordinator names this pserver to its standbys after the next one
        log.info("run installed", round=run.round)

    def _changes_of(self, run: str) -> MembershipChanges:
        if self._changes.run != run:
            self._changes = MembershipChanges(run)
        return self._changes

    async def _open_storage(self, message: InstallRun) -> tuple[RunStorage, Restored | None]:
        try:
            return await asyncio.to_thread(self.disk.open_run, message)
        except DamagedFile as error:
            raise StorageFailed(f"pserver {self.index} cannot restore its shard: {error}") from error
        except OSError as error:
            # The place may be busy, or the disk full: the coordinator retries, until a time-out.
            raise TryAgain(f"pserver {self.index} cannot open the state of the run: {error}") from error

    def _check_size(self, plan: SlicePlan, index: PserverIndex) -> None:
        """Raise BadModel for a plan with a block or buffer that no frame could contain."""
        most = self.limits.max_body_bytes - FRAME_ROOM_BYTES
        items = [(block.name, max(plan.block_bytes(block), plan.pushed_bytes(block))) for block in plan.shards[index]]
        items += [(spec.name, spec.num_bytes) for spec in plan.buffers if spec.pserver == index]
        for name, num_bytes in items:
            if num_bytes > most:
                raise BadModel(
                    f"{name!r} does not fit into one frame of pserver {index}; raise its GRADPOST_MAX_BODY_BYTES",
                    expected=f"<= {most} bytes", actual=num_bytes,
                )  # fmt: skip

    async def install_members(self, message: InstallMembers) -> None:
        """Install the members of the current run, or its failure, which ends every wait.

        Messages for another run or attempt, and of an earlier change, change nothing.
        """
        run = await self._opened_run()
        if run is None or (message.run, message.attempt) != (run.installed.run, run.installed.attempt):
            return
        reach_failpoint("install.before")
        if message.failure is not None and message.number > self._changes.ended:
            await run.end(error_from_problem(message.failure), is_failure=True)
        elif message.failure is None:
            await self._change_members(run, message)
        reach_failpoint("install.after")

    async def _change_members(self, run: Run, message: InstallMembers) -> None:
        if self._run is run and self._changes.is_current(message.number):  # no later change has begun meanwhile
            self._changes.end_change(message.number)
            await run.install_members(message.membership)

    async def freeze(self, message: Freeze) -> FrozenRounds:
        """Begin a change of members: hold every barrier back until the end of this change, or of a later one.

        Raises Conflict if it is late, StaleRun if this pserver has another attempt, NotReady if it has nothing of the
        run. In all these cases the end of an earlier change no longer has an effect.
        """
        reach_failpoint("freeze.before")
        run = await self._opened_run()
        if run is not None and run.installed.run != message.run:
            raise NotReady(f"pserver {self.index} serves run {run.installed.run}", waiting_for="an installation")
        self._changes_of(message.run).begin_change(message.number)
        if run is None:
            frozen = self._freeze_held(message)
        elif run.installed.attempt != message.attempt:
            raise StaleRun(f"pserver {self.index} serves another attempt", current=run.installed.attempt)
        else:
            frozen = await run.freeze()
        reach_failpoint("freeze.after")
        return frozen

    async def _opened_run(self) -> Run | None:
        """Return the current run, after a running installation or search.

        Raises the refusal of a standby, and TryAgain before the folder is opened, or while it cannot be read: requests
        arrive a little earlier.
        """
        async with self._installing:
            self._check_leads()
            if not self.disk.is_open:
                if self.disk.folder is None:
                    raise TryAgain("the pserver has not opened its state folder yet")
                try:
                    await asyncio.to_thread(self.disk.open, self.index)
                except OSError as error:
                    raise TryAgain(f"pserver {self.index} cannot read its state: {error}") from error
            return self._run

    def _freeze_held(self, message: Freeze) -> FrozenRounds:
        """Return the progress of the run on the disk, of which nothing is staged."""
        held = self.disk.held
        if held is None or held.run != message.run:
            raise NotReady(f"pserver {self.index} holds nothing of run {message.run}", waiting_for="an installation")
        if held.attempt != message.attempt:
            raise StaleRun(f"pserver {self.index} holds another attempt of run {message.run}", current=held.attempt)
        return held.rounds

    async def find_restorable(self, run: str, newest: Round | None = None, *, is_complete: bool = False) -> Ranges:
        """Return the ranges of rounds to which a run can go back: see `Disk.find_restorable`."""
        served = await self._opened_run()
        if self.index is None and not self.disk.holds(run):
            raise NotReady("the pserver is not registered yet", waiting_for="its registration")
        storage = served.storage if served is not None and served.installed.run == run else None
        find = partial(self.disk.find_restorable, storage, run, newest, is_complete=is_complete)
        try:
            async with self._searching:  # a repeated request waits, so that a slow disk occupies one thread
                return await asyncio.to_thread(find)
        except OSError as error:
            raise StorageFailed(f"pserver {self.index} cannot read its snapshots: {error}") from error

    async def want_checkpoint(self, message: WantCheckpoint) -> None:
        """Publish the shard after a round: see `Run.want_checkpoint`."""
        run = self.run
        if run.installed.run != message.run:
            raise StaleRun(f"pserver {self.index} serves another run", current=run.installed.run)
        await run.want_checkpoint(message.round, is_over=message.is_over)

    async def stop(self) -> None:
        """End the waiting requests, and persist the shard, before the process ends."""
        if self._run is not None:
            await self._run.stop()

    def handle_heartbeat_reply(self, reply: PserverHeartbeatReply, heartbeat: PserverHeartbeat) -> None:
        """Note the coordinator's notice, required standbys and complete checkpoints, in answer to this heartbeat."""
        run = self._run
        if run is None:
            return
        if heartbeat.run == run.installed.run:
            self._require_standbys(reply.required)
        run.waits.notice = reply.notice
        is_current = (heartbeat.run, heartbeat.attempt) == (run.installed.run, run.installed.attempt)
        if is_current:  # else its rounds may have been rolled back since
            run.storage.complete = reply.complete

    def _require_standbys(self, required: RequiredStandbys) -> None:
        """Wait for these standbys from now on, unless a later set of them is known."""
        if self._run is not None and self._run.standbys is not None:
            self._run.standbys.require(required)
