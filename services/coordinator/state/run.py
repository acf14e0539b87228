"""A run as the coordinator sees it: its trainers, its model and its end. Pure, without a clock.

gathering ──all pservers registered, all trainers declared the same model──► training ──all left──► finished
    └────────────────── a trainer or pserver is lost for good ───────────────────┴────────────────► failed

The loss policy decides how a run continues without a trainer: its rank is reserved for another incarnation (`wait`),
the other trainers go on (`continue`), or the run fails (`fail`). Before training begins, the rank is free again.

"""

from __future__ import annotations

from dataclasses import dataclass

from ps_protocol.errors import (
    Conflict,
    Ended,
    GradpostError,
    ModelMismatch,
    NotFound,
    RoundTimeout,
    StaleRun,
    TrainerLost,
)
from ps_protocol.membership import Controls, Membership
from ps_protocol.messages import DeclareModel, Leave, TrainerHeartbeat
from ps_protocol.plan import SlicePlan
from ps_protocol.vocabulary import Incarnation, NonfinitePolicy, PserverIndex, Rank, Round

from ..settings import CoordinatorSettings
from .model import check_same_model, plan_model
from .record import EVICTED, Decision, RunRecord, TrainerRecord, TrainerState
from .trainers import TrainerReport, end_last_call, name_ranks


@dataclass(frozen=True, slots=True)
class LostRounds:
    """A trainer's report that a pserver, in this incarnation, has restored less than the trainer has received."""

    incarnation: Incarnation
    restored: Round
    rank: Rank
    received: Round


class Run:
    """One run: its durable record, which every transition replaces, and what its members report to this process."""

    def __init__(self, name: str, settings: CoordinatorSettings, incarnations: dict[Rank, Incarnation]) -> None:
        self.settings = settings
        num_trainers = settings.num_trainers if settings.max_trainers is None else None
        self.record = RunRecord(name=name, num_trainers=num_trainers, has_begun=False, has_trained=False)
        self.pending: Decision | None = None  # takes effect once it is persisted
        self.reports: dict[Rank, TrainerReport] = {}  # of all trainers in the record
        self.rollback_to: Round | None = None  # the round of a rollback that an administrator requested
        self.rollback_refusal = ""  # why the newest request was refused
        self.reason = ""  # of the newest decision
        self.lost_rounds: dict[PserverIndex, LostRounds] = {}  # reports of this attempt
        self.applied: Round = 0  # the newest round that a pserver has reported in this attempt
        self.pulled: Round = 0  # the newest round that a trainer reports to have received in this attempt
        self.complete_checkpoints: list[Round] = []  # newest first
        self.listed_attempt: int | None = None  # the attempt for which they were listed
        self.is_recorded = False  # its summary has been made, so that its pservers may exit
        self.wanted: Controls | None = None  # for the next change
        self.installed_number = 0  # the newest change that every pserver has installed
        self.started_at: float | None = None  # by the monotonic clock, when training began
        self.ended_at: float | None = None
        self._complete_since: float | None = None  # since when all have joined and some have not declared
        self._incarnations = incarnations  # shared by all runs: incarnations of a rank only rise

    def restore(self, record: RunRecord, now: float) -> None:
        """Continue a recorded run. All leases begin now, and the last change is made again."""
        num_trainers = self.record.num_trainers
        if record.num_trainers is not None:  # with other settings it is as near as they allow
            fewest, most = self.sizes
            num_trainers = min(max(record.num_trainers, fewest), most)
        number = max(record.number, self.record.number)
        self.record = record.update(num_trainers=num_trainers, number=number).change()
        self.reports = {}
        for rank, trainer in record.trainers.items():
            self.reports[rank] = TrainerReport.begin(trainer, record.name, now, trainer.round)
            self.reports[rank].gone_at = now
        self.started_at = None if record.plan is None else now
        self.ended_at = now if record.is_over else None

    @property
    def durable(self) -> RunRecord:
        """The record to persist: with the newest decision, which may not be in effect yet."""
        return self.record if self.pending is None else self.record.adopt(self.pending)

    @property
    def checkpoint_interval(self) -> Round:
        """The rounds between checkpoints; 0 without checkpoints, or without a plan."""
        return 0 if self.record.plan is None else self.settings.checkpoint_interval(self.record.plan)

    @property
    def nonfinite(self) -> NonfinitePolicy:
        """The policy for gradients with NaN or infinity: the policy of the trainers, or of the settings."""
        return (self.record.declaration and self.record.declaration.nonfinite) or self.settings.nonfinite

    @property
    def sizes(self) -> tuple[int, int]:
        """The least and the largest number of trainers; equal once the number is fixed."""
        fewest = self.record.num_trainers or self.settings.num_trainers
        return fewest, self.record.num_trainers or self.settings.max_trainers or fewest

    @property
    def round(self) -> Round:
        """The newest round that every trainer has completed, including trainers that left."""
        return min((report.round for report in self.reports.values()), default=0)

    @property
    def newest_round(self) -> Round:
        """The newest round that a trainer has completed. With strategy ring, this round contains all gradients."""
        return max((report.round for report in self.reports.values()), default=0)

    @property
    def received(self) -> Round:
        """The newest round that a trainer has received and a pserver has applied in this attempt."""
        return min(self.pulled, self.applied)

    @property
    def is_changing(self) -> bool:
        """True if a pserver may not have installed the newest decision, which may be a rollback."""
        return self.record.state == "training" and self.installed_number < self.record.number

    @property
    def knows_checkpoints(self) -> bool:
        """True if the checkpoints of this attempt have been listed; until then `complete_checkpoints` is unknown."""
        return self.listed_attempt == self.record.attempt

    @property
    def missing_ranks(self) -> list[Rank]:
        """The ranks that have not declared their model."""
        trainers = self.record.trainers
        return [rank for rank in range(self.sizes[0]) if rank not in trainers or trainers[rank].state != "declared"]

    def apply_decision(self, decision: Decision) -> None:
        """Put a persisted decision into effect."""
        if decision.attempt != self.record.attempt:
            self.rollback_to = None
            self.applied = self.pulled = 0
            self.lost_rounds = {}
        self.record, self.reason = self.record.adopt(decision), decision.reason

    # ------------------------------------------------------------------ joining

    def next_incarnation(self, rank: Rank) -> Incarnation:
        """Return the incarnation of the next process of a rank."""
        self._incarnations[rank] = self._incarnations.get(rank, 0) + 1
        return self._incarnations[rank]

    def member(self, rank: Rank, run: str, incarnation: Incarnation) -> TrainerRecord:
        """Return the sender of a message. Raises StaleRun or Conflict (`stale_trainer`)."""
        if run != self.record.name:
            raise StaleRun("the message is for another run", expected=self.record.name, actual=run)
        trainer = self.record.trainers.get(rank)
        if trainer is None or trainer.incarnation != incarnation:
            raise Conflict(
                f"trainer {rank} incarnation {incarnation} is not a member: it left, or a later incarnation joined",
                code="stale_trainer", current=trainer.incarnation if trainer else None,
            )  # fmt: skip
        if trainer.state == "lost" and not self._may_return(trainer) and not self.record.is_over:
            raise Conflict(
                f"trainer {rank} was lost, and the run continues without it: {trainer.why}", code="stale_trainer"
            )
        return trainer

    def declare(self, rank: Rank, message: DeclareModel) -> None:
        """Store a trainer's declaration. Raises BadInput, or ModelMismatch with the first difference."""
        trainer, record = self.member(rank, message.run, message.incarnation), self.record
        plan_model(message, self.settings, num_pservers=1)  # raises if it cannot be planned
        others = [t.rank for t in record.trainers.values() if t.declared and t.is_present and t.rank != rank]
        known = record.declaration
        if known is not None and (record.plan is not None or others):
            whose = f"trainer {others[0]}" if record.plan is None else f"run {record.name}"
            check_same_model(rank, message, whose, known)
        if record.plan is None and rank <= min(others, default=rank):
            known = message
        elif trainer.declared and known is not None and rank == 0 and message.rendezvous != known.rendezvous:
            raise ModelMismatch(f"trainer {rank} must declare the model that run {record.name} was planned for")
        self.record = record.update(declaration=known).with_trainers([rank], declared=True)
        if trainer.state in ("joined", "lost"):  # a lost one is awaited, and late
            self.reports[rank].is_stuck = False
            self.record = self.record.with_trainers([rank], state="declared").change()
            self._go_on_without_the_lost()

    def start(self, num_pservers: int) -> SlicePlan:
        """Make the plan of a complete run. Training begins once every pserver has installed it."""
        members, declaration = self.record.members, self.record.declaration
        assert declaration is not None
        plan = plan_model(declaration, self.settings, num_pservers)
        self.reason = "all members are present"
        self.record = self.record.update(plan=plan, uploader=min(members), membership=Membership(members))
        return plan

    def begin_training(self, now: float) -> None:
        """Begin training: every pserver has installed the run."""
        if self.record.state == "gathering":
            self.started_at = now
            # From now on the pservers restore from their own disks.
            self.record = self.record.update(state="training", has_begun=True, source=None)

    # ------------------------------------------------------------------ heartbeats, losses

    def heartbeat(self, rank: Rank, message: TrainerHeartbeat, now: float) -> None:
        """Renew a trainer's lease and store its progress and results. A trainer that was lost too soon returns."""
        trainer, report = self.member(rank, message.run, message.incarnation), self.reports[rank]
        report.seen_at, report.heartbeat = now, message
        first = self.record.membership.starts.get(rank, (self.record.resume or 0) + 1)
        # An earlier round is only its starting point.
        if message.attempt == self.record.attempt and message.round >= first:
            self.pulled = max(self.pulled, message.round)
            if not self.record.has_trained:
                self.record = self.record.update(has_trained=True)
        if trainer.state == "lost" and self._may_return(trainer) and not report.is_stuck:
            self._revive(rank)

    def _may_return(self, trainer: TrainerRecord) -> bool:
        """Return whether a lost trainer may return, because the run has not gone on without it."""
        return trainer.is_awaited or not trainer.declared or self.record.plan is None

    def _revive(self, rank: Rank) -> None:
        """Undo the loss of a trainer. It stays awaited until the pservers have installed it."""
        self.reports[rank].is_stuck = False
        trainer = self.record.trainers[rank]
        self.record = self.record.with_trainers([rank], state="declared" if trainer.declared else "joined")
        if self.record.membership.members.get(rank) != trainer.incarnation:
            self.record = self.record.change()  # the pservers have not installed this incarnation
        self._go_on_without_the_lost()

    def _go_on_without_the_lost(self) -> None:
        """Stop waiting for lost trainers under the policy `continue`, if enough are present."""
        record, settings = self.record, self.settings
        if record.plan is None or settings.loss_policy != "continue" or record.num_declared < settings.min_trainers:
            return
        if gone := [trainer.rank for trainer in record.awaited if not trainer.is_resumed]:
            self.record = record.with_trainers(gone, is_awaited=False).change()

    def lose(self, rank: Rank, failure: GradpostError, now: float, state: TrainerState = "lost") -> None:
        """Apply the loss policy to a trainer that is gone, or counts as gone."""
        record, trainer, policy = self.record, self.record.trainers[rank], self.settings.loss_policy
        enough = len(record.members) - trainer.is_present >= self.settings.min_trainers
        is_newcomer = trainer.is_awaited and not trainer.declared  # another process may take its rank
        # Without a plan the rank is free again.
        is_awaited = (
            record.plan is not None
            and not record.is_over
            and (is_newcomer or policy == "wait" or (policy == "continue" and not enough))
        )
        self._mark_gone(rank, state, failure.detail, now, is_awaited=is_awaited)
        if record.plan is not None and policy == "fail" and not is_newcomer:
            self.fail(failure, now)
        self._end_if_deserted(now)

    def _mark_gone(self, rank: Rank, state: TrainerState, why: str, now: float, *, is_awaited: bool) -> None:
        self.reports[rank].gone_at = now
        gone = self.record.with_trainers([rank], state=state, why=why, is_awaited=is_awaited, round=0)
        self.record = gone.change()

    def leave(self, rank: Rank, message: Leave, now: float) -> None:
        """Remove a trainer that is done, or apply the loss policy to one that failed.

        `failed` after `done` is sent by the launcher of the process, which has seen its exit code.
        """
        trainer = self.member(rank, message.run, message.incarnation)
        returns_for_the_end = trainer.is_awaited and message.outcome == "done"  # it was lost after its last round
        has_failed_after_all = trainer.state == "done" and message.outcome == "failed" and not self.record.is_over
        if not (trainer.is_present or returns_for_the_end or has_failed_after_all):
            return
        report = self.reports[rank]
        report.heartbeat = report.heartbeat.model_copy(update={"round": message.round})
        if message.outcome == "failed":
            reason = message.reason or "no reason was given"
            self.lose(rank, TrainerLost(f"trainer {rank} failed: {reason}", ranks=[rank]), now, "failed")
            return
        done = self.record.with_trainers([rank], state="done", is_awaited=False, round=message.round)
        self.record = done.change()
        back = self.record.resume or 0
        is_behind = message.attempt is not None and message.attempt < self.record.attempt
        if is_behind and self.find_departed_after(back):
            self.fail_for_lost_rounds([rank], back, message.round, now)
        if self.record.state == "gathering" and self.record.plan is None:
            del self.reports[rank]
            others = {other: t for other, t in self.record.trainers.items() if other != rank}
            self.record = self.record.update(trainers=others)
        self._end_if_deserted(now)

    def _end_if_deserted(self, now: float) -> None:
        record = self.record
        if record.plan is not None and not record.members and not record.awaited and not record.is_over:
            self.record, self.ended_at = record.change(state="finished"), now

    def expire(self, now: float, lease_seconds: float) -> None:
        """Mark trainers with an expired lease as lost, and fail the run for those that did not return in time."""
        for rank in self.record.members:
            age = now - self.reports[rank].seen_at
            if age > lease_seconds:
                text = f"trainer {rank} was lost: no heartbeat for {age:.1f} s (lease {lease_seconds:g} s)"
                self.lose(rank, TrainerLost(text, ranks=[rank]), now)
        end_last_call(self, now)
        limit = self.settings.rejoin_timeout_seconds
        for trainer in self.record.awaited:
            if now - self.reports[trainer.rank].gone_at <= limit:
                continue
            self.record = self.record.with_trainers([trainer.rank], is_resumed=False)
            self._go_on_without_the_lost()
            if self.record.trainers[trainer.rank].is_awaited:
                text = f"{trainer.why}; it did not come back within the rejoin time-out of {limit:g} s"
                self.fail(TrainerLost(text, ranks=[trainer.rank]), now)
        self._expire_declarations(now)

    def evict(self, rank: Rank, now: float) -> None:
        """Continue without a trainer. Another incarnation may join. Raises NotFound, Conflict (`cannot_evict`)."""
        record, trainer = self.record, self.record.trainers.get(rank)
        if trainer is None or not (trainer.is_present or trainer.is_awaited):
            raise NotFound(f"trainer {rank} is not a member of run {record.name}", members=sorted(record.members))
        others = len(record.members) - trainer.is_present
        needed = self.settings.min_trainers if self.settings.loss_policy == "continue" else 1
        if others < needed:
            raise Conflict(
                f"run {record.name} would have too few trainers without trainer {rank}",
                code="cannot_evict", expected=f">= {needed}", actual=others,
            )  # fmt: skip
        self._mark_gone(rank, "lost", f"trainer {rank} {EVICTED}", now, is_awaited=False)

    def mark_stuck(self, ranks: list[Rank], failure: GradpostError, now: float) -> None:
        """Mark trainers as lost that others waited for until the round time-out, although they are alive.

        An incarnation that the pservers have not installed is skipped, since its predecessor is the missing one.
        """
        for rank in ranks:
            members = self.record.members
            if rank in members and members[rank] == self.record.membership.members.get(rank):
                self._give_up(rank, failure, now)

    def _give_up(self, rank: Rank, failure: GradpostError, now: float) -> None:
        if not self.record.is_over:
            self.reports[rank].is_stuck = True
            self.lose(rank, failure, now)

    def revive_stuck(self, missing: set[Rank]) -> None:
        """Restore stuck trainers that are no longer missing, unless their ranks were taken."""
        for trainer in self.record.awaited:
            if self.reports[trainer.rank].is_stuck and trainer.declared and trainer.rank not in missing:
                self._revive(trainer.rank)

    def _expire_declarations(self, now: float) -> None:
        """Give up trainers that joined but did not declare a model within the round time-out."""
        limit, record = self.settings.round_timeout_seconds, self.record
        owed = f"joined, but did not declare a model within the round time-out of {limit:g} s"
        if record.plan is not None:
            for trainer in record.undeclared:
                if now - self.reports[trainer.rank].joined_at > limit:
                    failure = TrainerLost(f"trainer {trainer.rank} {owed}", ranks=[trainer.rank])
                    self._give_up(trainer.rank, failure, now)
            return
        all_joined = len(record.members) == record.num_trainers
        if record.is_over or not (record.num_declared and all_joined and self.missing_ranks):
            self._complete_since = None
        elif self._complete_since is None:
            self._complete_since = now
        elif now - self._complete_since > limit:
            names = name_ranks(self.missing_ranks)
            self.fail(RoundTimeout(f"{names} {owed}", missing=self.missing_ranks), now)

    def find_departed_after(self, round_: Round) -> list[Rank]:
        """Return the trainers that left after completing rounds which a rollback to `round_` discards.

        The list is empty in asynchronous modes, and under `continue`, where the remaining trainers make up a round.
        """
        if self.settings.consistency.is_async or self.settings.loss_policy == "continue":
            return []
        return sorted(t.rank for t in self.record.trainers.values() if t.state == "done" and t.round > round_)

    def find_rollback_obstacle(self, round_: Round) -> str:
        """Return why the run cannot be rolled back to a round; an empty text if it can."""
        gone = self.find_departed_after(round_)
        return f"the rounds after {round_} cannot be repeated, because {name_ranks(gone)} left" if gone else ""

    def fail_for_lost_rounds(self, done: list[Rank], since: Round, newest: Round, now: float) -> None:
        """Fail the run, even if it finished: rounds are lost that the trainers in `done` cannot repeat."""
        if self.record.state == "finished":
            self.record = self.record.update(state="training")
        text = f"rounds {since + 1} to {newest} are lost and cannot be repeated, because {name_ranks(done)} left"
        self.fail(Ended(f"{text}; resume the run to train them again", code="pserver_lost"), now)

    @property
    def newest_controls(self) -> Controls:
        """The controls that an administrator has set or requested last; a decision may be on its way to the disk."""
        return self.wanted or self.durable.membership.newest_controls

    def request_controls(self, controls: Controls) -> None:
        """Set controls with the next change."""
        self.wanted = controls
        self.record = self.record.change()

    def request_rollback(self, round_: Round) -> None:
        """Roll back to a round with the next change."""
        self.rollback_to, self.rollback_refusal = round_, ""
        self.record = self.record.change()

    def refuse_rollback(self, reason: str) -> None:
        """Give up a rollback that an administrator requested."""
        self.rollback_to, self.rollback_refusal = None, reason

    def fail(self, failure: GradpostError, now: float) -> None:
        """Fail the run. The first failure is kept."""
        if not self.record.is_over:
            self.record, self.ended_at = self.record.change(state="failed", failure=failure), now
