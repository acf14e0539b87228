"""The coordinator's event loop: the clock, its durable state, and the tasks that carry out the cluster's decisions."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import secrets
from collections.abc import Callable, Mapping

import httpx

from ps_protocol.errors import GradpostError, NotReady, StaleRound, StorageFailed, TryAgain
from ps_protocol.messages import PlanReady, PserverState, RunSummary, ShardSummary
from ps_protocol.vocabulary import Incarnation, Rank, Round
from services.runtime.logs import bind_facts, get_logger
from services.runtime.storage import open_checkpoint_storage

from .activity import ActivityLog, Curves
from .audit import AuditLog
from .checkpoints import CheckpointSchedule, Manifests
from .events import Events
from .reconcile import RESULT_SECONDS, Reconciler, read_state, want_checkpoint
from .restore import RecordFile, restore_state
from .settings import CoordinatorSettings
from .state.cluster import Cluster
from .state.run import Run
from .state.status import copy_fields

log = get_logger()

RETRY_SECONDS = 0.2
RESULT_RETRY_SECONDS = 1.0


class Coordinator:
    """One cluster on one event loop. Handlers change `cluster` synchronously and then call `changed`."""

    def __init__(self, settings: CoordinatorSettings, http: httpx.AsyncClient) -> None:
        self.cluster = Cluster(settings, name_run=lambda: secrets.token_hex(6))
        self.http = http
        self._settings = settings
        self._condition = asyncio.Condition()
        self._wake = asyncio.Event()
        self._wake_manifests = asyncio.Event()
        self.is_stopping = False
        self.events = Events()
        self.curves = Curves()
        self.activity = ActivityLog()
        self.audit = AuditLog(settings.state_dir)
        self._reconciler = Reconciler(self.cluster, http, self.now, self.persist)
        self._last_summary: RunSummary | None = None
        self._summed_up: tuple[str, float | None, Round] = "", None, 0  # run, start and round of the newest summary
        self._summed_up_at = 0.0  # when its first summary was made
        self._recording: asyncio.Task[None] | None = None
        self.place = open_checkpoint_storage(settings.checkpoints or str(settings.state_dir / "checkpoints"))
        self._manifests = Manifests(self.cluster, self.place, settings.keep_checkpoints)
        self.schedule = CheckpointSchedule(self.cluster, http, self.now)
        self._file = RecordFile(settings.state_dir)
        self._persist_lock = asyncio.Lock()
        self._failing_since: float | None = None  # since when writing has failed

    def now(self) -> float:
        """Return the time of the monotonic clock that leases use."""
        return asyncio.get_running_loop().time()

    def changed(self) -> None:
        """Wake the background tasks after a change of the cluster."""
        self._wake.set()
        self._wake_manifests.set()

    # ------------------------------------------------------------------ durable state

    async def restore(self) -> None:
        """Restore the state of an earlier process of this coordinator. Raises StorageFailed if it cannot be used."""
        try:
            if not await asyncio.to_thread(self._file.lock):
                text = f"another coordinator uses {self._settings.state_dir}"
                raise StorageFailed(f"{text}; set another --state-dir or GRADPOST_STATE_DIR for this one")
            await asyncio.to_thread(self.audit.read)
        except OSError as error:
            raise StorageFailed(f"the coordinator cannot use {self._settings.state_dir}: {error}") from error
        try:
            record = await asyncio.to_thread(self._file.read)
        except OSError as error:
            advice = "delete this file to begin a new run, or to resume from the newest checkpoint"
            raise StorageFailed(f"{error}; {advice}") from error
        try:
            clock = asyncio.get_running_loop().time
            await asyncio.to_thread(restore_state, self.cluster, record, self._settings, self.place, clock)
            if self._settings.resume:
                await self.persist()  # so that another restart resumes the same run
        except (OSError, TryAgain) as error:
            raise StorageFailed(str(error)) from error

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

    # ------------------------------------------------------------------ background

    async def run(self, stop: asyncio.Event) -> None:
        """Expire leases and reconcile the pservers until `stop` is set. Sets `stop` when the work is done."""
        try:
            async with asyncio.TaskGroup() as tasks:
                beside = [tasks.create_task(self._expire_leases()), tasks.create_task(self._complete_checkpoints())]
                await self._reconcile_until(stop)
                for task in beside:
                    task.cancel()
        finally:
            self.is_stopping = True
            await self._notify_waiters()
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
            self.cluster.expire(self.now())
            self.changed()
            await self._notify_waiters()  # the reconciliation may be waiting for a pserver
            due = self.now() + period
            await asyncio.sleep(period)

    async def _complete_checkpoints(self) -> None:
        # A separate task, since the place may be slow or hang.
        while True:
            await self._wake_manifests.wait()
            self._wake_manifests.clear()
            if await self._manifests.update():
                await self._notify_waiters()
            await self.schedule.advance()

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
            self.cluster.start_run_if_complete(self.now())
            if not await self._reconciler.reconcile():
                await asyncio.sleep(RETRY_SECONDS)
                self._wake.set()
            elif members != self.cluster.run.installed_members:
                members = self.cluster.run.installed_members
                log.info("members installed", trainers=sorted(members), reason=self.cluster.run.reason)
            await self._notify_waiters()
            logged = self._log_news(logged)
            run = self.cluster.run
            if run.record.is_deserted and not run.is_recorded and self._recording is None:
                self._recording = asyncio.create_task(self._record_run(), name="record the run")
            if self.cluster.may_exit:
                stop.set()

    def _log_losses(self, after: float) -> float:
        """Log trainers that were lost after this time, and return the current time."""
        for rank, trainer in sorted(self.cluster.run.record.trainers.items()):
            if not trainer.is_present and self.cluster.run.reports[rank].gone_at > after:
                log.info(trainer.why, trainer=rank)
        return self.now()

    def _log_news(self, logged: str) -> str:
        """Log the state of the run, or what it waits for, if that differs from `logged`. Returns the text."""
        run = self.cluster.run
        bind_facts(run=run.record.name)
        news = (
            f"waiting for {', '.join(self.cluster.waiting_for)}"
            if self.cluster.waiting_for
            else f"run {run.record.state}"
        )
        if news != logged and run.record.failure is not None:
            trainers = run.record.failure.facts.get("ranks") or run.record.failure.facts.get("missing")
            log.error(
                news, round=run.round, trainer=trainers, code=run.record.failure.code, reason=run.record.failure.detail
            )
        elif news != logged:
            log.info(news, round=run.round)
        return news

    async def _record_run(self) -> None:
        """Record the summary of a finished run, and a checkpoint of its result. Then its pservers may exit."""
        try:
            await self._finish_run(self.cluster.run)
        finally:
            self._recording = None
            self.changed()

    async def _finish_run(self, run: Run) -> None:
        await self._take_summary()
        if self.cluster.is_current(run) and self.cluster.is_saving_result:
            await self._save_result(run)
            await self._take_summary()  # again, in case the result lacks rounds and the run has failed
        if self.cluster.is_current(run):
            self.cluster.run = self.cluster.run.finish_recording()

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
            current = self.cluster.run
            return (
                current.record.name != run
                or current.record.is_over
                or self.cluster.plan_ready(rank, incarnation) is not None
            )

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

    # ------------------------------------------------------------------ summary

    async def _save_result(self, run: Run) -> None:
        """Write the run's last checkpoint. A pserver that dies meanwhile may return within the rejoin time-out."""
        deadline = self.now() + run.settings.rejoin_timeout_seconds
        logged = ""
        while (problem := await self._try_to_save_result(run)) is not None:
            if self.now() > deadline:
                log.error("the run's last round has no checkpoint", error=problem)
                return
            if problem != logged:
                log.warning("the checkpoint of the run's last round is delayed", error=problem)
            logged = problem
            await asyncio.sleep(RESULT_RETRY_SECONDS)

    async def _try_to_save_result(self, run: Run) -> str | None:
        """Try to write the run's last checkpoint. Returns the problem, or None."""
        cluster = self.cluster
        try:
            async with asyncio.timeout(RESULT_SECONDS):
                rounds = [state.round for state in await self.read_states() if state.run == run.record.name]
                if len(rounds) < cluster.registry.num_pservers:
                    return f"{len(rounds)} of {cluster.registry.num_pservers} pservers have the run"
                round_ = max(rounds)
                try:
                    while (newer := await self._write_result(run.record.name, round_)) is not None:
                        round_ = newer
                except NotReady:
                    if round_ == 0:
                        return None  # the run ended without initial values
                    raise
                async with self._condition:  # heartbeats report it
                    await self._condition.wait_for(
                        lambda: not cluster.is_current(run) or round_ in cluster.run.complete_checkpoints
                    )
                if cluster.is_current(run):
                    cluster.run = cluster.run.fail_for_lost_rounds(round_, cluster.run.newest_round, self.now())
        except (TimeoutError, httpx.HTTPError, GradpostError, ValueError) as error:
            return repr(error)
        return None

    async def _write_result(self, run: str, round_: Round) -> Round | None:
        """Request the last checkpoint. Returns a later round if a pserver has applied more than it reported."""
        members = self.cluster.registry.members.values()
        try:
            await asyncio.gather(*(want_checkpoint(self.http, m, run, round_, is_over=True) for m in members))
        except StaleRound as error:
            if (current := error.facts.get("current")) is None or current <= round_:
                raise
            return int(current)
        return None

    async def summary(self) -> RunSummary:
        """Return the summary of the run. Once it is over, its result is on the disk when this returns."""
        run = self.cluster.run
        if run.record.is_deserted:
            await self.wait_until(
                lambda: self.cluster.run.is_recorded or not self.cluster.is_current(run), RESULT_SECONDS
            )
        return await self._take_summary()

    async def _take_summary(self) -> RunSummary:
        run = self.cluster.run
        last = self._last_summary
        if last is not None and (last.run, last.state) == (run.record.name, run.record.state) and run.record.is_over:
            return last
        answers = await self.read_states()
        run = self.cluster.refresh(run)
        states = [state for state in answers if state.run == run.record.name]
        is_ring = run.settings.consistency.is_ring
        rounds = run.newest_round if is_ring else min((state.round for state in states), default=0)
        carried = ["ring"] if is_ring else sorted({f"HTTP/{v}" for state in states for v in state.transports})
        # All trainers print their summary at the end, and after the same round each gets the same seconds.
        if self._summed_up != (run.record.name, run.started_at, rounds):
            self._summed_up, self._summed_up_at = (run.record.name, run.started_at, rounds), self.now()
        end = self._summed_up_at if run.ended_at is None else run.ended_at
        results: dict[str, float] = {}
        for _, report in sorted(run.reports.items(), reverse=True):
            results.update(report.heartbeat.results)  # the lowest rank's results win
        summary = RunSummary(
            run=run.record.name,
            state=run.record.state,
            mode=run.settings.mode,
            transport="+".join(carried) or "none",
            num_trainers=len(run.record.trainers),
            rounds=rounds,
            seconds=0.0 if run.started_at is None else end - run.started_at,
            shards=tuple(copy_fields(ShardSummary, state, pserver=state.index or 0) for state in states),
            results=results,
        )
        if run.record.is_over:
            self._last_summary = summary
        return summary

    async def read_states(self) -> list[PserverState]:
        """Return the states of all living pservers in order of their indices, without those that do not answer."""
        members = [member for _, member in sorted(self.cluster.registry.members.items())]
        answers = await asyncio.gather(*(read_state(self.http, member) for member in members), return_exceptions=True)
        for member, answer in zip(members, answers, strict=True):
            if isinstance(answer, BaseException):
                log.warning("a pserver did not answer", pserver=member.info.index, error=repr(answer))
        return [answer for answer in answers if not isinstance(answer, BaseException)]
