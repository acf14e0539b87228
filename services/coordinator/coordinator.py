"""The coordinator's shell: the clock, and the task that carries the cluster's decisions to the pservers."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import secrets
from collections.abc import Awaitable, Callable
from typing import TypeVar

import httpx

from ps_protocol.errors import GradpostError, NotReady, StaleRound, StorageFailed, TryAgain
from ps_protocol.messages import PlanReady, PserverState, RunSummary, ShardSummary
from ps_protocol.plan import SlicePlan
from ps_protocol.routes import STATE
from ps_protocol.vocabulary import Incarnation, Rank, Round
from services.runtime.checkpoints import Manifest, all_checkpoints, complete_checkpoints, read_manifest
from services.runtime.logs import bind_facts, get_logger
from services.runtime.storage import open_checkpoint_storage

from .activity import ActivityLog, Curves
from .audit import AuditLog
from .checkpointing import CheckpointSchedule
from .cluster import Cluster
from .control import RESULT_SECONDS, TIMEOUT_SECONDS, want_checkpoint
from .events import Events
from .installer import Installer
from .manifests import Manifests
from .model import plan_model
from .pservers import PserverMember
from .record import (
    ClusterRecord,
    RecordFile,
    RunRecord,
    describe_cluster,
    find_controls,
    restore_cluster,
    restore_incarnations,
    resume_run,
)
from .run import Run
from .settings import CoordinatorSettings

log = get_logger()
T = TypeVar("T")

RETRY_SECONDS = 0.2
RESULT_RETRY_SECONDS = 1.0


class Coordinator:
    """One event loop, one cluster. Handlers change `cluster` synchronously and then call `changed`."""

    def __init__(self, settings: CoordinatorSettings, http: httpx.AsyncClient) -> None:
        self.cluster = Cluster(
            settings.wanted_pservers,
            settings.run_defaults,
            lease_seconds=settings.lease_seconds,
            exit_when_done=settings.exit_when_done,
            name_run=lambda: secrets.token_hex(6),
        )
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
        self._installer = Installer(self.cluster, http, self.now, self.persist)
        self._last_summary: RunSummary | None = None
        self._summed_up: tuple[str, float | None, Round] = "", None, 0  # the newest summary: run, its start, round
        self._summed_up_at = 0.0  # the first summary of the same
        self._recording: asyncio.Task[None] | None = None
        self._recorded: Run | None = None  # its summary and its last checkpoint have been taken
        self.place = open_checkpoint_storage(settings.checkpoints or str(settings.state_dir / "checkpoints"))
        self._manifests = Manifests(self.cluster, self.place, settings.keep_checkpoints)
        self.schedule = CheckpointSchedule(self.cluster, http, self.now)
        self._file = RecordFile(settings.state_dir)
        self._persist_lock = asyncio.Lock()
        self._failing_since: float | None = None  # since when the disk has not taken what was decided

    def now(self) -> float:
        """The monotonic clock that leases run on."""
        return asyncio.get_running_loop().time()

    def changed(self) -> None:
        """Something was decided, or heard: let the background carry it out."""
        self._wake.set()
        self._wake_manifests.set()

    # ------------------------------------------------------------------ durable state

    async def restore(self) -> None:
        """Take up what an earlier life of this coordinator has left. Raises StorageFailed if it cannot be used."""
        try:
            if not await asyncio.to_thread(self._file.lock):
                text = f"another coordinator uses {self._settings.state_dir}"
                raise StorageFailed(f"{text}; each needs a state_dir of its own (--state-dir, GRADPOST_STATE_DIR)")
            await asyncio.to_thread(self.audit.read)
        except OSError as error:
            raise StorageFailed(f"{self._settings.state_dir} cannot be used: {error}") from error
        try:
            record = await asyncio.to_thread(self._file.read)
        except OSError as error:
            advice = "without it (delete it) a new run begins, or with resume one from the newest checkpoint"
            raise StorageFailed(f"{error}; {advice}") from error
        try:
            if self._settings.resume:
                await self._resume(record)
                await self.persist()  # should this life end soon, too, the next one goes on from here
            elif record is not None:
                await self._restore_record(record)
        except (OSError, TryAgain) as error:
            raise StorageFailed(str(error)) from error

    async def _restore_record(self, record: ClusterRecord) -> None:
        restore_cluster(self.cluster, record, self.now())
        run, begins = self.cluster.run, record.beginning
        if begins is not None:
            manifest = await asyncio.to_thread(read_manifest, self.place, begins.run, begins.round)
            if manifest is None:
                raise StorageFailed(f"there is no checkpoint of round {begins.round} of run {begins.run} any more")
            self.cluster.beginning = manifest.model_copy(update={"controls": find_controls(record, manifest)})
        if run.plan is not None:
            log.info("the coordinator is back", run=run.name, state=run.state, attempt=run.attempt)

    async def _resume(self, record: ClusterRecord | None) -> None:
        """Go on where a run has stopped, with other processes: with what they find on their disks, or a checkpoint.

        Those who cut the model another way cannot take over their disks, and begin with the newest checkpoint, of that
        run if there is one. What has not got as far as a plan goes on gathering.
        """
        run = None if record is None else record.run
        if record is not None:
            restore_incarnations(self.cluster, record)
        if record is not None and run is not None and run.state == "gathering" and run.plan is None:
            restore_cluster(self.cluster, record, self.now())
        elif record is not None and run is not None and self._has_something_to_go_on_with(run):
            beginning = await self._find_successor(record) if run.state == "failed" else None
            resume_run(self.cluster, record, self.now(), beginning=beginning)
            log.info("resuming", run=run.name, attempt=run.attempt)
            return
        manifest = await asyncio.to_thread(self._find_beginning, record)
        if manifest is None:
            log.warning(
                "there is nothing to resume: neither a run nor a checkpoint; a new run begins", place=self.place.url
            )
            return
        self.cluster.beginning = manifest
        log.info("resuming from a checkpoint", run=manifest.run, round=manifest.round)
        controls = manifest.controls
        if controls.is_paused or controls.rates or controls.frozen:
            log.warning(
                "what an administrator has set stands on",
                is_paused=controls.is_paused, rates=controls.rates, frozen=controls.frozen,
            )  # fmt: skip

    async def _find_successor(self, record: ClusterRecord) -> Manifest | None:
        """What the next run begins with if this one, which failed, turns out to be served still."""
        with contextlib.suppress(StorageFailed):
            return await asyncio.to_thread(self._find_beginning, record)
        return None

    def _has_something_to_go_on_with(self, run: RunRecord) -> bool:
        """Whether it is on its pservers' disks, or about to get there."""
        return (run.has_begun or run.state == "gathering") and self._is_cut_alike(run)

    def _find_beginning(self, record: ClusterRecord | None) -> Manifest | None:
        """The newest checkpoint of the recorded run, or of the one that it began with, or was to begin with.

        Other runs' count only if that has not trained: they may be another experiment's in the same place. Raises
        StorageFailed if it has trained, and has no checkpoint.
        """
        run = None if record is None else record.run
        names = [] if run is None else [run.name, run.source]
        if record is not None and record.beginning is not None:
            names.append(record.beginning.run)
        for name in names:
            for manifest in () if name is None else complete_checkpoints(self.place, name):
                if record is not None and not (run is not None and run.has_undone(manifest)):
                    return manifest.model_copy(update={"controls": find_controls(record, manifest)})
        if run is not None and run.has_trained:
            text = f"run {run.name} has no checkpoint in {self.place.url} with which others could begin"
            raise StorageFailed(f"{text}: resume it with the pservers and settings that it had")
        return next(iter(all_checkpoints(self.place)), None)

    def _is_cut_alike(self, run: RunRecord) -> bool:
        """Whether the settings make the plan of a recorded run again."""
        if run.plan is None or run.declaration is None:
            return False
        plan = plan_model(run.declaration, self._settings.run_defaults, self._settings.wanted_pservers)
        return plan.digest == SlicePlan.from_json(run.plan).digest

    async def persist(self) -> None:
        """Write down what the cluster is now, so that it outlives this process.

        Raises TryAgain while the disk does not take it, and StorageFailed once that has lasted for the round time-out.
        """
        async with self._persist_lock:
            record = describe_cluster(self.cluster)  # taken while nobody else writes: a newer one is never overwritten
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
        """Expire leases and reconcile the pservers until `stop` is set, which this also does when the work is done."""
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
        # Apart from the reconciliation, which waits for pservers that may be the very ones to be lost.
        period = min(0.5, self.cluster.lease_seconds / 4)
        due = self.now()
        while True:
            if (paused := self.now() - due) > self.cluster.lease_seconds / 2:
                # This process was stopped (SIGSTOP, a paused machine): the silence was ours, not theirs.
                log.warning("the coordinator was paused; all leases are renewed", seconds=round(paused, 1))
                self.cluster.renew_leases(self.now())
            self.cluster.expire(self.now())
            self.changed()
            await self._notify_waiters()  # while pservers that are slow to install keep the reconciliation
            due = self.now() + period
            await asyncio.sleep(period)

    async def _complete_checkpoints(self) -> None:
        # Apart from the reconciliation, too: the place may take its time, or hang.
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
        said, looked_at = "", self.now()
        members: dict[Rank, Incarnation] = {}
        while not stop.is_set():
            await self._wake.wait()
            self._wake.clear()
            looked_at = self._log_losses(looked_at)
            self.cluster.start_run_if_complete(self.now())
            if not await self._carry_out():
                await asyncio.sleep(RETRY_SECONDS)
                self._wake.set()
            elif members != self.cluster.installed_members:
                members = self.cluster.installed_members
                log.info("members installed", trainers=sorted(members))
            await self._notify_waiters()
            said = self._log_news(said)
            run = self.cluster.run
            if run.is_deserted and self._recorded is not run and self._recording is None:
                self._recording = asyncio.create_task(self._record_run(), name="record the run")
            if self.cluster.may_exit:
                stop.set()

    def _log_losses(self, after: float) -> float:
        """Log which trainers were lost after this time; returns when it looked."""
        for rank, trainer in sorted(self.cluster.run.trainers.items()):
            if not trainer.is_here and trainer.gone_at > after:
                log.info(trainer.why, trainer=rank)
        return self.now()

    async def _carry_out(self) -> bool:
        """Bring everybody to what was decided, once that is durable; False if it has to be tried again.

        A disk that stays full ends the run, and that its pservers are told all the same.
        """
        run = self.cluster.run
        try:
            await self.persist()
        except StorageFailed as error:
            run.fail(error, self.now())
        except TryAgain:
            if not run.is_over:
                return False
        try:
            return await self._installer.reconcile()
        except (TryAgain, StorageFailed):
            return False

    def _log_news(self, said: str) -> str:
        """Log one line when what the run waits for, or its state, is another than what was said last."""
        run = self.cluster.run
        bind_facts(run=run.name)
        news = f"waiting for {', '.join(self.cluster.waiting_for)}" if self.cluster.waiting_for else f"run {run.state}"
        if news != said and run.failure is not None:
            trainers = run.failure.facts.get("ranks") or run.failure.facts.get("missing")
            log.error(news, round=run.round, trainer=trainers, code=run.failure.code, reason=run.failure.detail)
        elif news != said:
            log.info(news, round=run.round)
        return news

    async def _record_run(self) -> None:
        """Take the summary of a run that is over, and a checkpoint of what it has trained; then pservers may exit."""
        try:
            await self._finish_run(self.cluster.run)
        finally:
            self._recording = None
            self.changed()

    async def _finish_run(self, run: Run) -> None:
        await self._take_summary()
        if run.state == "finished" and run.plan is not None and run.defaults.checkpoint_interval(run.plan):
            await self._save_result(run)
            await self._take_summary()  # once more if the result lacks rounds, so that the run has failed
        if self.cluster.run is run:  # else the next one has begun meanwhile
            self._recorded = run
            self.cluster.finish_recording()

    # ------------------------------------------------------------------ waiting

    async def wait_until(self, is_so: Callable[[], bool], seconds: float) -> None:
        """Wait until something is so, looking whenever something has changed, up to some seconds."""
        async with self._condition:
            with contextlib.suppress(TimeoutError):
                # Not `asyncio.wait_for`: before 3.12 it waits in another task, which who is cancelled twice, as for the
                # client of a stream that has left, leaves behind with the lock.
                async with asyncio.timeout(seconds):
                    await self._condition.wait_for(is_so)

    async def wait_for_plan(self, rank: Rank, run: str, incarnation: Incarnation, wait_seconds: float) -> PlanReady:
        """Wait until the pservers count on a trainer; NotReady says what that waits for, Ended who is to blame."""

        def ready() -> bool:
            current = self.cluster.run
            return current.name != run or current.is_over or self.cluster.plan_ready(rank, incarnation) is not None

        await self.wait_until(ready, wait_seconds)
        current = self.cluster.run
        current.member(rank, run, incarnation)
        if current.failure is not None:
            raise copy.copy(current.failure)  # every waiter its own: a raised exception collects frames
        plan = self.cluster.plan_ready(rank, incarnation)
        if plan is None:
            waits = self.cluster.waiting_for or ["the pservers to take this trainer in"]
            raise NotReady(f"the cluster waits for {', '.join(waits)}", waiting_for=waits)
        return plan

    # ------------------------------------------------------------------ summary

    async def _save_result(self, run: Run) -> None:
        """Have the run's last checkpoint written; who dies meanwhile has the rejoin time-out to come back."""
        deadline = self.now() + run.defaults.rejoin_timeout_seconds
        said = ""
        while (problem := await self._try_to_save_result(run.name)) is not None:
            if self.now() > deadline:
                log.error("there is no checkpoint of the run's last round", error=problem)
                return
            if problem != said:
                log.warning("the checkpoint of the run's last round has to wait", error=problem)
            said = problem
            await asyncio.sleep(RESULT_RETRY_SECONDS)

    async def _try_to_save_result(self, run: str) -> str | None:
        """What was in the way, if something was."""
        try:
            async with asyncio.timeout(RESULT_SECONDS):
                rounds = [state.round for state in await self.ask_pservers(self._state_of) if state.run == run]
                if len(rounds) < self.cluster.registry.num_pservers:
                    return f"{len(rounds)} of {self.cluster.registry.num_pservers} pservers have the run"
                round_ = max(rounds)
                try:
                    while (newer := await self._write_result(run, round_)) is not None:
                        round_ = newer
                except NotReady:
                    if round_ == 0:
                        return None  # it ended before there were initial values: there is nothing to keep
                    raise
                async with self._condition:  # they tell of it in their heartbeats
                    await self._condition.wait_for(lambda: round_ in self.cluster.complete_checkpoints)
                finished = self.cluster.run
                if finished.name == run and (gone := finished.find_departed_after(round_)):
                    finished.fail_for_lost_rounds(gone, round_, finished.newest_round, self.now())
        except (TimeoutError, httpx.HTTPError, GradpostError, ValueError) as error:
            return repr(error)
        return None

    async def _write_result(self, run: str, round_: Round) -> Round | None:
        """Have the last checkpoint written; a later round if a pserver has got further than it had said."""
        members = self.cluster.registry.members.values()
        try:
            await asyncio.gather(*(want_checkpoint(self.http, m, run, round_, is_over=True) for m in members))
        except StaleRound as error:
            if (current := error.facts.get("current")) is None or current <= round_:
                raise
            return int(current)
        return None

    async def summary(self) -> RunSummary:
        """The current run in a few numbers. Once it is over, what stays of it is on the disk when this is answered."""
        run = self.cluster.run
        if run.is_deserted:
            await self.wait_until(lambda: self._recorded is run or self.cluster.run is not run, RESULT_SECONDS)
        return await self._take_summary()

    async def _take_summary(self) -> RunSummary:
        run = self.cluster.run
        last = self._last_summary
        if last is not None and (last.run, last.state) == (run.name, run.state) and run.is_over:
            return last
        answers = await self.ask_pservers(self._state_of)
        states = [state for state in answers if state.run == run.name]
        is_ring = run.defaults.consistency.is_ring
        rounds = run.newest_round if is_ring else min((state.round for state in states), default=0)
        carried = ["ring"] if is_ring else sorted({f"HTTP/{v}" for state in states for v in state.transports})
        # All trainers print their summary at the end: after the same round each gets the same seconds.
        if self._summed_up != (run.name, run.started_at, rounds):
            self._summed_up, self._summed_up_at = (run.name, run.started_at, rounds), self.now()
        end = self._summed_up_at if run.ended_at is None else run.ended_at
        results: dict[str, float] = {}
        for _, trainer in sorted(run.trainers.items(), reverse=True):
            results.update(trainer.results)  # the lowest rank's word counts
        summary = RunSummary(
            run=run.name,
            state=run.state,
            mode=run.mode,
            transport="+".join(carried) or "none",
            num_trainers=len(run.trainers),
            rounds=rounds,
            seconds=0.0 if run.started_at is None else end - run.started_at,
            shards=tuple(
                ShardSummary(
                    pserver=state.index or 0,
                    shard_bytes=state.shard_bytes,
                    pushed_bytes=state.pushed_bytes,
                    pulled_bytes=state.pulled_bytes,
                )
                for state in states
            ),
            results=results,
        )
        if run.is_over:
            self._last_summary = summary
        return summary

    async def _state_of(self, member: PserverMember) -> PserverState:
        response = await self.http.get(member.info.address + STATE, timeout=TIMEOUT_SECONDS)
        response.raise_for_status()
        return PserverState.model_validate_json(response.content)

    async def ask_pservers(self, ask: Callable[[PserverMember], Awaitable[T]]) -> list[T]:
        """Ask all living pservers at once, in the order of their indices; those that do not answer are left out."""
        members = [member for _, member in sorted(self.cluster.registry.members.items())]
        answers = await asyncio.gather(*(ask(m) for m in members), return_exceptions=True)
        for member, answer in zip(members, answers, strict=True):
            if isinstance(answer, BaseException):
                log.warning("a pserver did not answer", pserver=member.info.index, error=repr(answer))
        return [answer for answer in answers if not isinstance(answer, BaseException)]
