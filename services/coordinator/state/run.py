"""A run as the coordinator sees it: its trainers, its model and its end. Pure, without a clock.

gathering ──all pservers registered, all trainers declared the same model──► training ──all left──► finished
    └────────────────── a trainer or pserver is lost for good ───────────────────┴────────────────► failed

An administrator may stop a run in both states, which ends as finished or failed with the failure RunStopped.

The loss policy decides how a run continues without a trainer: its rank is reserved for another incarnation (`wait`),
the other trainers go on (`continue`), or the run fails (`fail`). losses.py lists the states of trainers and the events.

A run is a value: a transition returns another run, and one that raises changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ps_protocol.errors import Conflict, Ended, GradpostError, RunStopped, StaleRun
from ps_protocol.membership import Controls
from ps_protocol.messages import RunState, TrainerHeartbeat
from ps_protocol.vocabulary import Incarnation, NonfinitePolicy, PserverIndex, Rank, Round

from ..settings import CoordinatorSettings
from .record import Decision, RunRecord, TrainerRecord

MAX_NAMED = 3  # trainers in one line


def name_ranks(ranks: Iterable[Rank]) -> str:
    """Return the trainers of these ranks in words.

    >>> name_ranks([0, 2])
    'trainer 0, trainer 2'
    """
    return ", ".join(f"trainer {rank}" for rank in ranks)


def _shorten(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more


@dataclass(frozen=True, slots=True)
class TrainerReport:
    """The newest heartbeat of a trainer, its declaration, and times by the monotonic clock."""

    heartbeat: TrainerHeartbeat
    seen_at: float
    joined_at: float
    gone_at: float = 0.0  # when it was lost or failed
    is_stuck: bool = False  # lost although it is alive, because it does not progress

    @classmethod
    def begin(cls, trainer: TrainerRecord, run: str, now: float, round_: Round, **fields: Any) -> TrainerReport:
        """Return the report of a trainer that has not sent a heartbeat; its lease begins now."""
        heartbeat = TrainerHeartbeat(run=run, incarnation=trainer.incarnation, round=round_)
        return cls(heartbeat, seen_at=now, joined_at=now, **fields)

    @property
    def round(self) -> Round:
        """The newest round that the trainer has completed."""
        return self.heartbeat.round


@dataclass(frozen=True, slots=True)
class LostRounds:
    """A trainer's report that a pserver, in this incarnation, has restored less than the trainer has received."""

    incarnation: Incarnation
    restored: Round
    rank: Rank
    received: Round


@dataclass(frozen=True, slots=True, repr=False)
class Run:
    """One run: its durable record, and what its members report to this process."""

    settings: CoordinatorSettings
    record: RunRecord
    incarnations: Mapping[Rank, Incarnation]  # the newest of each rank in all runs
    reports: Mapping[Rank, TrainerReport] = field(default_factory=dict)  # one for each trainer in the record
    wanted_controls: Controls | None = None  # request of an administrator that the next decision fulfils
    rollback_to: Round | None = None  # the same, for a rollback
    refusal: str = ""  # why the newest request for a rollback was refused
    reason: str = ""  # of the newest decision
    holders: Mapping[PserverIndex, Incarnation] = field(default_factory=dict)  # the pservers that hold the run
    lost_rounds: Mapping[PserverIndex, LostRounds] = field(default_factory=dict)  # reports of this attempt
    newest_applied: Round = 0  # the newest round that a pserver has reported in this attempt
    newest_received: Round = 0  # the newest round that a trainer has reported as received in this attempt
    saved_at: float | None = None  # when the summary and the last checkpoint were made, so that pservers may exit
    installed_number: int = 0  # of the newest change that every pserver has installed
    installed_members: Mapping[Rank, Incarnation] = field(default_factory=dict)
    unserved_at: float = -math.inf  # when a pserver last did not serve the run, by the monotonic clock
    started_at: float | None = None  # when training began, in this process
    first_round: Round | None = None  # after which training began in this process; earlier after a rollback
    ended_at: float | None = None

    @classmethod
    def begin(cls, name: str, settings: CoordinatorSettings, incarnations: Mapping[Rank, Incarnation]) -> Run:
        """Return a run without trainers."""
        return cls(settings, RunRecord(name=name), incarnations)

    def restore(self, record: RunRecord, now: float) -> Run:
        """Continue a recorded run. All leases begin now, and the last change is made again."""
        number = max(record.change_number, self.record.change_number)
        return replace(
            self,
            record=record.with_fields(change_number=number).with_change(),
            reports={
                rank: TrainerReport.begin(trainer, record.name, now, trainer.round, gone_at=now)
                for rank, trainer in record.trainers.items()
            },
            started_at=None if record.plan is None else now,
            ended_at=now if record.is_over else None,
        )

    def await_all(self, now: float) -> Run:
        """Wait for new processes of all trainers, even of those that were done, and even if the run was over."""
        record, size = self.record, self.settings.num_trainers
        trainers = {rank: t for rank, t in record.trainers.items() if rank < size}
        members = dict(record.membership.members)
        # A trainer that was done is a member again, so that the first trainer to return does not continue alone.
        # In asynchronous modes its start follows from the pservers' state instead.
        if not self.settings.consistency.is_async:
            members = {rank: trainer.incarnation for rank, trainer in trainers.items()} | members
        begun = {} if record.state == "gathering" else {"state": "training", "source": None}
        membership = replace(record.membership, members=members)
        record = record.with_change(failure=None, membership=membership, trainers=trainers, **begun)
        lost = {"state": "lost", "was_evicted": False, "round": 0, "is_awaited": True, "is_resumed": True}
        for rank in trainers:
            record = record.with_trainers([rank], why=f"trainer {rank} must be started again", **lost)
        reports = {rank: replace(self.reports[rank], gone_at=now) for rank in trainers}
        return replace(self, record=record, reports=reports, ended_at=None)

    def __repr__(self) -> str:
        waits = f" | waiting for: {', '.join(self.waiting_for)}" if self.waiting_for else ""
        record = self.record
        return f"<Run {record.name} [{record.state}, attempt {record.attempt}, change {record.change_number}{waits}]>"

    @property
    def is_result_saved(self) -> bool:
        """True if the summary and the last checkpoint are made."""
        return self.saved_at is not None

    @property
    def checkpoint_interval(self) -> Round:
        """The rounds between checkpoints; 0 without checkpoints, or without a plan."""
        return 0 if self.record.plan is None else self.settings.checkpoint_interval(self.record.plan)

    @property
    def nonfinite(self) -> NonfinitePolicy:
        """The policy for gradients with NaN or infinity: the policy of the trainers, or of the settings."""
        return (self.record.declaration and self.record.declaration.nonfinite) or self.settings.nonfinite

    @property
    def lowest_round(self) -> Round:
        """The newest round that every trainer has completed, including trainers that left."""
        return min((report.round for report in self.reports.values()), default=0)

    @property
    def highest_round(self) -> Round:
        """The newest round that a trainer has completed. With strategy ring, this round contains all gradients."""
        return max((report.round for report in self.reports.values()), default=0)

    @property
    def has_new_rounds(self) -> bool:
        """True if a round was completed in this process of the coordinator."""
        newest = max(self.newest_applied, self.highest_round)
        return self.first_round is not None and newest > self.first_round

    @property
    def newest_confirmed(self) -> Round:
        """The newest round that a trainer has received and a pserver has applied in this attempt."""
        return min(self.newest_received, self.newest_applied)

    @property
    def is_changing(self) -> bool:
        """True if a pserver may not have installed the newest decision, which may be a rollback."""
        return self.record.state == "training" and self.installed_number < self.record.change_number

    @property
    def missing_ranks(self) -> list[Rank]:
        """The ranks that have not declared their model."""
        trainers = self.record.trainers
        return [
            rank
            for rank in range(self.settings.num_trainers)
            if rank not in trainers or trainers[rank].state != "declared"
        ]

    @property
    def waiting_for(self) -> list[str]:
        """The trainers that the run waits for, in words."""
        record = self.record
        if record.state == "training":
            undeclared = [f"trainer {trainer.rank} to declare its model" for trainer in record.undeclared]
            return [f"trainer {trainer.rank}" for trainer in record.awaited] + undeclared
        if record.is_over:
            return []
        joined = dict.fromkeys(record.trainers, " to declare its model")
        return [f"trainer {rank}{joined.get(rank, '')}" for rank in self.missing_ranks]

    @property
    def newest_controls(self) -> Controls:
        """The controls that an administrator has set or requested last."""
        return self.wanted_controls or self.record.membership.newest_controls

    def with_change(self, **fields: Any) -> Run:
        """Return the run with a change that every pserver must receive."""
        return replace(self, record=self.record.with_change(**fields))

    def with_report(self, rank: Rank, **fields: Any) -> Run:
        """Return the run with other fields in the report of a trainer."""
        return replace(self, reports={**self.reports, rank: replace(self.reports[rank], **fields)})

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
        if trainer.state == "lost" and not self.may_return(trainer) and not self.record.is_over:
            raise Conflict(
                f"trainer {rank} was lost, and the run continues without it: {trainer.why}", code="stale_trainer"
            )
        return trainer

    def begin_training(self, now: float) -> Run:
        """Begin training: every pserver has installed the run."""
        if self.record.state != "gathering":
            return self
        # From now on the pservers restore from their own disks.
        return replace(
            self, started_at=now, record=self.record.with_fields(state="training", has_begun=True, source=None)
        )

    # ------------------------------------------------------------------ decisions

    def note_holders(self, pservers: Mapping[PserverIndex, Incarnation]) -> Run:
        """Note pservers that hold the run."""
        return replace(self, holders={**self.holders, **pservers})

    def apply_decision(self, decision: Decision) -> Run:
        """Put a persisted decision into effect. Requests that were made while it was written stay."""
        run = replace(self, record=self.record.adopt(decision), reason=decision.reason)
        if self.wanted_controls == decision.controls:
            run = replace(run, wanted_controls=None)
        if decision.attempt == self.record.attempt:
            return run
        first = None if self.first_round is None else min(self.first_round, decision.base_round or 0)
        return replace(run, newest_applied=0, newest_received=0, lost_rounds={}, rollback_to=None, first_round=first)

    def finish_change(self, number: int) -> Run:
        """Note that every pserver has installed a change, and that the disk says that the run has begun."""
        record, members = self.record, self.record.membership.members
        awaited = [t for t in record.trainers.values() if t.is_awaited and t.state == "declared"]
        returned = [t.rank for t in awaited if members.get(t.rank) == t.incarnation]
        record = record.with_trainers(returned, is_awaited=False) if returned else record
        first = max(self.newest_applied, record.base_round or 0) if self.first_round is None else self.first_round
        return replace(self, record=record, first_round=first, installed_number=number, installed_members=members)

    def request_controls(self, controls: Controls) -> Run:
        """Set controls with the next change."""
        return replace(self, wanted_controls=controls).with_change()

    def request_rollback(self, round_: Round) -> Run:
        """Roll back to a round with the next change."""
        return replace(self, rollback_to=round_, refusal="").with_change()

    def refuse_rollback(self, reason: str) -> Run:
        """Give up a rollback that an administrator requested."""
        return replace(self, rollback_to=None, refusal=reason)

    def note_lost_rounds(self, index: PserverIndex, report: LostRounds) -> Run:
        """Note a pserver that has lost rounds, once for each incarnation; all pservers must report their rounds."""
        known = self.lost_rounds.get(index)
        if known is not None and known.incarnation == report.incarnation:
            return self
        return replace(self, lost_rounds={**self.lost_rounds, index: report}).with_change()

    def note_applied(self, attempt: int, round_: Round) -> Run:
        """Note a round that a pserver has applied in this attempt."""
        return (
            replace(self, newest_applied=max(self.newest_applied, round_)) if attempt == self.record.attempt else self
        )

    # ------------------------------------------------------------------ checkpoints

    def add_checkpoint(self, attempt: int, round_: Round) -> Run:
        """Note a complete checkpoint, unless the run was rolled back since `attempt`, which may have undone it."""
        is_current = self.record.attempt == attempt
        rounds = (round_, *self.record.checkpoints)
        return replace(self, record=self.record.with_fields(checkpoints=rounds)) if is_current else self

    def drop_checkpoints(self, num_kept: int) -> Run:
        """Forget all but the newest checkpoints; the others are deleted."""
        return replace(self, record=self.record.with_fields(checkpoints=self.record.checkpoints[:num_kept]))

    # ------------------------------------------------------------------ losses and the end

    def may_return(self, trainer: TrainerRecord) -> bool:
        """Return whether a lost trainer may return, because the run has not gone on without it."""
        return trainer.is_awaited or not trainer.has_declared

    def continue_without_lost(self) -> Run:
        """Stop waiting for lost trainers under the policy `continue`, if enough are present."""
        record, settings = self.record, self.settings
        if record.plan is None or settings.loss_policy != "continue" or record.num_declared < settings.min_trainers:
            return self
        lost = [trainer.rank for trainer in record.awaited if not trainer.is_resumed]
        return replace(self, record=record.with_trainers(lost, is_awaited=False).with_change()) if lost else self

    def find_departed_after(self, round_: Round) -> list[Rank]:
        """Return the trainers that left after completing rounds which a rollback to `round_` discards.

        The list is empty in asynchronous modes, and under `continue`, where the remaining trainers make up a round.
        """
        if self.settings.consistency.is_async or self.settings.loss_policy == "continue":
            return []
        return sorted(t.rank for t in self.record.trainers.values() if t.state == "done" and t.round > round_)

    def describe_left_early(self, rounds: Round) -> str:
        """Return which trainers left before the last of `rounds`; an empty text if all hold the last parameters.

        It is empty in asynchronous modes, where no two trainers hold the same parameters.
        """
        early = [t for t in self.record.trainers.values() if t.state == "done" and t.round < rounds]
        if not early or self.settings.consistency.is_async:
            return ""
        named = _shorten([f"trainer {t.rank} (round {t.round})" for t in early])
        return (
            f"{named} left before round {rounds}, with older parameters than the others. Let all trainers take equally "
            "many steps, iterate over optimizer.epochs(…), which continues where the run is, and end without os._exit"
        )

    def find_rollback_obstacle(self, round_: Round) -> str:
        """Return why the run cannot be rolled back to a round; an empty text if it can."""
        departed = self.find_departed_after(round_)
        return f"the rounds after {round_} cannot be repeated, because {name_ranks(departed)} left" if departed else ""

    def fail_for_lost_rounds(self, since: Round, newest: Round, now: float) -> Run:
        """Fail the run, even if it finished, if trainers left that cannot repeat the lost rounds after `since`."""
        departed = self.find_departed_after(since)
        if not departed:
            return self
        record = self.record.with_fields(state="training") if self.record.state == "finished" else self.record
        text = f"rounds {since + 1} to {newest} are lost and cannot be repeated, because {name_ranks(departed)} left"
        failure = Ended(f"{text}; resume the run to train them again", code="pserver_lost")
        return replace(self, record=record).fail(failure, now)

    def fail(self, failure: GradpostError, now: float) -> Run:
        """Fail the run. The first failure is kept."""
        return self._end("failed", failure, now)

    def stop(self, now: float, *, is_failure: bool) -> Run:
        """End the run because an administrator wants it. `is_failure`: it counts as failed."""
        failure = RunStopped(f"an administrator stopped run {self.record.name}")
        return self._end("failed" if is_failure else "finished", failure, now)

    def _end(self, state: RunState, failure: GradpostError, now: float) -> Run:
        return self if self.record.is_over else replace(self.with_change(state=state, failure=failure), ended_at=now)
