"""The follower of one pserver: it copies the shard, and applies each update that the leader logs.

    wait for a leader ──► its run ──► a copy of the shard ──► updates, again and again
                            ▲              ▲                     │ no answer
                            ├──────────────┼─────────────────────┘
                            └──────────────┴── another run or attempt, other updates, damage, a difference

The updates of another incarnation are continued if its log contains the newest update of the replica. With durability
`replicated` the leader acknowledges an update once this process asks for the updates behind it. After a fence nothing
of that incarnation is received or confirmed. The fence is answered once the replica has applied what it had confirmed,
and the replica stays as it is until it is promoted, or a later incarnation is named.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NoReturn

import httpx

from ps_protocol.errors import Conflict, GradpostError, NotReady, StalePserver, TryAgain
from ps_protocol.fields import Instance
from ps_protocol.membership import InstallRun, PserverRegistered
from ps_protocol.retry import choose_backoff
from ps_protocol.standbys import FenceStandby, StandbyAnswer
from ps_protocol.vocabulary import Incarnation, PserverIndex, Round
from services.runtime.compute import ComputeExecutor
from services.runtime.logs import get_logger

from ..durable.disk import Disk
from ..durable.records import Record
from ..durable.snapshot_writer import Publisher
from ..durable.update_log import LoggedUpdate
from ..metrics import PserverMetrics
from ..shard.bodies import BufferPool
from ..waits import wait_for_any
from .replica import Lag, Leader, Replica, check_software, restore_copy

log = get_logger()

FENCE_SECONDS = 1.5  # for which a fence waits for confirmed updates: less than the coordinator's request
LOG_RETRY_SECONDS = 0.1
STEADY_SECONDS = 5.0  # after which a connection counts as working, so that the next failure is the first one

# The leader and this process cannot work together, so that trying again would not help.
REFUSALS = frozenset({"no_update_log", "replica_mismatch", "unsupported_format"})
# The replica cannot be continued.
_BROKEN = frozenset({"updates_gone", "diverged", "future_round", "malformed_frame"})


class Follower:
    """The replica of one pserver's shard, and the loop that keeps it up to date. Lives on the event loop.

    The replica is in a folder of `disk`, which holds its run when this process is promoted.
    """

    def __init__(
        self,
        index: PserverIndex,
        instance: Instance,
        disk: Disk,
        http: httpx.AsyncClient,
        open_updates: Callable[[], httpx.Client],
        report: Callable[[], None],
        *,
        compute: ComputeExecutor,
        pool: BufferPool,
        metrics: PserverMetrics,
    ) -> None:
        """`open_updates` makes a client for the updates of one leader. `http` is for all else.

        `report` is called when the next report to the coordinator has to be sent at once.
        """
        self.index = index
        self.instance = instance
        self.replica: Replica | None = None
        self.leader: StandbyAnswer | None = None  # the newest one that the coordinator named
        self.has_nothing_to_copy = False  # by the newest answer of the coordinator no living pserver serves a run
        self.is_joining = False  # by the same answer: not in sync yet
        self.lost: Incarnation = 0  # of the leader that did not answer, until one answers
        self.report = report
        self.is_released = False  # this process becomes the pserver, and never follows again
        self.lag = Lag()
        self._disk = disk
        self._http = http
        self._open_updates = open_updates
        self._compute = compute
        self._pool = pool
        self._metrics = metrics
        self._is_named = asyncio.Event()  # another leader, or the first one
        self._fenced: Incarnation = 0  # no update of this incarnation, or an earlier one, is received or confirmed
        self._updating = asyncio.Lock()  # held while an update is logged and applied
        self._is_applied = asyncio.Event()  # another update is applied, or none of those in memory will be
        self._logged = ""
        metrics.replica_round.set_function(lambda: self.replica.round if self.replica else 0)
        metrics.lag_rounds.set_function(lambda: self.lag.rounds)
        metrics.lag_seconds.set_function(lambda: self.lag.seconds(asyncio.get_running_loop().time()))

    @property
    def missing(self) -> str | None:
        """The missing condition of a ready standby, as text; None if nothing is missing."""
        if self.has_nothing_to_copy:
            return None
        if self.replica is None:
            return f"a copy of the shard of pserver {self.index}"
        # A rolling restart, which ends a pserver next, waits for a standby that may replace it.
        return f"pserver {self.index} to have this standby in sync" if self.is_joining else None

    @property
    def refusal(self) -> GradpostError:
        """The error for requests that only a pserver answers."""
        if self.is_fenced or self.is_released:
            return TryAgain(f"this standby may become pserver {self.index}; send the request again")
        text = f"this process follows pserver {self.index}, and serves only reads; send the request to the leader"
        return StalePserver(text, code="not_leader", current=self.leader.leader if self.leader else None)

    def require_replica(self) -> Replica:
        """Return the replica. Raises NotReady without one."""
        if self.replica is None:
            text = f"this standby has no replica of pserver {self.index} yet"
            raise NotReady(text, waiting_for=f"a copy of the shard of pserver {self.index}")
        return self.replica

    @property
    def is_fenced(self) -> bool:
        """True if the replica must stay as it is."""
        return self.replica is not None and self.replica.installed.incarnation <= self._fenced

    def note_answer(self, answer: StandbyAnswer) -> None:
        """Note the leader that the coordinator names, and its newest round. Without a leader the last one stays."""
        self.has_nothing_to_copy, self.is_joining = answer.leader is None, answer.is_joining
        if answer.leader is None:
            return
        before, self.leader = self.leader, answer
        if before is None or (before.leader, before.incarnation) != (answer.leader, answer.incarnation):
            self._is_named.set()
        replica = self.replica
        if replica is not None and (answer.run, answer.attempt) == (replica.installed.run, replica.installed.attempt):
            self.lag.note_leader(answer.round, asyncio.get_running_loop().time())

    async def follow(self) -> None:
        """Follow the leader until cancelled or released. Raises an error whose code is one of `REFUSALS`."""
        loop, num_failures = asyncio.get_running_loop(), 0
        while not self.is_released:
            while (named := self.leader) is None:
                await self._is_named.wait()
            self._is_named.clear()
            began = loop.time()
            try:
                await self._follow_leader(named)
            except (httpx.TransportError, ValueError, GradpostError) as error:
                await self._handle_failure(error)
                if isinstance(error, httpx.TransportError):
                    self.lost = named.incarnation
                    self.report()
            num_failures = 1 if loop.time() - began > STEADY_SECONDS else num_failures + 1
            await wait_for_any(choose_backoff(num_failures), self._is_named)

    async def _handle_failure(self, error: Exception) -> None:
        if isinstance(error, GradpostError) and error.code in REFUSALS:
            raise error
        assert self.leader is not None
        if isinstance(error, GradpostError) and error.code in _BROKEN and self.leader.incarnation > self._fenced:
            await self._discard_replica(error)
        self._log_problem(f"{type(error).__name__}: {error}")

    def _log_problem(self, text: str) -> None:
        if text != self._logged:
            self._logged = text
            log.info("not following", pserver=self.index, reason=text)

    async def _discard_replica(self, reason: GradpostError) -> None:
        replica, self.replica = self.replica, None
        self._is_applied.set()
        if replica is not None:
            log.warning("the replica is discarded", round=replica.round, reason=str(reason))
            await replica.end(reason)
            await replica.writer.wait_for_writes()  # to the folder that is cleared before the next copy

    # ------------------------------------------------------------------ fail-over

    async def has_folder_of(self, incarnation: Incarnation) -> bool:
        """Return whether the folder of this incarnation of the pserver is here, and no process uses it."""
        if self.replica is not None:
            await self.replica.writer.wait_for_writes()  # which this process does not end before it leads
        return await asyncio.to_thread(self._disk.has_free_folder, self.index, incarnation)

    async def fence(self, message: FenceStandby) -> Replica:
        """Refuse this incarnation of the leader, and earlier ones, from now on. Return the replica.

        Raises NotReady without a replica of the run and attempt, and StalePserver if it follows a later incarnation.
        """
        replica = self.require_replica()
        installed = replica.installed
        if (installed.run, installed.attempt) != (message.run, message.attempt):
            text = f"the replica is of attempt {installed.attempt} of run {installed.run}"
            raise NotReady(text, waiting_for=f"a copy of the shard of pserver {self.index}")
        if installed.incarnation > message.incarnation:
            text = f"this standby follows a later incarnation of pserver {self.index}"
            raise StalePserver(text, current=installed.incarnation)
        self._fenced = max(self._fenced, message.incarnation)
        if not await self._apply_held(replica) or self.replica is not replica or replica.round < replica.confirmed:
            text = "the replica lacks an update that it has confirmed"
            raise NotReady(text, waiting_for=f"a copy of the shard of pserver {self.index}")
        log.info("the standby is fenced", pserver=self.index, incarnation=message.incarnation, round=replica.round)
        return replica

    async def _apply_held(self, replica: Replica) -> bool:
        """Return whether no update is in memory any more, which may be confirmed already; the disk may hang."""
        try:
            async with asyncio.timeout(FENCE_SECONDS):
                while self.replica is replica and replica.round < replica.held:
                    self._is_applied.clear()
                    await self._is_applied.wait()
                async with self._updating:
                    pass  # the last of them may be due for a checkpoint
        except TimeoutError:
            return False
        return True

    def check_release(self, answer: PserverRegistered) -> Replica:
        """Return the replica for the incarnation that leads from now on.

        Raises NotReady without a replica, and StalePserver unless it is fenced against all earlier incarnations.
        """
        replica = self.require_replica()
        if answer.index != self.index or not self.is_fenced or answer.incarnation <= self._fenced:
            text = f"this standby is not fenced for incarnation {answer.incarnation} of pserver {answer.index}"
            raise StalePserver(text, current=replica.installed.incarnation)
        return replica

    async def release(self, answer: PserverRegistered) -> Replica:
        """Return the replica, and never follow again. Raises the errors of `check_release`."""
        replica = self.check_release(answer)
        self._fenced, self.replica, self.is_released = answer.incarnation, None, True
        self.lag = Lag(replica.round)  # since the metrics remain
        self.report()
        await replica.end(TryAgain(f"the standby becomes pserver {self.index}; send the request again"))
        return replica

    def _check_not_fenced(self, incarnation: Incarnation) -> None:
        if incarnation <= self._fenced:
            raise StalePserver(f"incarnation {incarnation} of pserver {self.index} is fenced", current=self._fenced)

    # ------------------------------------------------------------------ the leader

    async def _follow_leader(self, named: StandbyAnswer) -> None:
        """Follow this leader until it does not answer or the coordinator names another one."""
        assert named.leader is not None
        self._check_not_fenced(named.incarnation)
        with self._open_updates() as updates:  # an earlier connection may be broken
            leader = Leader(named.leader, self._http, updates)
            served = await leader.read_run()
            if served.installed.incarnation != named.incarnation:
                text = f"pserver {self.index} at {named.leader} is not the incarnation that the coordinator named"
                raise StalePserver(text, expected=named.incarnation, actual=served.installed.incarnation)
            check_software(served)
            self._check_not_fenced(named.incarnation)
            if self.replica is None or not self.replica.continues(served.installed):
                await self._begin_replica(leader, served.installed)
            await self._apply_updates(leader, served.installed, named)

    async def _begin_replica(self, leader: Leader, installed: InstallRun) -> None:
        """Begin with a copy of the shard, which is on the disk then."""
        await self._discard_replica(StalePserver(f"pserver {self.index} was rolled back, or serves another run"))
        data = await leader.read_copy(installed.run, installed.attempt)
        restored = await self._compute.run(restore_copy, installed, self.index, data)
        try:
            storage = await asyncio.to_thread(self._disk.begin_replica, installed, self.index, data, restored)
        except OSError as error:
            raise TryAgain(f"the standby cannot write its replica of pserver {self.index}: {error}") from error
        self.replica = replica = Replica(
            installed, self.index, restored=restored, storage=storage, publisher=Publisher(self._disk.find_place),
            report=self.report, compute=self._compute, pool=self._pool, metrics=self._metrics,
        )  # fmt: skip
        self.lag = Lag(replica.round)  # the reports may be of another attempt
        self.report()
        self._metrics.replica_copies.inc()
        log.info("replica copied", pserver=self.index, run=installed.run, round=replica.round)

    async def _apply_updates(self, leader: Leader, installed: InstallRun, named: StandbyAnswer) -> NoReturn:
        """Confirm, log and apply updates while the next ones, and no more, are received.

        An update is confirmed by the request for the updates behind it, as soon as it is in memory; while the log
        fails, once it is applied. The replica is one of the leader's incarnation once the leader's log has confirmed
        its newest update.
        """
        replica = self.require_replica()
        replica.discard_held()
        updates: list[tuple[LoggedUpdate, Record]] = []
        handling = asyncio.create_task(self._handle_updates([], replica))
        asking: asyncio.Task[tuple[list[Record], Round]] | None = None
        try:
            while True:
                if replica.has_failed_to_log:
                    await handling
                self._check_not_fenced(named.incarnation)
                replica.confirmed = max(replica.confirmed, replica.held)
                asking = asyncio.create_task(leader.read_updates(replica, self.instance, named.incarnation))
                asking.add_done_callback(lambda task: task.cancelled() or task.exception())
                if updates or handling.done():
                    await handling
                    handling = asyncio.create_task(self._handle_updates(updates, replica))
                records, newest = await asyncio.shield(asking)
                self._check_not_fenced(named.incarnation)
                if self._is_named.is_set():
                    raise StalePserver(f"pserver {self.index} has another leader now")
                replica.installed, self.lost = installed, 0
                self.lag.note_leader(newest, asyncio.get_running_loop().time())
                updates = [(replica.hold_update(record), record) for record in records]
        except asyncio.CancelledError:
            handling.cancel()
            raise
        finally:
            try:
                if asking is not None:
                    await asyncio.wait({asking})  # its thread uses the client of updates
                await asyncio.gather(handling, return_exceptions=True)  # a failure has discarded the replica
            finally:
                replica.discard_held()
                self._is_applied.set()

    async def _handle_updates(self, updates: Sequence[tuple[LoggedUpdate, Record]], replica: Replica) -> None:
        for update, record in updates:
            async with self._updating:
                await self._apply(update, record, replica)
        if not updates:
            self._logged = ""

    async def _apply(self, update: LoggedUpdate, record: Record, replica: Replica) -> None:
        """Log an update and apply it. While the disk fails, the update stays in memory, since it may be confirmed."""
        while True:
            try:
                await replica.replay(update, record)
                break
            except OSError as error:
                replica.has_failed_to_log = True
                self._log_problem(f"the standby cannot log an update of pserver {self.index}: {error}")
            except Conflict as error:
                self._metrics.replica_differences.inc()
                log.error("the replica differs from its leader", pserver=self.index, round=replica.round)
                await self._discard_replica(error)
                raise
            except Exception as error:
                log.exception("an update cannot be applied", round=update.round)
                broken = TryAgain(f"an update of pserver {self.index} cannot be applied: {error}")
                await self._discard_replica(broken)
                raise broken from error
            await asyncio.sleep(LOG_RETRY_SECONDS)
        replica.has_failed_to_log = False
        self._is_applied.set()
        self._metrics.replica_updates.inc()
        self.lag.note_applied(replica.round)
        await replica.snapshot_if_due()
