"""A run as the coordinator sees it: its trainers, its model and its end. Pure, without a clock.

gathering ──all pservers registered, all trainers declared the same model──► training ──all left──► finished
    └────────────────── a trainer or pserver is lost for good ───────────────────┴────────────────► failed

The loss policy decides how a run continues without a trainer: its rank is reserved for another incarnation (`wait`),
the other trainers go on (`continue`), or the run fails (`fail`). Before training begins, the rank is free again.

"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
from ps_protocol.messages import DeclareModel, Leave, RunState, TrainerHeartbeat
from ps_protocol.plan import SlicePlan
from ps_protocol.vocabulary import Incarnation, NonfinitePolicy, PserverIndex, Rank, Round

from ..settings import CoordinatorSettings
from .model import check_same_model, plan_model
from .trainers import EVICTED, TrainerMember, end_last_call, name_ranks


@dataclass(frozen=True, slots=True)
class Decision:
    """The attempt of a run, the round that it began with (None: initial values of `uploader`), and its membership."""

    attempt: int
    resume: Round | None
    uploader: Rank
    membership: Membership


@dataclass(frozen=True, slots=True)
class LostRounds:
    """A trainer's report that a pserver, in this incarnation, has restored less than the trainer has received."""

    incarnation: Incarnation
    restored: Round
    rank: Rank
    received: Round


class Run:
    """The trainers and the state of one run. Every change that pservers must receive raises `number`."""

    def __init__(self, name: str, settings: CoordinatorSettings, incarnations: dict[Rank, Incarnation]) -> None:
        self.name = name
        self.settings = settings
        self.state: RunState = "gathering"
        self.trainers: dict[Rank, TrainerMember] = {}
        self.declaration: DeclareModel | None = None  # that the plan was made for
        self.plan: SlicePlan | None = None
        self.uploader: Rank = 0  # pushes the initial values: the lowest rank when the plan was made
        self.membership = Membership({})  # the newest decision
        self.attempt = 0  # raised by each rollback
        self.resume: Round | None = None  # the round that this attempt began with; None: initial values
        self.began: dict[int, Round | None] = {}  # the round that each attempt since the first began with
        self.pending: Decision | None = None  # takes effect once it is persisted
        self.rollback_to: Round | None = None  # the round of a rollback that an administrator requested
        self.rollback_refusal = ""  # why the newest request was refused
        self.rollback_reason = ""  # of the newest attempt
        self.lost_rounds: dict[PserverIndex, LostRounds] = {}  # reports of this attempt
        self.applied: Round = 0  # the newest round that a pserver has reported in this attempt
        self.pulled: Round = 0  # the newest round that a trainer reports to have received in this attempt
        self.has_begun = False  # every pserver has installed it once
        self.has_trained = False  # a trainer has completed a round, so that initial values cannot replace it
        self.source: str | None = None  # the run whose checkpoint this one began with
        self.complete_checkpoints: list[Round] = []  # newest first
        self.listed_attempt: int | None = None  # the attempt for which they were listed
        self.is_recorded = False  # its summary has been made, so that its pservers may exit
        self.failure: GradpostError | None = None
        self.wanted: Controls | None = None  # for the next change
        self.number = 0
        self.installed_number = 0  # the newest change that every pserver has installed
        self.num_trainers: int | None = settings.num_trainers if settings.max_trainers is None else None
        self.started_at: float | None = None  # by the monotonic clock, when training began
        self.ended_at: float | None = None
        self._complete_since: float | None = None  # since when all have joined and some have not declared
        self._incarnations = incarnations  # shared by all runs: incarnations of a rank only rise

    @property
    def checkpoint_interval(self) -> Round:
        """The rounds between checkpoints; 0 without checkpoints, or without a plan."""
        return 0 if self.plan is None else self.settings.checkpoint_interval(self.plan)

    @property
    def nonfinite(self) -> NonfinitePolicy:
        """The policy for gradients with NaN or infinity: the policy of the trainers, or of the settings."""
        return (self.declaration and self.declaration.nonfinite) or self.settings.nonfinite

    @property
    def sizes(self) -> tuple[int, int]:
        """The least and the largest number of trainers; equal once the number is fixed."""
        fewest = self.num_trainers or self.settings.num_trainers
        return fewest, self.num_trainers or self.settings.max_trainers or fewest

    @property
    def members(self) -> dict[Rank, Incarnation]:
        """The incarnations of the trainers that hold their rank."""
        return {t.rank: t.incarnation for t in self.trainers.values() if t.is_present}

    @property
    def awaited(self) -> list[TrainerMember]:
        """The lost trainers that the run waits for."""
        return [t for _, t in sorted(self.trainers.items()) if t.is_awaited and not t.is_present]

    @property
    def undeclared(self) -> list[TrainerMember]:
        """The trainers that took an awaited rank and have not declared their model."""
        here = [t for _, t in sorted(self.trainers.items()) if t.is_awaited and t.state == "joined"]
        return [] if self.plan is None else here

    @property
    def targets(self) -> dict[Rank, Incarnation]:
        """The incarnations to install: of declared trainers, and the last one of each awaited rank."""
        targets = {}
        for rank, trainer in sorted(self.trainers.items()):
            if trainer.state == "declared":
                targets[rank] = trainer.incarnation
            elif trainer.is_awaited and rank in self.membership.members:
                targets[rank] = self.membership.members[rank]
        return targets

    @property
    def round(self) -> Round:
        """The newest round that every trainer has completed, including trainers that left."""
        return min((trainer.round for trainer in self.trainers.values()), default=0)

    @property
    def newest_round(self) -> Round:
        """The newest round that a trainer has completed. With strategy ring, this round contains all gradients."""
        return max((trainer.round for trainer in self.trainers.values()), default=0)

    @property
    def received(self) -> Round:
        """The newest round that a trainer has received and a pserver has applied in this attempt."""
        return min(self.pulled, self.applied)

    @property
    def is_changing(self) -> bool:
        """True if a pserver may not have installed the newest decision, which may be a rollback."""
        return self.state == "training" and self.installed_number < self.number

    @property
    def knows_checkpoints(self) -> bool:
        """True if the checkpoints of this attempt have been listed; until then `complete_checkpoints` is unknown."""
        return self.listed_attempt == self.attempt

    @property
    def is_over(self) -> bool:
        """True if the run has finished or failed."""
        return self.state in ("finished", "failed")

    @property
    def is_deserted(self) -> bool:
        """True if the run is over and all trainers have left."""
        return self.is_over and not self.members

    @property
    def is_declared(self) -> bool:
        """True if all trainers have declared the same model."""
        declared = [t for t in self.trainers.values() if t.state == "declared"]
        return len(declared) == self.num_trainers

    @property
    def missing_ranks(self) -> list[Rank]:
        """The ranks that have not declared their model."""
        return [
            rank
            for rank in range(self.num_trainers or self.settings.num_trainers)
            if rank not in self.trainers or self.trainers[rank].state != "declared"
        ]

    @property
    def decision(self) -> Decision:
        """The decision to persist: the newest one, which may not be in effect yet."""
        return self.pending or Decision(self.attempt, self.resume, self.uploader, self.membership)

    def apply_decision(self, decision: Decision) -> None:
        """Put a persisted decision into effect."""
        if decision.attempt != self.attempt:
            self.source = self.rollback_to = None
            self.applied = self.pulled = 0
            self.lost_rounds = {}
            self.began[decision.attempt] = decision.resume
        self.attempt, self.resume = decision.attempt, decision.resume
        self.uploader, self.membership = decision.uploader, decision.membership

    # ------------------------------------------------------------------ joining

    def next_incarnation(self, rank: Rank) -> Incarnation:
        """Return the incarnation of the next process of a rank."""
        self._incarnations[rank] = self._incarnations.get(rank, 0) + 1
        return self._incarnations[rank]

    def member(self, rank: Rank, run: str, incarnation: Incarnation) -> TrainerMember:
        """Return the sender of a message. Raises StaleRun or Conflict (`stale_trainer`)."""
        if run != self.name:
            raise StaleRun("the message is for another run", expected=self.name, actual=run)
        trainer = self.trainers.get(rank)
        if trainer is None or trainer.incarnation != incarnation:
            raise Conflict(
                f"trainer {rank} incarnation {incarnation} is not a member: it left, or a later incarnation joined",
                code="stale_trainer", current=trainer.incarnation if trainer else None,
            )  # fmt: skip
        if trainer.state == "lost" and not self._may_return(trainer) and not self.is_over:
            raise Conflict(
                f"trainer {rank} was lost, and the run continues without it: {trainer.why}", code="stale_trainer"
            )
        return trainer

    def declare(self, rank: Rank, message: DeclareModel) -> None:
        """Store a trainer's declaration. Raises BadInput, or ModelMismatch with the first difference."""
        trainer = self.member(rank, message.run, message.incarnation)
        plan_model(message, self.settings, num_pservers=1)  # raises if it cannot be planned
        if self.declaration is not None:
            check_same_model(rank, message, f"run {self.name}", self.declaration)
        for other in self.trainers.values():
            if other.declaration is not None and other.rank != rank and other.is_present:
                check_same_model(rank, message, f"trainer {other.rank}", other.declaration)
        if trainer.declaration is not None and self.plan is not None and message != trainer.declaration:
            raise ModelMismatch(f"trainer {rank} must declare the model that run {self.name} was planned for")
        trainer.declaration = message
        if trainer.state in ("joined", "lost"):  # a lost one is awaited, and late
            trainer.revive()
            self.number += 1
            self._go_on_without_the_lost()

    def start(self, num_pservers: int) -> SlicePlan:
        """Make the plan of a complete run. Training begins once every pserver has installed it."""
        self.uploader = min(self.members)
        self.declaration = self.trainers[self.uploader].declaration
        assert self.declaration is not None
        self.plan = plan_model(self.declaration, self.settings, num_pservers)
        self.membership = Membership(self.members)
        return self.plan

    def begin_training(self, now: float) -> None:
        """Begin training: every pserver has installed the run."""
        if self.state == "gathering":
            self.state, self.started_at, self.has_begun = "training", now, True
            self.source = None  # from now on the pservers restore from their own disks

    # ------------------------------------------------------------------ heartbeats, losses

    def heartbeat(self, rank: Rank, message: TrainerHeartbeat, now: float) -> None:
        """Renew a trainer's lease and store its progress and results. A trainer that was lost too soon returns."""
        trainer = self.member(rank, message.run, message.incarnation)
        trainer.seen_at = now
        trainer.round = message.round
        first = self.membership.starts.get(rank, (self.resume or 0) + 1)
        if message.attempt == self.attempt and message.round >= first:  # an earlier round is only its starting point
            self.pulled = max(self.pulled, message.round)
            self.has_trained = True
        trainer.results = dict(message.results)
        trainer.software, trainer.links = message.software, message.links
        trainer.waiting_seconds, trainer.is_done = message.waiting_seconds, message.is_done
        trainer.unreachable = {index: seconds for index, (_, seconds) in message.unreachable.items()}
        if trainer.state == "lost" and self._may_return(trainer) and not trainer.is_stuck:
            self._revive(trainer)

    def _may_return(self, trainer: TrainerMember) -> bool:
        """Return whether a lost trainer may return, because the run has not gone on without it."""
        return trainer.is_awaited or trainer.declaration is None or self.plan is None

    def _revive(self, trainer: TrainerMember) -> None:
        trainer.revive()
        if self.membership.members.get(trainer.rank) != trainer.incarnation:
            self.number += 1  # the pservers have not installed this incarnation
        self._go_on_without_the_lost()

    def _go_on_without_the_lost(self) -> None:
        """Stop waiting for lost trainers under the policy `continue`, if enough are present."""
        here = sum(trainer.state == "declared" for trainer in self.trainers.values())
        if self.plan is None or self.settings.loss_policy != "continue" or here < self.settings.min_trainers:
            return
        for trainer in self.awaited:
            if not trainer.is_resumed:
                trainer.is_awaited = False
                self.number += 1

    def lose(self, trainer: TrainerMember, failure: GradpostError, now: float) -> None:
        """Apply the loss policy to a trainer that is gone, or counts as gone."""
        self.number += 1
        state: Literal["failed", "lost"] = "failed" if trainer.state == "failed" else "lost"
        if self.plan is None:
            trainer.lose(state, failure.detail, now, is_awaited=False)  # so the rank is free again
            return
        policy = self.settings.loss_policy
        enough = len(self.members) - trainer.is_present >= self.settings.min_trainers
        is_newcomer = trainer.is_awaited and trainer.declaration is None  # another process may take its rank
        is_awaited = is_newcomer or policy == "wait" or (policy == "continue" and not enough)
        trainer.lose(state, failure.detail, now, is_awaited=is_awaited and not self.is_over)
        if policy == "fail" and not is_newcomer:
            self.fail(failure, now)
        self._end_if_deserted(now)

    def leave(self, rank: Rank, message: Leave, now: float) -> None:
        """Remove a trainer that is done, or apply the loss policy to one that failed.

        `failed` after `done` is sent by the launcher of the process, which has seen its exit code.
        """
        trainer = self.member(rank, message.run, message.incarnation)
        returns_for_the_end = trainer.is_awaited and message.outcome == "done"  # it was lost after its last round
        has_failed_after_all = trainer.state == "done" and message.outcome == "failed" and not self.is_over
        if not (trainer.is_present or returns_for_the_end or has_failed_after_all):
            return
        trainer.round = message.round
        if message.outcome == "failed":
            reason = message.reason or "no reason was given"
            trainer.state = "failed"
            self.lose(trainer, TrainerLost(f"trainer {rank} failed: {reason}", ranks=[rank]), now)
            return
        trainer.state, trainer.is_awaited = "done", False
        self.number += 1
        if (
            message.attempt is not None
            and message.attempt < self.attempt
            and self.find_departed_after(self.resume or 0)
        ):
            self.fail_for_lost_rounds([rank], self.resume or 0, message.round, now)
        if self.state == "gathering" and self.plan is None:
            del self.trainers[rank]
        self._end_if_deserted(now)

    def _end_if_deserted(self, now: float) -> None:
        if self.plan is not None and not self.members and not self.awaited and not self.is_over:
            self.state, self.ended_at = "finished", now
            self.number += 1

    def expire(self, now: float, lease_seconds: float) -> None:
        """Mark trainers with an expired lease as lost, and fail the run for those that did not return in time."""
        for trainer in list(self.trainers.values()):
            age = now - trainer.seen_at
            if trainer.is_present and age > lease_seconds:
                text = f"trainer {trainer.rank} was lost: no heartbeat for {age:.1f} s (lease {lease_seconds:g} s)"
                self.lose(trainer, TrainerLost(text, ranks=[trainer.rank]), now)
        end_last_call(self, now)
        limit = self.settings.rejoin_timeout_seconds
        for trainer in self.awaited:
            if now - trainer.gone_at <= limit:
                continue
            trainer.is_resumed = False
            self._go_on_without_the_lost()
            if trainer.is_awaited:
                text = f"{trainer.why}; it did not come back within the rejoin time-out of {limit:g} s"
                self.fail(TrainerLost(text, ranks=[trainer.rank]), now)
        self._expire_declarations(now)

    def evict(self, rank: Rank, now: float) -> None:
        """Continue without a trainer. Another incarnation may join. Raises NotFound, Conflict (`cannot_evict`)."""
        trainer = self.trainers.get(rank)
        if trainer is None or not (trainer.is_present or trainer.is_awaited):
            raise NotFound(f"trainer {rank} is not a member of run {self.name}", members=sorted(self.members))
        others = len(self.members) - trainer.is_present
        needed = self.settings.min_trainers if self.settings.loss_policy == "continue" else 1
        if others < needed:
            raise Conflict(
                f"run {self.name} would have too few trainers without trainer {rank}",
                code="cannot_evict", expected=f">= {needed}", actual=others,
            )  # fmt: skip
        trainer.lose("lost", f"trainer {rank} {EVICTED}", now, is_awaited=False)
        self.number += 1

    def mark_stuck(self, ranks: list[Rank], failure: GradpostError, now: float) -> None:
        """Mark trainers as lost that others waited for until the round time-out, although they are alive.

        An incarnation that the pservers have not installed is skipped, since its predecessor is the missing one.
        """
        for rank in ranks:
            if rank in self.members and self.members[rank] == self.membership.members.get(rank):
                self._give_up(self.trainers[rank], failure, now)

    def _give_up(self, trainer: TrainerMember, failure: GradpostError, now: float) -> None:
        if not self.is_over:
            trainer.is_stuck = True
            self.lose(trainer, failure, now)

    def revive_stuck(self, missing: set[Rank]) -> None:
        """Restore stuck trainers that are no longer missing, unless their ranks were taken."""
        for trainer in self.awaited:
            if trainer.is_stuck and trainer.declaration is not None and trainer.rank not in missing:
                self._revive(trainer)

    def _expire_declarations(self, now: float) -> None:
        """Give up trainers that joined but did not declare a model within the round time-out."""
        limit = self.settings.round_timeout_seconds
        owed = f"joined, but did not declare a model within the round time-out of {limit:g} s"
        if self.plan is not None:
            for trainer in self.undeclared:
                if now - trainer.joined_at > limit:
                    self._give_up(trainer, TrainerLost(f"trainer {trainer.rank} {owed}", ranks=[trainer.rank]), now)
            return
        declared = any(trainer.state == "declared" for trainer in self.trainers.values())
        all_joined = len(self.members) == self.num_trainers
        if self.is_over or not (declared and all_joined and self.missing_ranks):
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
        return sorted(t.rank for t in self.trainers.values() if t.state == "done" and t.round > round_)

    def find_rollback_obstacle(self, round_: Round) -> str:
        """Return why the run cannot be rolled back to a round; an empty text if it can."""
        gone = self.find_departed_after(round_)
        return f"the rounds after {round_} cannot be repeated, because {name_ranks(gone)} left" if gone else ""

    def fail_for_lost_rounds(self, done: list[Rank], since: Round, newest: Round, now: float) -> None:
        """Fail the run, even if it finished: rounds are lost that the trainers in `done` cannot repeat."""
        if self.state == "finished":
            self.state = "training"
        text = f"rounds {since + 1} to {newest} are lost and cannot be repeated, because {name_ranks(done)} left"
        self.fail(Ended(f"{text}; resume the run to train them again", code="pserver_lost"), now)

    def refuse_rollback(self, reason: str) -> None:
        """Give up a rollback that an administrator requested."""
        self.rollback_to, self.rollback_refusal = None, reason

    def fail(self, failure: GradpostError, now: float) -> None:
        """Fail the run. The first failure is kept."""
        if not self.is_over:
            self.state, self.failure, self.ended_at = "failed", failure, now
            self.number += 1
