"""The cluster: its pservers and the run they serve, one after another. Pure: the caller brings the clock."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
from ps_protocol.membership import Membership
from ps_protocol.messages import (
    HeldRun,
    InstallMembers,
    InstallRun,
    JoinTrainer,
    Leave,
    PlanReady,
    PserverHeartbeat,
    PserverHeartbeatReply,
    PserverInfo,
    PserverRegistered,
    RegisterPserver,
    TrainerHeartbeat,
    TrainerHeartbeatReply,
    TrainerJoined,
)
from ps_protocol.vocabulary import PROTOCOL_VERSION, Incarnation, NonfinitePolicy, PserverIndex, Rank, Round
from services.runtime.checkpoints import Manifest

from .defaults import RunDefaults
from .model import check_same_tensors
from .pservers import PserverRegistry
from .run import LostRounds, Run
from .trainers import name_ranks


@dataclass(frozen=True, slots=True)
class Resumption:
    """How a run that was resumed becomes again what it was recorded as, should somebody of before be heard.

    That may be up to the time `until`, when whoever has not been heard is lost. `had_trainers` says whether any were
    there.
    """

    was_over: bool
    had_trainers: bool
    until: float
    undo: Callable[[float], None]


class Cluster:
    """Decides who takes part; the shell around it carries the decisions to the pservers."""

    def __init__(
        self,
        num_pservers: int,
        defaults: RunDefaults,
        *,
        lease_seconds: float,
        exit_when_done: bool,
        name_run: Callable[[], str],
    ) -> None:
        self.registry = PserverRegistry(num_pservers, lease_seconds)
        self.lease_seconds = lease_seconds
        self.exit_when_done = exit_when_done
        self._defaults = defaults
        self._name_run = name_run
        self.trainer_incarnations: dict[Rank, Incarnation] = {}
        self.run_incarnations: dict[PserverIndex, Incarnation] = {}  # of the pservers that hold the run
        self.complete_checkpoints: list[Round] = []  # of the run, newest first
        self.checkpoints_known_for: tuple[str, int] | None = None  # the run and the attempt whose they are
        self.is_completing = False  # a manifest is being written, so that one more is about to be complete
        self.installed_members: dict[Rank, Incarnation] = {}  # whom every pserver counts on
        self.beginning: Manifest | None = None  # what the next run begins with, instead of initial values
        self.resumption: Resumption | None = None  # until it is clear who is there
        self._recorded_run = ""
        self._incomplete_at = -math.inf  # when a pserver was last away, or did not serve the run yet
        self._asked_to_stop: set[PserverIndex] = set()
        self._stopped_pservers: set[PserverIndex] = set()
        self.run = self._new_run()

    def _new_run(self) -> Run:
        return Run(self._name_run(), self._defaults, self.trainer_incarnations)

    def _undo_resumption(self, now: float, *, is_trainer: bool = True) -> None:
        """Somebody is heard who was there before this process: what was resumed goes on, everybody as it was.

        Of a run that was over a script may still be there that has not heard of it; that proves nothing.
        """
        resumption = self.resumption
        if resumption is not None and not (is_trainer and resumption.was_over):
            self.resumption = None
            resumption.undo(now)

    def _check_resumption(self, now: float) -> None:
        """Raise NotReady while somebody of before may yet be heard, whose place nobody else may have."""
        resumption = self.resumption
        if resumption is None or now >= resumption.until:
            return
        if resumption.had_trainers or any(member.is_restored for member in self.registry.members.values()):
            text = f"run {self.run.name} is resumed; those of its processes that still live have to be heard first"
            raise NotReady(text, waiting_for="the processes from before, for their lease")

    # ------------------------------------------------------------------ pservers

    def register_pserver(self, request: RegisterPserver, now: float) -> PserverRegistered:
        """Let a pserver in. One that comes back during a run brings its shard along, or ends the run."""
        _check_protocol(request.protocol)
        if self._defaults.consistency.is_ring:
            raise Conflict(
                "strategy ring has no pservers", code="mode_mismatch", expected="no pserver", actual=request.address
            )
        answer = self.registry.register(request, now)
        run, held = self.run, request.held
        if held is not None and (held.run, held.attempt) == (run.name, run.attempt):
            self.registry.members[answer.index].restored = held.rounds.applied
        is_known = answer.incarnation == self.run_incarnations.get(answer.index)
        if run.plan is None or is_known or not self.serves_run:
            return answer
        run.number += 1  # all agree anew on who is how far
        if not self._may_come_back(held):
            run.fail(
                Ended(
                    f"pserver {answer.index} was restarted and lost its shard",
                    code="pserver_lost",
                    pserver=answer.index,
                ),
                now,
            )
        return answer

    def _may_come_back(self, held: HeldRun | None) -> bool:
        """Whether there is something on a disk that a pserver without its memory can go on with."""
        run = self.run
        assert run.plan is not None
        is_ours = held is not None and (held.run, held.plan) == (run.name, run.plan.digest)
        return is_ours or bool(self._defaults.checkpoint_interval(run.plan))

    def pserver_heartbeat(self, index: PserverIndex, message: PserverHeartbeat, now: float) -> PserverHeartbeatReply:
        """Renew a pserver's lease; those for whom its barrier has waited beyond the round time-out count as lost."""
        self.registry.heartbeat(index, message, now)
        self._note_missing_pservers(now)
        if self.registry.members[index].is_restored:
            self._undo_resumption(now, is_trainer=False)
        if message.run == self.run.name and message.failure is not None:
            self.run.fail(error_from_problem(message.failure), now)
        if message.run == self.run.name:
            if message.attempt == self.run.attempt:
                self.run.applied = max(self.run.applied, message.round)
            self.run.revive_stuck({rank for member in self.registry.members.values() for rank in member.missing})
            self._time_out(message.round + 1, message.missing, message.waiting_seconds, now)
        stop = self.exit_when_done and self.run.is_deserted and self._recorded_run == self.run.name
        if stop:
            self._stop_pserver(index, message)
        return PserverHeartbeatReply(
            complete=tuple(self.complete_checkpoints) if self.knows_checkpoints and not self.is_completing else None,
            notice=self.notice(),
            stop=stop,
            exit_code=self.exit_code,
        )

    def _stop_pserver(self, index: PserverIndex, message: PserverHeartbeat) -> None:
        """It knows it when it says goodbye, or is heard again: one answer may be lost."""
        if message.is_stopping or index in self._asked_to_stop:
            self._stopped_pservers.add(index)
        self._asked_to_stop.add(index)

    def _note_missing_pservers(self, now: float) -> None:
        """Note the time if a pserver is away or does not serve the run yet, so that no trainer can reach a barrier."""
        run = (self.run.name, self.run.attempt)
        serving = [member for member in self.registry.members.values() if (member.run, member.attempt) == run]
        if len(serving) < self.registry.num_pservers:
            self._incomplete_at = now

    def _time_out(self, round_: Round, missing: Sequence[Rank], waiting_seconds: float, now: float) -> None:
        """Take the trainers for stuck that others have waited for during the round time-out.

        The time-out of a trainer runs only while all pservers serve the run and the trainer can reach them.
        """
        limit = self._defaults.round_timeout_seconds
        trainers, since = self.run.trainers, max(now - waiting_seconds, self._incomplete_at)
        late = [rank for rank in missing if rank in trainers and now - max(since, trainers[rank].cut_off_at) > limit]
        if late:
            names = name_ranks(late)
            owed = f"reach the batch barrier of round {round_}"
            if self._defaults.consistency.is_async:
                owed = "take the step that others wait for"
            elif self._defaults.consistency.is_ring:
                owed = f"bring gradients into the ring for round {round_}"
            text = f"{names} did not {owed} within the round time-out of {limit:g} s, though alive"
            self.run.mark_stuck(late, RoundTimeout(text, missing=late), now)

    @property
    def knows_checkpoints(self) -> bool:
        """Whether `complete_checkpoints` are those that there are: they are looked for, which may take its time."""
        return self.checkpoints_known_for == (self.run.name, self.run.attempt)

    def forget_checkpoints_after(self, round_: Round) -> None:
        """The run goes back to this round."""
        self.complete_checkpoints[:] = [complete for complete in self.complete_checkpoints if complete <= round_]

    # ------------------------------------------------------------------ trainers

    def join_trainer(self, request: JoinTrainer, now: float) -> TrainerJoined:
        """Let a trainer into the run that is gathering; a new run begins when the last one is deserted."""
        _check_protocol(request.protocol)
        self.run.check_expectations(request)  # waiting for another run would not help
        known = any(t.instance == request.instance and t.is_here for t in self.run.trainers.values())
        if not known and self.run.is_over:
            if self.exit_when_done:
                raise Ended(
                    f"run {self.run.name} is over and this cluster serves no other (--exit-when-done)", code="run_over"
                )
            if not self.run.is_deserted:
                raise NotReady(
                    f"run {self.run.name} is over, but not all of its trainers have left",
                    waiting_for=", ".join(f"trainer {rank} to leave" for rank in sorted(self.run.members)),
                )
            if self.is_saving_result:
                text = f"run {self.run.name} is over, and its last checkpoint is being written"
                raise NotReady(text, waiting_for="its checkpoint")
            self.run = self._new_run()
            self.complete_checkpoints.clear()
        if request.instance in {trainer.instance for trainer in self.run.trainers.values()}:
            self._undo_resumption(now)
        self._check_resumption(now)
        self.resumption = None  # somebody new takes part
        trainer = self.run.join(request, now)
        if self.run.num_trainers is None:
            raise NotReady(f"run {self.run.name} waits for its trainers", waiting_for=self.waiting_for)
        return TrainerJoined(
            run=self.run.name,
            rank=trainer.rank,
            world_size=self.run.num_trainers,
            incarnation=trainer.incarnation,
            consistency=self._defaults.consistency,
            lease_seconds=self.lease_seconds,
            round_timeout_seconds=self._defaults.round_timeout_seconds,
        )

    def trainer_heartbeat(self, rank: Rank, message: TrainerHeartbeat, now: float) -> TrainerHeartbeatReply:
        """Renew a trainer's lease. What it says of pservers that lost a round, or that it cannot reach, has effect."""
        run = self.run
        if run.member(rank, message.run, message.incarnation).is_resumed:
            self._undo_resumption(now)
        run.heartbeat(rank, message, now)
        if run.state == "training":
            self._note_lost_rounds(rank, message)
            if self._defaults.consistency.is_ring:
                self._check_ring(message, now)
            for index, (incarnation, seconds) in message.unreachable.items():
                if self.registry.incarnations.get(index) == incarnation:  # else it has not heard of the next life yet
                    run.trainers[rank].cut_off_at = now
                if self.registry.was_reachable(index, incarnation, now - seconds, now):
                    text = f"trainer {rank} has not reached pserver {index} for {seconds:.1f} s, though both are alive"
                    run.mark_stuck([rank], TrainerLost(text, ranks=[rank]), now)
        return TrainerHeartbeatReply(
            state=run.state,
            failure=run.failure.to_problem() if run.failure else None,
            attempt=run.attempt,
            resume=run.resume or 0,
            uploader=run.uploader if run.resume is None else None,
            pservers=self.pserver_infos,
            notice=self.notice(),
        )

    def _check_ring(self, message: TrainerHeartbeat, now: float) -> None:
        """A trainer may wait in the ring: for one that has left, which is the end, or for one that does not come.

        Whoever is done waits patiently: the others may do something else after their last batches.
        """
        run, round_ = self.run, message.round + 1
        if not message.waiting_seconds or message.is_done:
            return
        here = [trainer for _, trainer in sorted(run.trainers.items()) if trainer.is_here]
        gone = [t.rank for _, t in sorted(run.trainers.items()) if t.state == "done" and t.round < round_]
        if gone:
            names = name_ranks(gone)
            text = f"{names} had no gradients for round {round_}, being done, and has not waited for the others"
            run.fail(
                Ended(f"{text}: with strategy ring nobody goes on without it", code="trainer_left", ranks=gone), now
            )
        elif message.waiting_seconds > self._defaults.round_timeout_seconds:
            missing = [trainer.rank for trainer in here if not (trainer.waiting_seconds or trainer.is_done)]
            self._time_out(round_, missing, message.waiting_seconds, now)
            if not missing:
                limit = self._defaults.round_timeout_seconds
                text = f"all trainers wait for each other in round {round_} beyond the round time-out of {limit:g} s"
                run.fail(RoundTimeout(f"{text}: they do not reach each other", missing=[]), now)

    def _note_lost_rounds(self, rank: Rank, message: TrainerHeartbeat) -> None:
        """Note which pservers have lost a round that this trainer has received, and ask all pservers for their rounds.

        A report counts only for a pserver that has registered during this attempt with an earlier round from its disk
        and has applied nothing since: a trainer's word alone takes no healthy run back. In asynchronous modes no run
        is rolled back, since the trainers' own steps make up for what was lost.
        """
        run = self.run
        if self._defaults.consistency.is_async or message.attempt != run.attempt:
            return
        for index, incarnation in message.ahead_of.items():
            member = self.registry.members.get(index)
            if member is None or member.info.incarnation != incarnation or member.restored is None:
                continue
            report = LostRounds(incarnation, member.restored, rank, message.round)
            known = run.lost_rounds.get(index)
            is_new = known is None or known.incarnation != incarnation
            if is_new and member.round <= report.restored < report.received:
                run.lost_rounds[index] = report
                run.number += 1

    def leave_trainer(self, rank: Rank, message: Leave, now: float) -> None:
        """A trainer goes. If it fails because it waited too long for others, it is those who ended the run."""
        if self.run.member(rank, message.run, message.incarnation).is_resumed:
            self._undo_resumption(now)
        if message.outcome == "failed" and self.run.plan is not None:
            for pserver in self.registry.members.values():
                # The pserver has told the trainer of the time-out before its next heartbeat tells us.
                waits = pserver.run == self.run.name and pserver.waiting_seconds > 0 and rank not in pserver.missing
                waited = pserver.waiting_seconds + now - pserver.seen_at  # less than it was by what a heartbeat takes
                says_so = message.reason.startswith(RoundTimeout.__name__)
                if waits:
                    self._time_out(pserver.round + 1, pserver.missing, math.inf if says_so else waited, now)
        self.run.leave(rank, message, now)

    # ------------------------------------------------------------------ the start of a run

    @property
    def waiting_for(self) -> list[str]:
        """Who keeps the run from starting, or from going on, in words; empty while it trains and once it is over."""
        run = self.run
        if run.is_over:
            return []
        absent = [i for i in range(self.registry.num_pservers) if i not in self.registry.members]
        waits = [f"pserver {index}" for index in absent]
        if run.state == "training":
            waits += [f"trainer {trainer.rank}" for trainer in run.awaited]
            return waits + [f"trainer {trainer.rank} to declare its model" for trainer in run.undeclared]
        if run.num_trainers is None:
            missing = [f"trainer {rank}" for rank in run.missing_ranks if rank not in run.trainers]
            return waits + (missing or ["the last call for trainers"])
        for rank in run.missing_ranks:
            joined = rank in run.trainers
            waits.append(f"trainer {rank} to declare its model" if joined else f"trainer {rank}")
        return waits or ["the pservers to install the plan" if self.registry.num_pservers else "the coordinator's disk"]

    def require_pservers(self) -> None:
        """Raise Conflict (`no_pservers`) with strategy `ring`."""
        if self._defaults.consistency.is_ring:
            text = "with strategy ring there are no pservers: values, checkpoints and controls are the script's affair"
            raise Conflict(text, code="no_pservers", expected="strategy ps", actual="strategy ring")

    @property
    def rounds(self) -> list[Round]:
        """How far each pserver is; with strategy ring how far the trainers are together."""
        if self._defaults.consistency.is_ring:
            return [self.run.newest_round]
        return [member.round for member in self.registry.members.values()]

    def prospects(self, now: float) -> list[tuple[str, float]]:
        """Who was lost and is waited for, in words, and in how many seconds the run fails if nobody comes back."""
        if self.run.state != "training":
            return []
        limit = self._defaults.rejoin_timeout_seconds
        lost = [m for _, m in sorted(self.registry.lost.items())]
        gone = [(f"pserver {m.info.index} at {m.info.address} is silent", m.seen_at) for m in lost]
        gone += [(trainer.why, trainer.gone_at) for trainer in self.run.awaited]
        patience = self._defaults.round_timeout_seconds  # then it counts as lost
        gone += [
            (f"trainer {trainer.rank} has come, and has not declared its model", trainer.joined_at + patience)
            for trainer in self.run.undeclared
        ]
        return [(text, max(0.0, limit - (now - since))) for text, since in gone]

    def notice(self) -> str:
        """The same in one line that stays the same as long as nothing changes."""
        texts = [text for text, _ in self.prospects(0.0)]
        limit = self._defaults.rejoin_timeout_seconds
        lost = f"{'; '.join(texts)}: the run fails unless it comes back within {limit:g} s" if texts else ""
        return "; ".join(filter(None, (self.pause, lost)))

    def not_training_error(self) -> NotReady:
        """What to answer those who want something of a run that trains."""
        waits = self.waiting_for
        detail = f"no run is training; the cluster waits for {', '.join(waits)}" if waits else "no run is training"
        return NotReady(detail, waiting_for=waits or "a run")

    @property
    def pause(self) -> str:
        """What to say to those who wait since an administrator has paused the run; nothing if it is not paused."""
        if self.run.state != "training" or not self.run.membership.newest_controls.is_paused:
            return ""
        return "an administrator has paused the run; it goes on after POST /v1/controls/resume"

    def start_run_if_complete(self, now: float = 0.0) -> bool:
        """Make the plan as soon as everybody is here; the installations must then be carried out."""
        run = self.run
        if run.state != "gathering" or run.plan is not None:
            return False
        if not (self.registry.is_complete and run.is_declared):
            return False
        plan = run.start(self.registry.num_pservers)
        if self.beginning is not None:
            try:
                check_same_tensors(plan, self.beginning.slice_plan(), f"the checkpoint of run {self.beginning.run}")
            except ModelMismatch as error:
                run.fail(error, now)
                return False
            run.resume, run.source = self.beginning.round, self.beginning.run
            controls = self.beginning.controls.model_copy(update={"since": 0})
            starts: dict[Rank, Round] = {}
            if run.defaults.consistency.is_async:
                steps = self.beginning.newest_steps
                others = min(steps.values(), default=self.beginning.round)
                starts = {rank: steps.get(rank, others) + 1 for rank in run.members}
            run.membership = Membership(run.members, starts, controls=(controls,))
            self.beginning = None
        self.installed_members = {}
        self.run_incarnations = {i: m.info.incarnation for i, m in self.registry.members.items()}
        return True

    def installation(self, index: PserverIndex, number: int, restore: Round | None) -> InstallRun:
        """What pserver `index` must be told to serve the run, in the change of this number.

        `restore` is the round that it has to be at; None: it begins with initial values.
        """
        run = self.run
        assert run.plan is not None
        assert run.declaration is not None
        defaults = self._defaults
        # The coordinator decides which trainer is late. A pserver does so by itself only if the coordinator is gone.
        patience = defaults.round_timeout_seconds + defaults.rejoin_timeout_seconds + self.lease_seconds
        return InstallRun(
            run=run.name,
            attempt=run.attempt,
            plan=run.plan.as_json,
            incarnation=self.run_incarnations[index],
            consistency=defaults.consistency,
            nonfinite=self._nonfinite,
            max_grad_norm=run.declaration.max_grad_norm,
            round_timeout_seconds=patience,
            durability=defaults.durability,
            checkpoint_rounds=defaults.checkpoint_interval(run.plan),
            keep_checkpoints=defaults.keep_checkpoints,
            restore=restore,
            began=run.began,
            source=run.source,
            uploader=run.uploader,
            number=number,
            membership=run.membership,
        )

    @property
    def _nonfinite(self) -> NonfinitePolicy:
        declaration = self.run.declaration
        return (declaration and declaration.nonfinite) or self._defaults.nonfinite

    def members_message(self, number: int) -> InstallMembers:
        """The members as they were decided, or the run's failure, for all pservers."""
        run = self.run
        return InstallMembers(
            run=run.name,
            attempt=run.attempt,
            number=number,
            membership=run.membership,
            failure=run.failure.to_problem() if run.failure else None,
        )

    def finish_change(self, number: int = 0) -> None:
        """Every pserver has taken what was decided last, in this change; the disk has it that the run has begun."""
        run = self.run
        run.installed_number = number
        self.installed_members = dict(run.membership.members)
        for rank, trainer in run.trainers.items():
            if trainer.state == "declared" and self.installed_members.get(rank) == trainer.incarnation:
                trainer.is_awaited = False

    def plan_ready(self, rank: Rank, incarnation: Incarnation) -> PlanReady | None:
        """What a trainer needs to begin, once the pservers count on it."""
        run, pservers = self.run, self.pserver_infos
        if run.plan is None or run.state == "gathering" or self.installed_members.get(rank) != incarnation:
            return None
        if len(pservers) < run.plan.num_pservers:  # one has come back, and does not hold the run yet
            return None
        return PlanReady(
            run=run.name,
            attempt=run.attempt,
            plan=run.plan.as_json,
            pservers=pservers,
            uploader=run.uploader,
            start=run.membership.starts.get(rank, (run.resume or 0) + 1),
            nonfinite=self._nonfinite,
            rendezvous=run.declaration.rendezvous if run.declaration else None,
            max_grad_norm=run.declaration.max_grad_norm if run.declaration else None,
        )

    @property
    def pserver_infos(self) -> tuple[PserverInfo, ...]:
        """The pservers that hold the run, as trainers need them."""
        here = [m.info for _, m in sorted((self.registry.members | self.registry.lost).items())]
        return tuple(info for info in here if info.incarnation == self.run_incarnations.get(info.index))

    # ------------------------------------------------------------------ time and end

    def renew_leases(self, now: float) -> None:
        """Start everybody's lease anew, since heartbeats could not be heard."""
        for pserver in self.registry.members.values():
            pserver.seen_at = now
        for trainer in self.run.trainers.values():
            trainer.seen_at = now

    def expire(self, now: float) -> None:
        """Act on leases that have run out."""
        run = self.run
        self.registry.expire(now)
        self._note_missing_pservers(now)
        for lost in self.registry.lost.values():
            if run.plan is None or run.is_over:
                break
            age, limit = now - lost.seen_at, self._defaults.rejoin_timeout_seconds
            text = f"pserver {lost.info.index} at {lost.info.address} was lost: no heartbeat for {age:.1f} s"
            if not self._defaults.checkpoint_interval(run.plan) and not lost.is_stopping:
                text = f"{text} (lease {self.lease_seconds:g} s)"
            elif age > limit:
                text = f"{text}, and it did not come back within the rejoin time-out of {limit:g} s"
            else:
                continue
            run.fail(Ended(text, code="pserver_lost", pserver=lost.info.index), now)
        run.expire(now, self.lease_seconds)

    @property
    def serves_run(self) -> bool:
        """Whether pservers have to be brought to where the run stands."""
        return not self.run.is_over or self.is_saving_result

    @property
    def is_saving_result(self) -> bool:
        """Whether the pservers are still writing down what was trained; another run would end that."""
        run = self.run
        has_checkpoints = run.plan is not None and self._defaults.checkpoint_interval(run.plan) > 0
        return run.state == "finished" and has_checkpoints and self._recorded_run != run.name

    def finish_recording(self) -> None:
        """The summary of the deserted run has been taken, so its pservers may exit."""
        self._recorded_run = self.run.name

    @property
    def may_exit(self) -> bool:
        """With --exit-when-done: the run is over and every living pserver knows it."""
        return self.exit_when_done and self.run.is_deserted and self.registry.members.keys() <= self._stopped_pservers

    @property
    def exit_code(self) -> int:
        """0 unless the run failed."""
        return 1 if self.run.state == "failed" else 0


def _check_protocol(version: int) -> None:
    if version != PROTOCOL_VERSION:
        raise BadInput(
            "the other side speaks another version of the protocol",
            code="unsupported_protocol", expected=PROTOCOL_VERSION, actual=version,
        )  # fmt: skip
