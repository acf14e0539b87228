"""The coordinator's event loop: its parts, the state that it starts with, and the tasks that carry out decisions.

It starts with the recorded run, with that run resumed with new processes, or with a checkpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import secrets
from collections.abc import Mapping

import httpx

from ps_protocol.errors import NotFound, NotReady, StorageFailed, TryAgain
from ps_protocol.messages import PlanReady
from ps_protocol.vocabulary import Incarnation, Rank
from services.runtime.checkpoints import Manifest, all_checkpoints, complete_checkpoints
from services.runtime.logs import bind_facts, get_logger
from services.runtime.storage import CheckpointStorage, open_checkpoint_storage

from .checkpoints import Checkpoints, RunResult
from .events import Events
from .failover import FailOver
from .history import Curves, HistoryWriter, RunHistory
from .reconcile import Reconciler
from .settings import CoordinatorSettings
from .shell import Shell
from .state.cluster import Cluster
from .state.joining import plan_model
from .state.record import ClusterRecord, RunRecord

log = get_logger()

PERIOD_SECONDS = 0.5  # between two looks at the clock, or a quarter of a lease
RETRY_SECONDS = 0.2


class Coordinator(Shell):
    """The shell with all of its parts."""

    def __init__(self, settings: CoordinatorSettings, http: httpx.AsyncClient) -> None:
        super().__init__(Cluster(settings, name_run=lambda: secrets.token_hex(6)), http, settings)
        self.events = Events()
        self.curves = Curves()
        self.failover = FailOver(self)
        self.reconciler = Reconciler(self, on_silence=self.failover.suspect)
        place = open_checkpoint_storage(settings.checkpoints or str(settings.state_dir / "checkpoints"))
        self.checkpoints = Checkpoints(self, place, settings.keep_checkpoints)
        self.result = RunResult(self, self.checkpoints)
        self.history = RunHistory(settings.history_folder)
        self.history_writer = HistoryWriter(self.history, self, self.curves, self.result)
        self.listeners += [lambda: self.events.detect_changes(self.cluster), self.history_writer.note]

    async def restore(self) -> None:
        """Restore the state of an earlier process of this coordinator. Raises StorageFailed if it cannot be used."""
        try:
            if not await asyncio.to_thread(self.file.lock):
                text = f"another coordinator uses {self.settings.state_dir}"
                raise StorageFailed(f"{text}; set another --state-dir or GRADPOST_STATE_DIR for this one")
        except OSError as error:
            raise StorageFailed(f"the coordinator cannot use {self.settings.state_dir}: {error}") from error
        try:
            record = await asyncio.to_thread(self.file.read)
        except OSError as error:
            advice = "delete this file to begin a new run, or to resume from the newest checkpoint"
            raise StorageFailed(f"{error}; {advice}") from error
        try:
            if self.settings.resume:
                await self._resume(record)
                await self.persist()  # so that another restart resumes the same run
            elif record is not None:
                self.cluster.restore(record, self.now())
        except (OSError, TryAgain) as error:
            raise StorageFailed(str(error)) from error
        if (run := self.cluster.run.record).plan is not None:
            log.info("restored the run", run=run.name, state=run.state, attempt=run.attempt)
        with contextlib.suppress(NotFound):
            self.history_writer.restore(await asyncio.to_thread(self.history.read, run.name))

    async def _resume(self, record: ClusterRecord | None) -> None:
        """Resume the recorded run with new processes: from the pservers' disks, or from a checkpoint.

        With another slice plan the disks are of no use, and the newest checkpoint is used. A run without a plan
        continues gathering.
        """
        cluster, run, place = self.cluster, None if record is None else record.run, self.checkpoints.place
        if record is not None:
            cluster.restore_incarnations(record)
            if run is not None and run.state == "gathering" and run.plan is None:
                cluster.restore(record, self.now())
            elif run is not None and _is_on_disks(run, self.settings):
                cluster.restore(record, self.now(), resume=True)
                log.info("resuming", run=run.name, attempt=run.attempt)
                return
        manifest = cluster.beginning = cluster.beginning or await asyncio.to_thread(_find_beginning, run, place)
        if manifest is None:
            log.warning("no run and no checkpoint to resume; a new run begins", place=place.url)
            return
        log.info("resuming from a checkpoint", run=manifest.run, round=manifest.round)
        controls = manifest.controls
        if controls.is_paused or controls.rates or controls.frozen:
            log.warning(
                "the controls of an administrator stay in effect",
                is_paused=controls.is_paused, rates=controls.rates, frozen=controls.frozen,
            )  # fmt: skip

    # ------------------------------------------------------------------ background

    async def run(self, stop: asyncio.Event) -> None:
        """Look at the clock and reconcile the pservers until `stop` is set. Sets `stop` when the work is done."""
        try:
            async with asyncio.TaskGroup() as tasks:
                # Apart from the reconciliation, which may wait for a lost pserver, or for storage that hangs.
                others = self._look_at_clock(), self.checkpoints.work(), self.history_writer.write_notes()
                beside = [tasks.create_task(other) for other in others]
                await self._reconcile_until(stop)
                for task in beside:
                    task.cancel()
        finally:
            self.failover.close()
            self.notify()
            self.history_writer.note(is_stopping=True)
            await self.history_writer.flush()
            self.file.unlock()

    async def _look_at_clock(self) -> None:
        period, due = min(PERIOD_SECONDS, self.settings.lease_seconds / 4), self.now()
        while True:
            if (paused := self.now() - due) > self.settings.lease_seconds / 2:
                # This process was stopped (SIGSTOP, a paused machine), so the silence was its own.
                log.warning("the coordinator was paused; all leases are renewed", seconds=round(paused, 1))
                self.cluster.renew_leases(self.now())
            self.cluster.tick(self.now())
            self.failover.suspect_lost()
            self.changed()
            due = self.now() + period
            await asyncio.sleep(period)

    async def _reconcile_until(self, stop: asyncio.Event) -> None:
        logged, seen = "", -1
        members: Mapping[Rank, Incarnation] = {}
        while not stop.is_set():
            seen = await self.wait_for_change(seen)
            if self.failover.is_replacing or self.cluster.resume_at is not None:
                continue  # the end of either wakes this task
            self.failover.has_ended = False
            if not await self.reconciler.reconcile():
                await self.wait_until(lambda: self.failover.has_ended, RETRY_SECONDS)
                seen = -1
            elif members != self.cluster.run.installed_members:
                members = self.cluster.run.installed_members
                log.info("members installed", trainers=sorted(members), reason=self.cluster.run.reason)
            self.notify()
            logged = self._log_news(logged)
            self.result.save_if_due()
            if self.cluster.may_exit(self.now()):
                stop.set()

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

    # ------------------------------------------------------------------ waiting

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


# ---------------------------------------------------------------- the state that a coordinator starts with


def _is_on_disks(run: RunRecord, settings: CoordinatorSettings) -> bool:
    """Return whether the pservers' disks hold the run, or will, with the slice plan that the settings lead to."""
    if not (run.has_begun or run.state == "gathering") or run.plan is None or run.declaration is None:
        return False
    plan = plan_model(run.declaration, settings, settings.wanted_pservers)
    return plan.digest == run.plan.digest


def _find_beginning(run: RunRecord | None, place: CheckpointStorage) -> Manifest | None:
    """Return the newest checkpoint of the recorded run, or of the run that it began with, with the newest controls.

    Checkpoints of other runs count only if the recorded run has not trained: the place may be shared with other
    experiments. Raises StorageFailed if the run has trained and has no checkpoint.
    """
    if run is not None:
        for name in filter(None, (run.name, run.source)):
            for manifest in complete_checkpoints(place, name):
                if not run.has_undone(manifest):
                    recorded = run.membership.controls
                    return manifest.model_copy(update={"controls": recorded[-1]}) if recorded else manifest
        if run.has_trained:
            text = f"run {run.name} has no checkpoint in {place.url} that a run with other settings could begin with"
            raise StorageFailed(f"{text}; resume the run with its former settings and number of pservers")
    return next(iter(all_checkpoints(place)), None)
