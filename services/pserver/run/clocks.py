"""The trainers' steps and pulls at one pserver, in the asynchronous modes, as a pure state machine.

    pushes of step t ──complete──► committed: queued for every block ──every block applied──► clock t
                                                                                                 │
    get after step t ◄── wait_for_apply: the own clock is t; ssp: all clocks are t - s at least ◄┘

A trainer's steps come strictly one after another, so a step is known by its number alone: a step older than the open
one has been committed. Nothing here waits, knows a time or touches a tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic

from torch import Tensor

from ps_protocol.consistency import Consistency, needed_clock, oldest_start
from ps_protocol.errors import Conflict, ContributionMissing, FutureRound, StaleRound
from ps_protocol.membership import FrozenRounds, Membership
from ps_protocol.vocabulary import Incarnation, Rank, Round

from ..shard.shard_state import History
from .staging import Admission, Payload, Push, Staged, StagedContribution, admit, check_member


@dataclass(slots=True)
class TrainerSteps(Generic[Payload]):
    """The progress of one trainer on this pserver."""

    incarnation: Incarnation
    open_step: Round = 1  # the step that the trainer pushes next
    clock: Round = 0  # every block of every step up to this one is applied
    may_be_ahead: bool = False  # of this pserver, which was restarted and has not committed a step of it since
    staged: StagedContribution[Payload] = field(default_factory=StagedContribution)  # the contribution of the open step
    unapplied: dict[Round, int] = field(default_factory=dict)  # the number of unapplied blocks of each committed step


@dataclass(frozen=True, slots=True)
class Committed(Generic[Payload]):
    """A whole contribution in the queues of its blocks."""

    rank: Rank
    step: Round
    contribution: StagedContribution[Payload]
    steps: TrainerSteps[Payload]  # the steps of the incarnation that pushed it
    number: int  # the number of committed contributions on this pserver, including this one


class Clocks(Generic[Payload]):
    """The staged contributions and clocks of one pserver. `applied` counts completely applied contributions.

    A restored pserver begins with the `applied` contributions of its checkpoint, and the incarnation and newest step of
    each rank in them. The first step that it commits for a trainer may be a later one: the steps before it are lost.
    """

    def __init__(
        self,
        members: Mapping[Rank, Incarnation],
        consistency: Consistency,
        *,
        applied: int = 0,
        steps: Mapping[Rank, tuple[Incarnation, Round]] | None = None,
    ) -> None:
        self.members = dict(members)
        self.applied = applied
        self.num_committed = applied  # contributions that are applied or queued
        self.is_paused = False  # True if an administrator has paused the run
        self._rules = consistency
        self._is_restored = steps is not None
        self._steps: dict[Rank, TrainerSteps[Payload]] = {
            rank: TrainerSteps(incarnation) for rank, incarnation in members.items()
        }
        for rank, (incarnation, step) in (steps or {}).items():
            self.members[rank] = incarnation
            self._steps[rank] = TrainerSteps(incarnation, open_step=step + 1, clock=step, may_be_ahead=True)

    def __repr__(self) -> str:
        clocks = ", ".join(f"trainer {rank}: {clock}" for rank, clock in self.clocks.items())
        return f"<Clocks [{self.applied} contributions applied | {clocks}]>"

    @property
    def reported_round(self) -> Round:
        """The number of applied contributions; each trainer has an open step of its own."""
        return self.applied

    @property
    def clocks(self) -> dict[Rank, Round]:
        """The completed steps of each member."""
        return {rank: self._steps[rank].clock for rank in sorted(self.members)}

    @property
    def open_steps(self) -> dict[Rank, Round]:
        """The next step of each rank, including ranks that are not members."""
        return {rank: steps.open_step for rank, steps in sorted(self._steps.items())}

    def copy_history(self) -> History:
        """Return the incarnation and the newest committed step of each rank."""
        return History(
            steps={rank: (steps.incarnation, steps.open_step - 1) for rank, steps in sorted(self._steps.items())}
        )

    def describe(self) -> dict[str, Any]:
        """Return the clocks of all members."""
        return {"clocks": self.clocks}

    def contribution(self, rank: Rank) -> StagedContribution[Payload]:
        """Return the staged contribution of a member's open step."""
        return self._steps[rank].staged

    def staged(self) -> Iterator[tuple[Round, Rank, StagedContribution[Payload]]]:
        """Yield the staged contributions of all members, in order."""
        for rank in sorted(self.members):
            yield self._steps[rank].open_step, rank, self._steps[rank].staged

    def admit(self, rank: Rank, incarnation: Incarnation, step: Round) -> Admission:
        """Return whether a push's step is open or already committed."""
        check_member(self.members, rank, incarnation)
        steps = self._steps[rank]
        # A complete contribution is about to be committed.
        may_be_ahead = steps.may_be_ahead and not steps.staged.is_complete
        return admit(step, steps.open_step, max(step, steps.open_step) if may_be_ahead else steps.open_step)

    def check_state(self, rank: Rank, incarnation: Incarnation, round_: Round, version: Round) -> None:
        """Raise Conflict unless the trainer is a member. There is no common round, so every version is accepted."""
        check_member(self.members, rank, incarnation)

    def check_delay(self, rank: Rank, step: Round, computed_on: Round) -> None:
        """Raise `delay_exceeded` if the gradient of `step` was computed on parameters that are too old.

        Raises FutureRound if it was computed on parameters that this trainer cannot have.
        """
        if computed_on >= step:
            text = f"step {step} of trainer {rank} must be computed on an earlier version than {computed_on}"
            raise FutureRound(text, current=step - 1)
        oldest = oldest_start(step, self._rules.max_delay)
        if computed_on < oldest:
            raise Conflict(
                f"trainer {rank} computed step {step} on version {computed_on}, which is too old",
                code="delay_exceeded", expected=f">= {oldest} (max_delay {self._rules.max_delay})", actual=computed_on,
            )  # fmt: skip

    def stage(self, rank: Rank, step: Round, push: Push[Payload]) -> Staged:
        """Stage one admitted push: see `StagedContribution.stage`. Steps that were lost in a restart are skipped."""
        steps = self._steps[rank]
        num_lost = step - steps.open_step
        if num_lost:
            steps.open_step, steps.clock, steps.staged = step, step - 1, StagedContribution()
        return steps.staged.stage(rank, step, push)._replace(num_lost=num_lost)

    def commit(self, rank: Rank) -> Committed[Payload]:
        """Commit the complete contribution of the open step, to be queued as a whole; the next step opens."""
        steps = self._steps[rank]
        assert steps.staged.is_complete
        self.num_committed += 1
        committed = Committed(rank, steps.open_step, steps.staged, steps, self.num_committed)
        steps.open_step += 1
        steps.may_be_ahead = False  # from now on the trainer's steps come one after another
        steps.staged = StagedContribution()
        steps.unapplied[committed.step] = len(committed.contribution.blocks)
        self._advance(steps)
        return committed

    def count_applied_block(self, committed: Committed[Payload]) -> None:
        """Count one applied block of a contribution."""
        committed.steps.unapplied[committed.step] -= 1
        self._advance(committed.steps)

    def _advance(self, steps: TrainerSteps[Payload]) -> None:
        # In order: a later step without a gradient for a slow block may be complete first.
        while steps.unapplied.get(steps.clock + 1) == 0:
            steps.clock += 1
            del steps.unapplied[steps.clock]
            self.applied += 1

    def find_missing(self, rank: Rank, step: Round) -> list[Rank]:
        """Return the ranks whose updates a pull of this trainer after its `step` waits for; none if it may be answered.

        Raises FutureRound if the step has not been pushed, ContributionMissing if this pserver has lost it.
        """
        steps = self._steps[rank]
        if step >= steps.open_step:
            if self._is_restored:
                raise ContributionMissing(f"this pserver was restarted and has lost step {step} of trainer {rank}")
            raise FutureRound(f"trainer {rank} has not pushed step {step}", current=steps.open_step)
        missing = set()
        if self._rules.wait_for_apply and steps.clock < step:
            missing.add(rank)
        if self._rules.max_staleness is not None:
            needed = needed_clock(step, self._rules.max_staleness)
            missing |= {other for other in self.members if self._steps[other].clock < needed}
        return sorted(missing)

    def install_members(self, membership: Membership) -> None:
        """Install a set of members. Staged contributions of trainers that left are dropped, committed ones stay queued.

        A new incarnation of a rank begins with its start, which may be before the steps that the old one has pushed
        here (then those count as committed) or after them.
        """
        members = membership.members
        for rank, incarnation in self.members.items():
            if members.get(rank) != incarnation:
                self._steps[rank].staged = StagedContribution()
        for rank, incarnation in members.items():
            if self.members.get(rank) != incarnation:
                start = membership.starts.get(rank)
                known = self._steps.get(rank)
                if start is None or known is None or known.open_step < start:
                    start = start or 1
                    known = TrainerSteps(incarnation, open_step=start, clock=start - 1, may_be_ahead=self._is_restored)
                known.incarnation = incarnation
                self._steps[rank] = known
        self.members = dict(members)
        self.is_paused = membership.newest_controls.is_paused

    def freeze(self) -> FrozenRounds:
        """Return the open steps. Contributions are applied one by one, so that nothing is held back."""
        return FrozenRounds(applied=self.num_committed, opens=self.open_steps)

    def set_committed(self, number: int) -> None:
        """Count this many contributions as committed and applied, as other pservers do. The queues must be empty."""
        self.applied = self.num_committed = number


@dataclass(frozen=True, slots=True)
class PulledState:
    """The state of the shard that a trainer pulled."""

    versions: Mapping[str, int]  # the number of updates of each block
    values: Tensor | None = None  # flat float32 copy of the shard, where it is needed (DC-ASGD)


class Pulls:
    """The pulls of every trainer, by its completed step; a pull too old to be computed on is dropped.

    With DC-ASGD each pull contains a copy of the shard: at most (max_delay + 2) float32 shards for each trainer,
    besides the pulls that queued updates were computed on. A restored pserver does not know the pulls of its earlier
    incarnation: until a trainer pulls again, they count as `restored`, the state that the pserver began with.
    """

    def __init__(self, max_delay: int, restored: PulledState | None = None) -> None:
        self._max_delay = max_delay
        self._restored = restored
        self._pulls: dict[Rank, dict[Round, PulledState]] = {}

    def __repr__(self) -> str:
        kept = ", ".join(f"trainer {rank}: {sorted(pulls)}" for rank, pulls in sorted(self._pulls.items()))
        return f"<Pulls [{kept}]>"

    def record_pull(self, rank: Rank, step: Round, pull: PulledState) -> None:
        """Record the pull after `step`, in place of an earlier one after that step."""
        pulls = self._pulls.setdefault(rank, {})
        pulls[step] = pull
        oldest = oldest_start(step + 1, self._max_delay)  # the oldest pull that the next step may be computed on
        for old_step in [known for known in pulls if known < oldest]:
            del pulls[old_step]

    def find_pull(self, rank: Rank, step: Round) -> PulledState:
        """Return the trainer's pull after `step`. Raises StaleRound if there is none."""
        known = self._pulls.get(rank, {})
        pull = known.get(step)
        if pull is None and self._restored is not None and step < min(known, default=step + 1):
            return self._restored
        if pull is None:
            raise StaleRound(f"trainer {rank} has no recorded pull after its step {step}", current=sorted(known))
        return pull

    def forget_trainer(self, rank: Rank) -> None:
        """Drop the pulls of a trainer that left."""
        self._pulls.pop(rank, None)
