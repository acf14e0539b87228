"""The cluster: its pservers, and one run after another. Pure: the caller passes the time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from ps_protocol.errors import Conflict, Ended, ModelMismatch, NotReady, RoundTimeout, TrainerLost, error_from_problem
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
from ps_protocol.vocabulary import Incarnation, PserverIndex, Rank, Round
from services.runtime.checkpoints import Manifest
from services.runtime.logs import get_logger

from ..settings import CoordinatorSettings
from .joining import check_expectations, check_protocol, declare_model, fail_deserted_run, join_run, start_run
from .losses import (
    check_ring,
    expire_trainers,
    leave_run,
    lose_stuck_trainers,
    note_heartbeat,
    return_stuck_trainers,
    time_out,
)
from .pservers import PserverRegistry
from .record import Beginning, ClusterRecord, Resumption, await_trainers
from .replicas import Replicas
from .run import LostRounds, Run
from .status import describe_notice, list_rounds, list_waits

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
        self.resumption: Resumption | None = None  # until processes of the run before have reported or expired

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

    def describe(self) -> ClusterRecord:
        """Return the record to persist."""
        members, beginning = {**self.registry.lost, **self.registry.members}, self.beginning
        return ClusterRecord(
            trainer_incarnations=dict(self.run.incarnations),
            pserver_incarnations=dict(self.registry.incarnations),
            run_incarnations=dict(self.run.holders),
            pservers=tuple(member.record for _, member in sorted(members.items())),
            replicas=dict(self.registry.replicas),
            beginning=beginning and Beginning(run=beginning.run, round=beginning.round, controls=beginning.controls),
            run=self.run.durable if self.run.record.trainers else None,
        )

    def restore_incarnations(self, record: ClusterRecord) -> None:
        """Restore the counters, so that every later process gets a higher incarnation."""
        self.run = replace(self.run, incarnations=record.trainer_incarnations)
        self.registry = replace(self.registry, incarnations=record.pserver_incarnations)

    def restore(self, record: ClusterRecord, now: float) -> None:
        """Restore the cluster from its record. All leases begin now, and the last change is made again."""
        self.restore_incarnations(record)
        for pserver in record.pservers:
            self.registry = self.registry.restore(pserver, now, record.replicas[pserver.info.index])
        self.run = self.run.note_holders(record.run_incarnations)
        if record.run is not None:
            self.run = self.run.restore(record.run, now)

    def resume(self, record: ClusterRecord, now: float, beginning: Manifest | None) -> None:
        """Resume the recorded run, even if it finished or failed. Its trainers must be started again.

        If processes of that run report, only the coordinator was restarted, and the recorded run is restored.
        """
        assert record.run is not None
        self.restore(record, now)
        self.registry = self.registry.clear_replicas()  # their processes have ended, too
        waiting = await_trainers(self.run.record, is_async=self._settings.consistency.is_async)
        reports = {rank: self.run.reports[rank] for rank in waiting.trainers}
        self.run = replace(self.run, record=waiting, reports=reports, ended_at=None)
        self.resumption = Resumption(record.run, now + self.lease_seconds, beginning)

    def _undo_resumption(self, now: float, *, is_trainer: bool = True) -> None:
        """Restore the recorded run, because a process from before the restart has reported.

        A report from a trainer of a run that was over does not count, because its script may not know of the end.
        """
        resumption, failure = self.resumption, self.run.record.failure
        if resumption is None or (is_trainer and resumption.saved.is_over):
            return
        self.resumption, self.run = None, self.run.restore(resumption.saved, now)
        if failure is not None:
            self.run = self.run.fail(failure, now)
        record = self.run.record
        log.warning("not resumed: processes of the run before are still alive", run=record.name, state=record.state)
        if record.state != "failed":
            return
        self.beginning = resumption.beginning
        if self.beginning is not None:
            log.warning("the next run begins with a checkpoint of the failed run", round=self.beginning.round)
        else:
            advice = "to continue it, stop its pservers too and start all processes again"
            log.error(f"the failed run has no checkpoint, so the next run begins with initial values; {advice}")

    def _check_resumption(self, now: float) -> None:
        """Raise NotReady while processes from before the restart may still report, so that none loses its place."""
        resumption = self.resumption
        if resumption is None or now >= resumption.until:
            return
        if resumption.saved.members or any(member.is_restored for member in self.registry.members.values()):
            text = f"run {self.run.record.name} is resumed; living processes from before the restart must report first"
            raise NotReady(text, waiting_for="processes of the resumed run, for one lease")

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
            self._undo_resumption(now, is_trainer=False)
        run = self.run
        if message.run == run.record.name:
            if message.failure is not None:
                run = run.fail(error_from_problem(message.failure), now)
            missing = {rank for member in self.registry.members.values() for rank in member.heartbeat.missing}
            run = return_stuck_trainers(run.note_applied(message.attempt, message.round), missing)
            run = time_out(run, message.round + 1, message.missing, message.waiting_seconds, now)
            self.run = run
        stop = self.exit_when_done and run.record.is_deserted and run.is_result_saved
        if stop:
            self.registry = self.registry.ask_to_stop(index)
        return PserverHeartbeatReply(
            complete=run.complete_checkpoints,
            notice=describe_notice(self.run, self.registry, now),
            stop=stop,
            exit_code=self.exit_code,
        )

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
        record = self.run.record
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
        if request.instance in {trainer.instance for trainer in self.run.record.trainers.values()}:
            self._undo_resumption(now)
        self._check_resumption(now)
        self.resumption = None  # a new process takes part
        self.run = join_run(self.run, request, now)
        record = self.run.record
        trainer = record.find_process(request.instance)
        if trainer is None or record.num_trainers is None:
            # A crash may lose this candidate, whose next request makes it one again.
            raise NotReady(f"run {record.name} waits for its trainers", waiting_for=self.waiting_for)
        return TrainerJoined(
            run=record.name,
            rank=trainer.rank,
            world_size=record.num_trainers,
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
        """Renew a trainer's lease, and act on its reports of lost rounds and unreachable pservers."""
        if self.run.member(rank, message.run, message.incarnation).is_resumed:
            self._undo_resumption(now)
        run = note_heartbeat(self.run, rank, message, now)
        if run.record.state == "training":
            run = self._note_lost_rounds(run, rank, message)
            if self._settings.consistency.is_ring:
                run = check_ring(run, message, now)
            for index, (incarnation, seconds) in message.unreachable.items():
                # Otherwise the trainer has not received the address of the pserver's next incarnation yet.
                if self.registry.incarnations.get(index) == incarnation:
                    run = run.with_report(rank, cut_off_at=now)
                if self.registry.was_reachable(index, incarnation, now - seconds, now):
                    text = f"trainer {rank} has not reached pserver {index} for {seconds:.1f} s, though both are alive"
                    run = lose_stuck_trainers(run, [rank], TrainerLost(text, ranks=[rank]), now)
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
            member = self.registry.members.get(index)
            if member is None or member.info.incarnation != incarnation or member.record.restored is None:
                continue
            report = LostRounds(incarnation, member.record.restored, rank, message.round)
            if member.round <= report.restored < report.received:
                run = run.note_lost_rounds(index, report)
        return run

    def leave_trainer(self, rank: Rank, message: Leave, now: float) -> None:
        """Remove a trainer. If it failed because it waited too long for other trainers, mark them as stuck first."""
        if self.run.member(rank, message.run, message.incarnation).is_resumed:
            self._undo_resumption(now)
        run = self.run
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
        return list_waits(self.run, self.registry)

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

    def start_run_if_complete(self, now: float) -> bool:
        """Make the plan once all members are present, and return whether it was made. It must then be installed."""
        record = self.run.record
        if record.state != "gathering" or record.plan is not None:
            return False
        if not (self.registry.is_complete and record.num_declared == record.num_trainers):
            return False
        holders = {index: member.info.incarnation for index, member in self.registry.members.items()}
        self.run = start_run(self.run, holders, self.beginning, now)
        if self.run.record.is_over:
            return False
        self.beginning = None
        self.registry = self.registry.clear_replicas()
        return True

    def plan_ready(self, rank: Rank, incarnation: Incarnation) -> PlanReady | None:
        """Return the plan for a trainer once all pservers have installed its incarnation, else None."""
        run, record, pservers = self.run, self.run.record, self.pserver_infos
        if record.plan is None or record.state == "gathering" or run.installed.members.get(rank) != incarnation:
            return None
        if len(pservers) < record.plan.num_pservers:  # a pserver returned, and has not installed the run
            return None
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
        infos = [member.info for _, member in sorted({**self.registry.members, **self.registry.lost}.items())]
        return tuple(info for info in infos if info.incarnation == self.run.holders.get(info.index))

    # ------------------------------------------------------------------ time and end

    def renew_leases(self, now: float) -> None:
        """Renew all leases, after a time in which no heartbeat could be received."""
        self.registry = self.registry.renew_leases(now)
        for rank in self.run.reports:
            self.run = self.run.with_report(rank, seen_at=now)

    def expire(self, now: float) -> None:
        """Act on expired leases and time-outs."""
        self.registry = self.registry.expire(now)
        self._note_missing_pservers(now)
        run, limit = self.run, self._settings.rejoin_timeout_seconds
        is_under_way = run.record.plan is not None and not run.record.is_over
        for lost in self.registry.lost.values() if is_under_way else ():
            age = now - lost.seen_at
            text = f"pserver {lost.info.index} at {lost.info.address} was lost: no heartbeat for {age:.1f} s"
            # Without checkpoints a shard is gone with its process, unless the pserver wrote it when it stopped.
            if not run.checkpoint_interval and not lost.heartbeat.is_stopping:
                text = f"{text} (lease {self.lease_seconds:g} s)"
            elif age > limit:
                text = f"{text}, and it did not come back within the rejoin time-out of {limit:g} s"
            else:
                continue
            run = run.fail(Ended(text, code="pserver_lost", pserver=lost.info.index), now)
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
    def may_exit(self) -> bool:
        """True with --exit-when-done once the run is over and all living pservers know it."""
        has_stopped = all(member.has_stopped for member in self.registry.members.values())
        return self.exit_when_done and self.run.record.is_deserted and has_stopped

    @property
    def exit_code(self) -> int:
        """The exit code of the process: 1 if the run failed, else 0."""
        return 1 if self.run.record.state == "failed" else 0
