"""The coordinator's event loop: the clock, its durable state, and the tasks that carry out the cluster's decisions."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import secrets
from collections.abc import Callable, Mapping

import httpx

from ps_protocol.errors import NotFound, NotReady, StorageFailed, TryAgain
from ps_protocol.messages import PlanReady
from ps_protocol.vocabulary import Incarnation, Rank
from services.runtime.logs import bind_facts, get_logger
from services.runtime.storage import open_checkpoint_storage

from .checkpoints import Checkpoints
from .curves import Curves
from .events import Events
from .failover import FailOver
from .history import HistoryWriter, RunHistory
from .output import OutputLog
from .pserver_calls import WaitLog
from .reconcile import Reconciler
from .restore import RecordFile, restore_state
from .result import RunResult
from .settings import CoordinatorSettings
from .state.cluster import Cluster
from .state.standbys import StandbyRegistry

log = get_logger()

RETRY_SECONDS = 0.2
EARLY_ROUNDS = 5  # of the others, after which the end of a trainer is reported as early


class Coordinator:
    """One cluster on one event loop. Handlers change `cluster` synchronously and then call `changed`."""

    def __init__(self, settings: CoordinatorSettings, http: httpx.AsyncClient) -> None:
        self.cluster = Cluster(settings, name_run=lambda: secrets.token_hex(6))
        self.http = http
        self._settings = settings
        self._condition = asyncio.Condition()
        self._wake = asyncio.Event()
        self.events = Events(settings.state_dir)
        self.curves = Curves()
        self.output = OutputLog()
        waits = WaitLog()
        self._reconciler = Reconciler(self.cluster, http, self.now, self.persist, waits)
        self.failover = FailOver(
            self.cluster, http, self.now, self.persist, changed=self.changed, interrupt=self._reconciler.interrupt
        )
        self._reconciler.on_silence = self.failover.suspect
        self.checkpoints = Checkpoints(
            self.cluster,
            http,
            open_checkpoint_storage(settings.checkpoints or str(settings.state_dir / "checkpoints")),
            settings.keep_checkpoints,
            now=self.now,
            persist=self.persist,
            wait_until=self.wait_until,
        )
        self.result = RunResult(self.cluster, http, self.now, self.wait_until, waits, self.checkpoints)
        self._saving: asyncio.Task[None] | None = None  # saves the result
        self.history = RunHistory(settings.history_folder)
        self._history_writer = HistoryWriter(self.history, self.cluster, self.curves, self.result)
        self._file = RecordFile(settings.state_dir)
        self._persist_lock = asyncio.Lock()
        self._early_ends: set[tuple[str, Rank, Incarnation]] = set()  # that were logged
        self._failing_since: float | None = None  # since when writing has failed

    def now(self) -> float:
        """Return the time of the monotonic clock that leases use."""
        return asyncio.get_running_loop().time()

    @property
    def standbys(self) -> StandbyRegistry:
        """The living standbys."""
        return self.failover.standbys

    def changed(self) -> None:
        """Note the events of a change of the cluster, before another change hides it, and wake the background tasks."""
        self.events.detect_changes(self.cluster)
        self._history_writer.note(self.now())
        self._wake.set()
        self.checkpoints.wake.set()

    # ------------------------------------------------------------------ durable state

    async def restore(self) -> None:
        """Restore the state of an earlier process of this coordinator. Raises StorageFailed if it cannot be used."""
        try:
            if not await asyncio.to_thread(self._file.lock):
                text = f"another coordinator uses {self._settings.state_dir}"
                raise StorageFailed(f"{text}; set another --state-dir or GRADPOST_STATE_DIR for this one")
            await asyncio.to_thread(self.events.read)
        except OSError as error:
            raise StorageFailed(f"the coordinator cannot use {self._settings.state_dir}: {error}") from error
        try:
            record = await asyncio.to_thread(self._file.read)
        except OSError as error:
            advice = "delete this file to begin a new run, or to resume from the newest checkpoint"
            raise StorageFailed(f"{error}; {advice}") from error
        try:
            clock = asyncio.get_running_loop().time
            await asyncio.to_thread(restore_state, self.cluster, record, self._settings, self.checkpoints.place, clock)
            if self._settings.resume:
                await self.persist()  # so that another restart resumes the same run
        except (OSError, TryAgain) as error:
            raise StorageFailed(str(error)) from error
        with contextlib.suppress(NotFound):
            run = self.cluster.run.record.name
            self._history_writer.restore(await asyncio.to_thread(self.history.read, run))

    async def persist(self) -> None:
        """Persist the cluster's state.

        Raises TryAgain if the disk fails, and StorageFailed once it has failed for the round time-out.
        """
        async with self._persist_lock:
            record = self.cluster.describe()  # under the lock, so that a newer record is not overwritten
            try:
                await asyncio.to_thread(self._file.write, record)
            except OSError as error:
                text = f"the coordinator's state cannot be written: {error}"
                if self._failing_since is None:
                    self._failing_since = self.now()
                    log.error(text)
                if self.now() - self._failing_since > self._settings.round_timeout_seconds:
                    raise StorageFailed(text) from error
                raise TryAgain(text) from error
            self._failing_since = None
            self.cluster.persisted = record.replicas

    # ------------------------------------------------------------------ background

    async def run(self, stop: asyncio.Event) -> None:
        """Expire leases and reconcile the pservers until `stop` is set. Sets `stop` when the work is done."""
        try:
            async with asyncio.TaskGroup() as tasks:
                others = self._expire_leases(), self._complete_checkpoints(), self._history_writer.write_notes()
                beside = [tasks.create_task(other) for other in others]
                await self._reconcile_until(stop)
                for task in beside:
                    task.cancel()
        finally:
            self.failover.close()
            await self._notify_waiters()
            self._history_writer.note(self.now(), is_stopping=True)
            await self._history_writer.flush()
            self._file.unlock()

    async def _expire_leases(self) -> None:
        # A separate task, since the reconciliation may wait for a lost pserver.
        period = min(0.5, self.cluster.lease_seconds / 4)
        due = self.now()
        while True:
            if (paused := self.now() - due) > self.cluster.lease_seconds / 2:
                # This process was stopped (SIGSTOP, a paused machine), so the silence was its own.
                log.warning("the coordinator was paused; all leases are renewed", seconds=round(paused, 1))
                self.cluster.renew_leases(self.now())
                self.failover.standbys = self.standbys.renew_leases(self.now())
            self.cluster.expire(self.now())
            self.failover.standbys = self.standbys.expire(self.now(), self.cluster.lease_seconds)
            self.failover.suspect_lost()
            self.changed()
            await self._notify_waiters()  # the reconciliation may be waiting for a pserver
            due = self.now() + period
            await asyncio.sleep(period)

    async def _complete_checkpoints(self) -> None:
        # A separate task, since the place may be slow or hang.
        while True:
            await self.checkpoints.wake.wait()
            self.checkpoints.wake.clear()
            if await self.checkpoints.complete():
                await self._notify_waiters()
            await self.checkpoints.advance()

    async def _notify_waiters(self) -> None:
        self.events.detect_changes(self.cluster)
        async with self._condition:
            self._condition.notify_all()

    async def _reconcile_until(self, stop: asyncio.Event) -> None:
        logged, checked_at = "", self.now()
        members: Mapping[Rank, Incarnation] = {}
        while not stop.is_set():
            await self._wake.wait()
            self._wake.clear()
            checked_at = self._log_losses(checked_at)
            self._log_early_ends()
            self.cluster.start_run_if_complete(self.now())
            if self.failover.is_replacing:
                continue  # its end wakes this task
            self.failover.has_ended.clear()
            if not await self._reconciler.reconcile():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(RETRY_SECONDS):
                        await self.failover.has_ended.wait()
                self._wake.set()
            elif members != self.cluster.run.installed.members:
                members = self.cluster.run.installed.members
                log.info("members installed", trainers=sorted(members), reason=self.cluster.run.reason)
            await self._notify_waiters()
            logged = self._log_news(logged)
            run = self.cluster.run
            if run.record.is_deserted and not run.is_result_saved and self._saving is None:
                self._saving = asyncio.create_task(self._save_result(), name="save the result")
            if self.cluster.may_exit and self.standbys.may_exit:
                stop.set()

    def _log_losses(self, after: float) -> float:
        """Log trainers that were lost after this time, and return the current time."""
        for rank, trainer in self.cluster.run.record.trainers.items():
            if not trainer.is_present and self.cluster.run.reports[rank].gone_at > after:
                log.info(trainer.why, trainer=rank)
        return self.now()

    def _log_early_ends(self) -> None:
        """Log each trainer that is done, once the others have gone on without it for several rounds."""
        run, record = self.cluster.run, self.cluster.run.record
        newest = max((run.reports[rank].round for rank in record.members), default=0)
        for rank, trainer in record.trainers.items():
            end = record.name, rank, trainer.incarnation
            if trainer.state == "done" and newest > trainer.round + EARLY_ROUNDS and end not in self._early_ends:
                self._early_ends.add(end)
                left = f"{len(record.members)} of {len(record.trainers)} trainers"
                verb = "remains" if len(record.members) == 1 else "remain"
                log.warning(f"trainer {rank} is done (round {trainer.round}); {left} {verb}")

    def _log_news(self, logged: str) -> str:
        """Log the state of the run, or what it waits for, if that differs from `logged`. Returns the text."""
        run, waits, failure = self.cluster.run, self.cluster.waiting_for, self.cluster.run.record.failure
        bind_facts(run=run.record.name)
        news = f"waiting for {', '.join(waits)}" if waits else f"run {run.record.state}"
        round_ = min(self.cluster.rounds, default=run.lowest_round)
        if run.record.state == "finished" and failure is not None:
            news = "run stopped"
        if news != logged and failure is not None:
            trainers = failure.facts.get("ranks") or failure.facts.get("missing")
            log.error(news, round=round_, trainer=trainers, code=failure.code, reason=failure.detail)
        elif news != logged:
            log.info(news, round=round_)
        return news

    async def _save_result(self) -> None:
        try:
            await self.result.save(self.cluster.run)
        finally:
            self._saving = None
            self.changed()

    # ------------------------------------------------------------------ waiting

    async def wait_until(self, is_so: Callable[[], bool], seconds: float) -> None:
        """Wait until a condition holds, for at most `seconds`. The condition is checked after every change."""
        async with self._condition:
            with contextlib.suppress(TimeoutError):
                # Not `asyncio.wait_for`: before 3.12 it waits in another task, which a second cancellation, as of a
                # closed stream, leaves behind with the lock.
                async with asyncio.timeout(seconds):
                    await self._condition.wait_for(is_so)

    async def wait_for_plan(self, rank: Rank, run: str, incarnation: Incarnation, wait_seconds: float) -> PlanReady:
        """Wait until all pservers have installed a trainer. Raises NotReady, or the run's failure."""

        def ready() -> bool:
            record = self.cluster.run.record
            is_over = record.name != run or record.is_over
            return is_over or self.cluster.plan_ready(rank, incarnation) is not None

        await self.wait_until(ready, wait_seconds)
        current = self.cluster.run
        current.member(rank, run, incarnation)
        if current.record.failure is not None:
            raise copy.copy(current.record.failure)  # a raised exception collects frames, so each waiter gets a copy
        plan = self.cluster.plan_ready(rank, incarnation)
        if plan is None:
            waits = self.cluster.waiting_for or ["the pservers to install this trainer"]
            raise NotReady(f"the cluster waits for {', '.join(waits)}", waiting_for=waits)
        return plan
