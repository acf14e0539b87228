"""The cluster: its pservers, and one run after another. Pure: the caller passes the time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from ps_protocol.errors import Conflict, Ended, ModelMismatch, NotReady, RoundTimeout, error_from_problem
from ps_protocol.membership import PserverRegistered, RegisterPserver, RequiredStandbys
from ps_protocol.messages import (
    DeclareModel,
    JoinTrainer,
    Leave,
    PlanReady,
    PserverHeartbeat,
    PserverHeartbeatReply,
    PserverInfo,
    TrainerHeartbeat,
    TrainerHeartbeatReply,
    TrainerJoined,
)
from ps_protocol.standbys import ReportStandby, StandbyAnswer
from ps_protocol.vocabulary import Incarnation, PserverIndex, Rank, Round
from services.runtime.checkpoints import Manifest
from services.runtime.logs import get_logger

from ..settings import CoordinatorSettings
from .joining import check_expectations, check_protocol, declare_model, fail_deserted_run, join_run, start_run
from .losses import (
    check_ring,
    expire_pservers,
    expire_trainers,
    leave_run,
    note_heartbeat,
    return_stuck_trainers,
    time_out,
)
from .pservers import PserverRegistry
from .record import ClusterRecord
from .replicas import Replicas
from .run import LostRounds, Run
from .status import describe_leader, describe_notice, list_rounds, list_waits

log = get_logger()


class Cluster:
    """The one owner of the state, whose values it replaces: `run`, `registry` and the beginning of the next run.

    A caller may assign what a transition of the current value returns, without waiting in between. After a wait it must
    read the value again, and check with `is_current` that it is still the same run, or use `update`.
    """

    def __init__(self, settings: CoordinatorSettings, name_run: Callable[[], str]) -> None:
        self.lease_seconds = settings.lease_seconds
        self.exit_when_done = settings.exit_when_done
        self._settings = settings
        self._name_run = name_run
        self.registry = PserverRegistry(
            settings.wanted_pservers, settings.lease_seconds, num_standbys=settings.standbys
        )
        self.run = Run.begin(name_run(), settings, {})
        self.beginning: Manifest | None = None  # the checkpoint that the next run begins with
        self.persisted: Mapping[PserverIndex, Replicas] = {}  # the replicas on the disk, or earlier ones
        self.resume_at: float | None = None  # when the restored run is resumed, unless a process of it reports before

    def is_current(self, run: Run) -> bool:
        """Return whether no other run has begun since the caller read `run`, whose state may have changed."""
        return self.run.record.name == run.record.name

    def refresh(self, run: Run) -> Run:
        """Return the newest value of a run. A run that another one followed does not change any more."""
        return self.run if self.is_current(run) else run

    def update(self, run: Run, transition: Callable[[Run], Run]) -> None:
        """Apply a transition to the newest value of a run, unless another run has begun."""
        if self.is_current(run):
            self.run = transition(self.run)

    # ------------------------------------------------------------------ durable state

    def describe(self, transition: Callable[[Run], Run] = lambda run: run) -> ClusterRecord:
        """Return the record to persist, as it is after a transition of the run."""
        run = transition(self.run)
        return ClusterRecord(
            trainer_incarnations=dict(run.incarnations),
            pserver_incarnations=dict(self.registry.incarnations),
            run_incarnations=dict(run.holders),
            pservers=tuple(member.record for member in self.registry.known.values()),
            replicas=dict(self.registry.replicas),
            beginning=self.beginning,
            run=run.record if run.record.trainers else None,
        )

    def restore_incarnations(self, record: ClusterRecord) -> None:
        """Restore the counters, so that every later process gets a higher incarnation, and the next run's beginning."""
        self.beginning = record.beginning
        self.run = replace(self.run, incarnations=record.trainer_incarnations)
        self.registry = replace(self.registry, incarnations=record.pserver_incarnations)

    def restore(self, record: ClusterRecord, now: float, *, resume: bool = False) -> None:
        """Restore the cluster from its record. All leases begin now, and the last change is made again.

        With `resume` the run is resumed, even if it finished or failed, after a lease without a report of its
        processes. If one reports, only the coordinator was restarted. A failed run waits until its pservers have ended.
        """
        self.resume_at = now + self.lease_seconds if resume else None
        self.restore_incarnations(record)
        for pserver in record.pservers:
            self.registry = self.registry.restore(pserver, now, record.replicas[pserver.info.index])
        self.run = self.run.note_holders(record.run_incarnations)
        if record.run is not None:
            self.run = self.run.restore(record.run, now)

    @property
    def shown_run(self) -> Run:
        """The run for readers: one that is about to be resumed waits for all of its trainers."""
        return self.run if self.resume_at is None else self.run.await_all(self.resume_at)

    def _resume_if_due(self, now: float) -> None:
        """Resume the restored run once no process from before the restart can report any more."""
        may_report = self.run.record.members or any(member.is_restored for member in self.registry.members.values())
        if self.resume_at is None or (may_report and now < self.resume_at):
            return
        self.resume_at = None
        self.registry = self.registry.clear_replicas()  # their processes have ended, too
        self.run = self.run.await_all(now)

    def _cancel_resumption(self, now: float, *, is_trainer: bool = True) -> None:
        """Continue the restored run as it is, because a process from before the restart has reported.

        A report from a trainer of a run that was over does not count, because its script may not know of the end.
        """
        record = self.run.record
        if self.resume_at is None or (is_trainer and record.is_over):
            return
        if record.state == "failed":
            self.resume_at = now + self.lease_seconds
            return
        self.resume_at = None
        log.warning("not resumed: processes of the run before are still alive", run=record.name, state=record.state)

    # ------------------------------------------------------------------ pservers

    def register_pserver(self, request: RegisterPserver, now: float, *, is_standby: bool = False) -> PserverRegistered:
        """Register a pserver, or a standby that replaces it. During a run it must bring its shard, or the run fails."""
        check_protocol(request.protocol)
        if self._settings.consistency.is_ring:
            raise Conflict(
                "strategy ring has no pservers", code="mode_mismatch", expected="no pserver", actual=request.address
            )
        run, record, held = self.run, self.run.record, request.held
        is_current = held is not None and (held.run, held.attempt) == record.attempt_id
        self.registry, answer = self.registry.register(
            request, now, held.rounds.applied if held and is_current else None, is_standby=is_standby
        )
        is_known = answer.incarnation == run.holders.get(answer.index)
        if record.plan is None or is_known or not self.serves_run:
            return answer
        run = run.with_change()  # all pservers must freeze and report their rounds
        is_ours = held is not None and (held.run, held.plan) == (record.name, record.plan.digest)
        if not is_ours and not run.checkpoint_interval:
            text = f"pserver {answer.index} was restarted and lost its shard"
            run = run.fail(Ended(text, code="pserver_lost", pserver=answer.index), now)
        self.run = run
        return answer

    def pserver_heartbeat(self, index: PserverIndex, message: PserverHeartbeat, now: float) -> PserverHeartbeatReply:
        """Renew a pserver's lease, and mark trainers as lost that its barrier has missed beyond the round time-out."""
        self.registry = self.registry.heartbeat(index, message, now)
        self._note_missing_pservers(now)
        if self.registry.members[index].is_restored:
            self._cancel_resumption(now, is_trainer=False)
        run = self.run
        if message.run == run.record.name:
            if message.failure is not None:
                run = run.fail(error_from_problem(message.failure), now)
            missing = {rank for member in self.registry.members.values() for rank in member.heartbeat.missing}
            run = return_stuck_trainers(run.note_applied(message.attempt, message.round), missing)
            run = time_out(run, message.round + 1, message.missing, message.waiting_seconds, now)
            self.run = run
        return PserverHeartbeatReply(
            complete=run.record.checkpoints,
            notice=describe_notice(self.run, self.registry, now),
            stop=self.has_ended,
            exit_code=self.exit_code,
        )

    def report_standby(self, report: ReportStandby, now: float) -> StandbyAnswer:
        """Register a standby or renew its lease, and return the pserver to follow, if it serves the current run.

        Raises Conflict for an index without a pserver, and the errors of `PserverRegistry.report_standby`.
        """
        check_protocol(report.protocol)
        self.require_pservers()
        registry = self.registry
        if report.follows >= registry.num_pservers:
            raise Conflict(
                f"there is no pserver {report.follows} to follow",
                code="world_mismatch", expected=f"0 to {registry.num_pservers - 1}", actual=report.follows,
            )  # fmt: skip
        self.registry = self.registry.report_standby(report, now)
        leader = describe_leader(self.run, registry, report)
        return StandbyAnswer(lease_seconds=self.lease_seconds, stop=self.has_ended, exit_code=self.exit_code, **leader)

    def find_required(self, index: PserverIndex, incarnation: Incarnation) -> RequiredStandbys | None:
        """Return the standbys that a pserver must wait for, as the disk has them; None if it has another incarnation.

        A set that is not persisted could lack a standby that a restarted coordinator may promote.
        """
        replicas = self.persisted.get(index)
        return None if replicas is None or replicas.incarnation != incarnation else replicas.required

    def _note_missing_pservers(self, now: float) -> None:
        """Note the time if a pserver does not serve the run, so that trainers cannot reach a barrier."""
        if not self.registry.is_serving(self.run.record.attempt_id):
            self.run = replace(self.run, unserved_at=now)

    # ------------------------------------------------------------------ trainers

    def join_trainer(self, request: JoinTrainer, now: float) -> TrainerJoined:
        """Admit a trainer to the run that gathers. A new run begins when all trainers of the last one have left."""
        check_protocol(request.protocol)
        check_expectations(self.run, request)  # no later run could admit the trainer either
        if request.instance in {trainer.instance for trainer in self.run.record.trainers.values()}:
            self._cancel_resumption(now)
        self._resume_if_due(now)
        record = self.run.record
        if self.resume_at is not None:
            text = f"run {record.name} is resumed a lease after the newest report of a process from before the restart"
            if record.state == "failed":
                text = f"{text}; restart its pservers if they still run"
            raise NotReady(text, waiting_for="processes of the resumed run, for one lease")
        if record.is_over and record.find_process(request.instance) is None:
            if self.exit_when_done:
                text = f"run {record.name} is over, and --exit-when-done ends the cluster; start a new cluster"
                raise Ended(text, code="run_over")
            if not record.is_deserted:
                raise NotReady(
                    f"run {record.name} is over, but not all of its trainers have left",
                    waiting_for=", ".join(f"trainer {rank} to leave" for rank in sorted(record.members)),
                )
            if self.is_saving_result:
                text = f"run {record.name} is over, and its last checkpoint is being written"
                raise NotReady(text, waiting_for="its checkpoint")
            self.run = Run.begin(self._name_run(), self._settings, self.run.incarnations)
        self.run = join_run(self.run, request, now)
        record = self.run.record
        trainer = record.find_process(request.instance)
        assert trainer is not None
        return TrainerJoined(
            run=record.name,
            rank=trainer.rank,
            world_size=self._settings.num_trainers,
            incarnation=trainer.incarnation,
            consistency=self._settings.consistency,
            lease_seconds=self.lease_seconds,
            round_timeout_seconds=self._settings.round_timeout_seconds,
        )

    def declare_model(self, rank: Rank, message: DeclareModel, now: float) -> None:
        """Store a trainer's declaration, which must equal that of the others.

        Fails the run if it is of another model and only waits for processes of the earlier model, which are gone.
        """
        try:
            self.run = declare_model(self.run, rank, message)
        except ModelMismatch as error:
            self.run = fail_deserted_run(self.run, error, now)
            raise self.run.record.failure or error from None

    def trainer_heartbeat(self, rank: Rank, message: TrainerHeartbeat, now: float) -> TrainerHeartbeatReply:
        """Renew a trainer's lease, and act on its report of lost rounds."""
        run = note_heartbeat(self.run, rank, message, now)
        self._cancel_resumption(now)
        if run.record.state == "training":
            run = self._note_lost_rounds(run, rank, message)
            if self._settings.consistency.is_ring:
                run = check_ring(run, message, now)
        self.run = run
        return self.answer_trainer(now)

    def answer_trainer(self, now: float) -> TrainerHeartbeatReply:
        """Return the answer to the heartbeat of a trainer of the current run."""
        record = self.run.record
        return TrainerHeartbeatReply(
            state=record.state,
            failure=record.failure.to_problem() if record.failure else None,
            attempt=record.attempt,
            resume=record.base_round or 0,
            uploader=record.uploader if record.base_round is None else None,
            pservers=self.pserver_infos,
            notice=describe_notice(self.run, self.registry, now),
        )

    def _note_lost_rounds(self, run: Run, rank: Rank, message: TrainerHeartbeat) -> Run:
        """Note pservers that have lost a round which this trainer has received, and ask all pservers for their rounds.

        A report counts only for a pserver that restored an earlier round from its disk in this attempt and has applied
        nothing since, so that a wrong report cannot roll back a healthy run. Asynchronous runs are never rolled back.
        """
        if self._settings.consistency.is_async or message.attempt != run.record.attempt:
            return run
        for index, incarnation in message.ahead_of.items():
            member = self.registry.find(index, incarnation)
            if member is None or member.is_lost or member.record.restored is None:
                continue
            report = LostRounds(incarnation, member.record.restored, rank, message.round)
            if member.round <= report.restored < report.received:
                run = run.note_lost_rounds(index, report)
        return run

    def leave_trainer(self, rank: Rank, message: Leave, now: float) -> None:
        """Remove a trainer. If it failed because it waited too long for other trainers, mark them as stuck first."""
        run = self.run
        run.member(rank, message.run, message.incarnation)
        self._cancel_resumption(now)
        if message.outcome == "failed" and run.record.plan is not None:
            for pserver in self.registry.members.values():
                last = pserver.heartbeat
                if last.run != message.run or not last.waiting_seconds or rank in last.missing:
                    continue
                # The trainer may have the pserver's time-out, while the newest heartbeat is from before it.
                is_timed_out = message.code == RoundTimeout.code
                waited = math.inf if is_timed_out else last.waiting_seconds + now - pserver.seen_at
                run = time_out(run, last.round + 1, last.missing, waited, now)
        self.run = leave_run(run, rank, message, now)

    # ------------------------------------------------------------------ the start of a run

    @property
    def waiting_for(self) -> list[str]:
        """The members that the run waits for, in words; empty while the run trains and once it is over."""
        return list_waits(self.shown_run, self.registry)

    def require_pservers(self) -> None:
        """Raise Conflict (`no_pservers`) with strategy `ring`."""
        if self._settings.consistency.is_ring:
            text = "strategy ring has no pservers: the training script holds the values and writes the checkpoints"
            raise Conflict(text, code="no_pservers", expected="strategy ps", actual="strategy ring")

    def require_training(self) -> None:
        """Raise NotReady unless the run trains, and the errors of `require_pservers`."""
        self.require_pservers()
        if self.run.record.state != "training":
            waits = self.waiting_for
            detail = f"no run is training; the cluster waits for {', '.join(waits)}" if waits else "no run is training"
            raise NotReady(detail, waiting_for=waits or "a run")

    @property
    def rounds(self) -> list[Round]:
        """The round of each pserver; with strategy ring the newest round of the trainers."""
        return list_rounds(self.run, self.registry)

    def start_run_if_complete(self, now: float) -> None:
        """Make the plan once all members are present. It must then be installed."""
        record = self.run.record
        if record.state != "gathering" or record.plan is not None:
            return
        if not (self.registry.is_complete and record.num_declared == self._settings.num_trainers):
            return
        holders = {index: member.info.incarnation for index, member in self.registry.members.items()}
        self.run = start_run(self.run, holders, self.beginning, now)
        if not self.run.record.is_over:
            self.beginning = None
            self.registry = self.registry.clear_replicas()

    def plan_ready(self, rank: Rank, incarnation: Incarnation) -> PlanReady | None:
        """Return the plan for a trainer once all pservers have installed its incarnation, else None."""
        run, record, pservers = self.run, self.run.record, self.pserver_infos
        has_installed = run.installed_members.get(rank) == incarnation and record.state != "gathering"
        if not has_installed or record.plan is None or len(pservers) < record.plan.num_pservers:
            return None  # the last: one of them was replaced since
        return PlanReady(
            run=record.name,
            attempt=record.attempt,
            plan=record.plan,
            digest=record.plan.digest,
            pservers=pservers,
            uploader=record.uploader,
            start=record.membership.starts.get(rank, (record.base_round or 0) + 1),
            nonfinite=run.nonfinite,
            rendezvous=record.declaration.rendezvous if record.declaration else None,
            max_grad_norm=record.declaration.max_grad_norm if record.declaration else None,
        )

    @property
    def pserver_infos(self) -> tuple[PserverInfo, ...]:
        """The pservers that hold the run, as trainers need them."""
        infos = (member.info for member in self.registry.known.values())
        return tuple(info for info in infos if info.incarnation == self.run.holders.get(info.index))

    # ------------------------------------------------------------------ time and end

    def renew_leases(self, now: float) -> None:
        """Renew all leases, after a time in which no heartbeat could be received."""
        self.registry = self.registry.renew_leases(now)
        self.resume_at = None if self.resume_at is None else now + self.lease_seconds
        for rank in self.run.reports:
            self.run = self.run.with_report(rank, seen_at=now)

    def tick(self, now: float) -> None:
        """Act on the time: resume a restored run, or act on expired leases and time-outs."""
        self._resume_if_due(now)
        if self.resume_at is not None:
            return
        self.registry = self.registry.expire(now)
        self._note_missing_pservers(now)
        run = expire_pservers(self.run, self.registry.known.values(), now)
        self.run = expire_trainers(run, now, self.lease_seconds)

    @property
    def serves_run(self) -> bool:
        """True if pservers must follow the run."""
        return not self.run.record.is_over or self.is_saving_result

    @property
    def is_saving_result(self) -> bool:
        """True if the pservers are still writing the result, which another run would end."""
        run = self.run
        is_whole = run.record.state == "finished" and run.record.failure is None  # a stopped run has its checkpoint
        return is_whole and run.checkpoint_interval > 0 and not run.is_result_saved

    @property
    def has_ended(self) -> bool:
        """True with --exit-when-done once the result of the run is saved, so that pservers and standbys may exit."""
        return self.exit_when_done and self.run.record.is_deserted and self.run.is_result_saved

    def may_exit(self, now: float) -> bool:
        """Return whether the process may exit, with --exit-when-done, because the pservers and standbys know the end.

        They have stopped, or have lived for a lease since the result was saved.
        """
        if not self.has_ended or self.run.saved_at is None:
            return False
        have_stopped = all(member.heartbeat.is_stopping for member in self.registry.members.values())
        return (have_stopped and not self.registry.standbys) or now - self.run.saved_at > self.lease_seconds

    @property
    def exit_code(self) -> int:
        """The exit code of the process: 1 if the run failed, else 0."""
        return 1 if self.run.record.state == "failed" else 0
