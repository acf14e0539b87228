"""The cluster: its pservers, and one run after another. Pure: the caller passes the time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ps_protocol.errors import (
    BadInput,
    Conflict,
    Ended,
    ModelMismatch,
    NotReady,
    RoundTimeout,
    TrainerLost,
    error_from_problem,
)
from ps_protocol.membership import Membership, PserverRegistered, RegisterPserver
from ps_protocol.messages import (
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
from ps_protocol.vocabulary import PROTOCOL_VERSION, Incarnation, PserverIndex, Rank, Round
from services.runtime.checkpoints import Manifest

from ..settings import CoordinatorSettings
from .model import check_same_tensors
from .pservers import PserverRegistry
from .resumption import Resumption, undo_resumption
from .run import LostRounds, Run
from .status import describe_notice
from .trainers import check_expectations, join_run, name_ranks


class Cluster:
    """The membership of the cluster. The coordinator's loop installs its decisions on the pservers."""

    def __init__(self, settings: CoordinatorSettings, name_run: Callable[[], str]) -> None:
        self.registry = PserverRegistry(settings.wanted_pservers, settings.lease_seconds)
        self.lease_seconds = settings.lease_seconds
        self.exit_when_done = settings.exit_when_done
        self._settings = settings
        self._name_run = name_run
        self.trainer_incarnations: dict[Rank, Incarnation] = {}
        self.run_incarnations: dict[PserverIndex, Incarnation] = {}  # the pservers that hold the run
        self.is_completing = False  # while a manifest is written
        self.installed_members: dict[Rank, Incarnation] = {}  # the members that every pserver has installed
        self.beginning: Manifest | None = None  # of the next run, instead of initial values
        self.resumption: Resumption | None = None  # until processes of the run before have reported or expired
        self._incomplete_at = -math.inf  # when a pserver last did not serve the run
        self._asked_to_stop: set[PserverIndex] = set()
        self._stopped_pservers: set[PserverIndex] = set()
        self.run = self._new_run()

    def _new_run(self) -> Run:
        return Run(self._name_run(), self._settings, self.trainer_incarnations)

    def _undo_resumption(self, now: float, *, is_trainer: bool = True) -> None:
        """Restore the recorded run, because a process from before the restart has reported.

        A report from a trainer of a run that was over does not count, because its script may not know of the end.
        """
        resumption = self.resumption
        if resumption is not None and not (is_trainer and resumption.saved.is_over):
            self.resumption = None
            undo_resumption(self, resumption, now)

    def _check_resumption(self, now: float) -> None:
        """Raise NotReady while processes from before the restart may still report, so that none loses its place."""
        resumption = self.resumption
        if resumption is None or now >= resumption.until:
            return
        if resumption.saved.members or any(member.is_restored for member in self.registry.members.values()):
            text = f"run {self.run.record.name} is resumed; living processes from before the restart must report first"
            raise NotReady(text, waiting_for="processes of the resumed run, for one lease")

    # ------------------------------------------------------------------ pservers

    def register_pserver(self, request: RegisterPserver, now: float) -> PserverRegistered:
        """Register a pserver. One that returns during a run must bring its shard, or the run fails."""
        _check_protocol(request.protocol)
        if self._settings.consistency.is_ring:
            raise Conflict(
                "strategy ring has no pservers", code="mode_mismatch", expected="no pserver", actual=request.address
            )
        run, record, held = self.run, self.run.record, request.held
        is_current = held is not None and (held.run, held.attempt) == (record.name, record.attempt)
        answer = self.registry.register(request, now, held.rounds.applied if held and is_current else None)
        is_known = answer.incarnation == self.run_incarnations.get(answer.index)
        if record.plan is None or is_known or not self.serves_run:
            return answer
        run.record = record.change()  # all pservers must freeze and report their rounds
        is_ours = held is not None and (held.run, held.plan) == (record.name, record.plan.digest)
        if not is_ours and not run.checkpoint_interval:
            text = f"pserver {answer.index} was restarted and lost its shard"
            run.fail(Ended(text, code="pserver_lost", pserver=answer.index), now)
        return answer

    def pserver_heartbeat(self, index: PserverIndex, message: PserverHeartbeat, now: float) -> PserverHeartbeatReply:
        """Renew a pserver's lease, and mark trainers as lost that its barrier has missed beyond the round time-out."""
        self.registry.heartbeat(index, message, now)
        self._note_missing_pservers(now)
        if self.registry.members[index].is_restored:
            self._undo_resumption(now, is_trainer=False)
        if message.run == self.run.record.name and message.failure is not None:
            self.run.fail(error_from_problem(message.failure), now)
        if message.run == self.run.record.name:
            if message.attempt == self.run.record.attempt:
                self.run.applied = max(self.run.applied, message.round)
            self.run.revive_stuck({rank for member in self.registry.members.values() for rank in member.missing})
            self._time_out(message.round + 1, message.missing, message.waiting_seconds, now)
        run = self.run
        stop = self.exit_when_done and run.record.is_deserted and run.is_recorded
        if stop:
            self._stop_pserver(index, message)
        return PserverHeartbeatReply(
            complete=tuple(run.complete_checkpoints) if run.knows_checkpoints and not self.is_completing else None,
            notice=describe_notice(self),
            stop=stop,
            exit_code=self.exit_code,
        )

    def _stop_pserver(self, index: PserverIndex, message: PserverHeartbeat) -> None:
        """Count a pserver as stopped once it has confirmed the request, or has reported again: a reply may be lost."""
        if message.is_stopping or index in self._asked_to_stop:
            self._stopped_pservers.add(index)
        self._asked_to_stop.add(index)

    def _note_missing_pservers(self, now: float) -> None:
        """Note the time if a pserver does not serve the run, so that trainers cannot reach a barrier."""
        run = (self.run.record.name, self.run.record.attempt)
        serving = [member for member in self.registry.members.values() if (member.run, member.attempt) == run]
        if len(serving) < self.registry.num_pservers:
            self._incomplete_at = now

    def _time_out(self, round_: Round, missing: Sequence[Rank], waiting_seconds: float, now: float) -> None:
        """Mark trainers as stuck that others have waited for during the round time-out.

        It runs only while all pservers serve the run and the trainer can reach them.
        """
        limit = self._settings.round_timeout_seconds
        reports, since = self.run.reports, max(now - waiting_seconds, self._incomplete_at)
        late = [rank for rank in missing if rank in reports and now - max(since, reports[rank].cut_off_at) > limit]
        if late:
            names = name_ranks(late)
            owed = f"reach the batch barrier of round {round_}"
            if self._settings.consistency.is_async:
                owed = "complete the step that other trainers wait for"
            elif self._settings.consistency.is_ring:
                owed = f"contribute to round {round_} in the ring"
            text = f"{names} did not {owed} within the round time-out of {limit:g} s, although alive"
            self.run.mark_stuck(late, RoundTimeout(text, missing=late), now)

    # ------------------------------------------------------------------ trainers

    def join_trainer(self, request: JoinTrainer, now: float) -> TrainerJoined:
        """Admit a trainer to the run that gathers. A new run begins when all trainers of the last one have left."""
        _check_protocol(request.protocol)
        check_expectations(self.run, request)  # no later run could have it either
        known = any(t.instance == request.instance and t.is_present for t in self.run.record.trainers.values())
        if not known and self.run.record.is_over:
            if self.exit_when_done:
                text = f"run {self.run.record.name} is over, and --exit-when-done ends the cluster; start a new cluster"
                raise Ended(text, code="run_over")
            if not self.run.record.is_deserted:
                raise NotReady(
                    f"run {self.run.record.name} is over, but not all of its trainers have left",
                    waiting_for=", ".join(f"trainer {rank} to leave" for rank in sorted(self.run.record.members)),
                )
            if self.is_saving_result:
                text = f"run {self.run.record.name} is over, and its last checkpoint is being written"
                raise NotReady(text, waiting_for="its checkpoint")
            self.run = self._new_run()
        if request.instance in {trainer.instance for trainer in self.run.record.trainers.values()}:
            self._undo_resumption(now)
        self._check_resumption(now)
        self.resumption = None  # a new process takes part
        trainer = join_run(self.run, request, now)
        if self.run.record.num_trainers is None:
            raise NotReady(f"run {self.run.record.name} waits for its trainers", waiting_for=self.waiting_for)
        return TrainerJoined(
            run=self.run.record.name,
            rank=trainer.rank,
            world_size=self.run.record.num_trainers,
            incarnation=trainer.incarnation,
            consistency=self._settings.consistency,
            lease_seconds=self.lease_seconds,
            round_timeout_seconds=self._settings.round_timeout_seconds,
        )

    def trainer_heartbeat(self, rank: Rank, message: TrainerHeartbeat, now: float) -> TrainerHeartbeatReply:
        """Renew a trainer's lease, and act on its reports of lost rounds and unreachable pservers."""
        run = self.run
        if run.member(rank, message.run, message.incarnation).is_resumed:
            self._undo_resumption(now)
        run.heartbeat(rank, message, now)
        if run.record.state == "training":
            self._note_lost_rounds(rank, message)
            if self._settings.consistency.is_ring:
                self._check_ring(message, now)
            for index, (incarnation, seconds) in message.unreachable.items():
                if self.registry.incarnations.get(index) == incarnation:  # else it does not know the next incarnation
                    run.reports[rank].cut_off_at = now
                if self.registry.was_reachable(index, incarnation, now - seconds, now):
                    text = f"trainer {rank} has not reached pserver {index} for {seconds:.1f} s, though both are alive"
                    run.mark_stuck([rank], TrainerLost(text, ranks=[rank]), now)
        return TrainerHeartbeatReply(
            state=run.record.state,
            failure=run.record.failure.to_problem() if run.record.failure else None,
            attempt=run.record.attempt,
            resume=run.record.resume or 0,
            uploader=run.record.uploader if run.record.resume is None else None,
            pservers=self.pserver_infos,
            notice=describe_notice(self),
        )

    def _check_ring(self, message: TrainerHeartbeat, now: float) -> None:
        """Fail the run if a trainer of a ring waits for one that left, or for one that does not progress.

        A trainer without batches does not count, since the script may do something else after its last batch.
        """
        run, round_ = self.run, message.round + 1
        if not message.waiting_seconds or message.is_done:
            return
        gone = [t.rank for _, t in sorted(run.record.trainers.items()) if t.state == "done" and t.round < round_]
        if gone:
            names = name_ranks(gone)
            text = f"{names} left before round {round_}"
            run.fail(Ended(f"{text}, and a ring requires all trainers", code="trainer_left", ranks=gone), now)
        elif message.waiting_seconds > self._settings.round_timeout_seconds:
            newest = {rank: run.reports[rank].heartbeat for rank in sorted(run.record.members)}
            missing = [rank for rank, one in newest.items() if not (one.waiting_seconds or one.is_done)]
            self._time_out(round_, missing, message.waiting_seconds, now)
            if not missing:
                limit = self._settings.round_timeout_seconds
                text = f"all trainers waited in round {round_} for longer than the round time-out of {limit:g} s"
                run.fail(RoundTimeout(f"{text}; check the network between them", missing=[]), now)

    def _note_lost_rounds(self, rank: Rank, message: TrainerHeartbeat) -> None:
        """Note pservers that have lost a round which this trainer has received, and ask all pservers for their rounds.

        A report counts only for a pserver that restored an earlier round from its disk in this attempt and has applied
        nothing since, so that a wrong report cannot roll back a healthy run. Asynchronous runs are never rolled back.
        """
        run = self.run
        if self._settings.consistency.is_async or message.attempt != run.record.attempt:
            return
        for index, incarnation in message.ahead_of.items():
            member = self.registry.members.get(index)
            if member is None or member.info.incarnation != incarnation or member.record.restored is None:
                continue
            report = LostRounds(incarnation, member.record.restored, rank, message.round)
            known = run.lost_rounds.get(index)
            is_new = known is None or known.incarnation != incarnation
            if is_new and member.round <= report.restored < report.received:
                run.lost_rounds[index] = report
                run.record = run.record.change()

    def leave_trainer(self, rank: Rank, message: Leave, now: float) -> None:
        """Remove a trainer. If it failed because it waited too long for other trainers, mark them as stuck first."""
        if self.run.member(rank, message.run, message.incarnation).is_resumed:
            self._undo_resumption(now)
        if message.outcome == "failed" and self.run.record.plan is not None:
            for pserver in self.registry.members.values():
                # The pserver answers the trainer before it sends its next heartbeat.
                waits = pserver.run == message.run and pserver.waiting_seconds > 0 and rank not in pserver.missing
                waited = pserver.waiting_seconds + now - pserver.seen_at  # older by up to one heartbeat period
                says_so = message.reason.startswith(RoundTimeout.__name__)
                if waits:
                    self._time_out(pserver.round + 1, pserver.missing, math.inf if says_so else waited, now)
        self.run.leave(rank, message, now)

    # ------------------------------------------------------------------ the start of a run

    @property
    def waiting_for(self) -> list[str]:
        """The members that the run waits for, in words; empty while the run trains and once it is over."""
        run, record = self.run, self.run.record
        if record.is_over:
            return []
        absent = [i for i in range(self.registry.num_pservers) if i not in self.registry.members]
        waits = [f"pserver {index}" for index in absent]
        if record.state == "training":
            waits += [f"trainer {trainer.rank}" for trainer in record.awaited]
            return waits + [f"trainer {trainer.rank} to declare its model" for trainer in record.undeclared]
        if record.num_trainers is None:
            missing = [f"trainer {rank}" for rank in run.missing_ranks if rank not in record.trainers]
            return waits + (missing or ["the last call for trainers"])
        for rank in run.missing_ranks:
            joined = rank in record.trainers
            waits.append(f"trainer {rank} to declare its model" if joined else f"trainer {rank}")
        return waits or ["the pservers to install the plan" if self.registry.num_pservers else "the coordinator's disk"]

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
        if self._settings.consistency.is_ring:
            return [self.run.newest_round]
        return [member.round for member in self.registry.members.values()]

    def start_run_if_complete(self, now: float = 0.0) -> bool:
        """Make the plan once all members are present, and return whether it was made. It must then be installed."""
        run, record = self.run, self.run.record
        if record.state != "gathering" or record.plan is not None:
            return False
        if not (self.registry.is_complete and record.num_declared == record.num_trainers):
            return False
        plan = run.start(self.registry.num_pservers)
        if self.beginning is not None:
            try:
                check_same_tensors(plan, self.beginning.slice_plan(), f"the checkpoint of run {self.beginning.run}")
            except ModelMismatch as error:
                run.fail(error, now)
                return False
            controls = self.beginning.controls.model_copy(update={"since": 0})
            members, starts = run.record.members, dict[Rank, Round]()
            if run.settings.consistency.is_async:
                steps = self.beginning.newest_steps
                others = min(steps.values(), default=self.beginning.round)
                starts = {rank: steps.get(rank, others) + 1 for rank in members}
            run.record = run.record.update(
                resume=self.beginning.round,
                source=self.beginning.run,
                membership=Membership(members, starts, controls=(controls,)),
            )
            self.beginning = None
        self.installed_members = {}
        self.run_incarnations = {i: m.info.incarnation for i, m in self.registry.members.items()}
        return True

    def finish_change(self, number: int = 0) -> None:
        """Note that every pserver has installed a change, and that the disk says that the run has begun."""
        run, record = self.run, self.run.record
        run.installed_number = number
        self.installed_members = dict(record.membership.members)
        here = (t for t in record.trainers.values() if t.is_awaited and t.state == "declared")
        installed = [t.rank for t in here if self.installed_members.get(t.rank) == t.incarnation]
        if installed:
            run.record = record.with_trainers(installed, is_awaited=False)

    def plan_ready(self, rank: Rank, incarnation: Incarnation) -> PlanReady | None:
        """Return the plan for a trainer once all pservers have installed its incarnation, else None."""
        run, record, pservers = self.run, self.run.record, self.pserver_infos
        if record.plan is None or record.state == "gathering" or self.installed_members.get(rank) != incarnation:
            return None
        if len(pservers) < record.plan.num_pservers:  # one has returned and has not installed the run
            return None
        return PlanReady(
            run=record.name,
            attempt=record.attempt,
            plan=record.plan.as_json,
            pservers=pservers,
            uploader=record.uploader,
            start=record.membership.starts.get(rank, (record.resume or 0) + 1),
            nonfinite=run.nonfinite,
            rendezvous=record.declaration.rendezvous if record.declaration else None,
            max_grad_norm=record.declaration.max_grad_norm if record.declaration else None,
        )

    @property
    def pserver_infos(self) -> tuple[PserverInfo, ...]:
        """The pservers that hold the run, as trainers need them."""
        here = [m.info for _, m in sorted((self.registry.members | self.registry.lost).items())]
        return tuple(info for info in here if info.incarnation == self.run_incarnations.get(info.index))

    # ------------------------------------------------------------------ time and end

    def renew_leases(self, now: float) -> None:
        """Renew all leases, after a time in which no heartbeat could be received."""
        for pserver in self.registry.members.values():
            pserver.seen_at = now
        for report in self.run.reports.values():
            report.seen_at = now

    def expire(self, now: float) -> None:
        """Act on expired leases and time-outs."""
        run = self.run
        self.registry.expire(now)
        self._note_missing_pservers(now)
        for lost in self.registry.lost.values():
            if run.record.plan is None or run.record.is_over:
                break
            age, limit = now - lost.seen_at, self._settings.rejoin_timeout_seconds
            text = f"pserver {lost.info.index} at {lost.info.address} was lost: no heartbeat for {age:.1f} s"
            if not run.checkpoint_interval and not lost.is_stopping:
                text = f"{text} (lease {self.lease_seconds:g} s)"
            elif age > limit:
                text = f"{text}, and it did not come back within the rejoin time-out of {limit:g} s"
            else:
                continue
            run.fail(Ended(text, code="pserver_lost", pserver=lost.info.index), now)
        run.expire(now, self.lease_seconds)

    @property
    def serves_run(self) -> bool:
        """True if pservers must follow the run."""
        return not self.run.record.is_over or self.is_saving_result

    @property
    def is_saving_result(self) -> bool:
        """True if the pservers are still writing the result, which another run would end."""
        run = self.run
        return run.record.state == "finished" and run.checkpoint_interval > 0 and not run.is_recorded

    @property
    def may_exit(self) -> bool:
        """True with --exit-when-done once the run is over and all living pservers know it."""
        is_over = self.exit_when_done and self.run.record.is_deserted
        return is_over and self.registry.members.keys() <= self._stopped_pservers

    @property
    def exit_code(self) -> int:
        """The exit code of the process: 1 if the run failed, else 0."""
        return 1 if self.run.record.state == "failed" else 0


def _check_protocol(version: int) -> None:
    if version != PROTOCOL_VERSION:
        raise BadInput(
            "the sender uses another protocol version; install the same version of Gradpost on all machines",
            code="unsupported_protocol", expected=PROTOCOL_VERSION, actual=version,
        )  # fmt: skip
