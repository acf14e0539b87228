"""The trainers' steps at one pserver, in the asynchronous modes, as a pure state machine.

    pushes of step t ──complete──► taken: queued for every block ──every block applied──► clock t
                                                                                            │
    get after step t ◄── wait_for_apply: own clock is t; ssp: everybody's is t - s at least ┘

A trainer's steps come strictly one after another, so that a step is known by its number alone: what is older than
the open one has been taken. Nothing here waits, knows a time or touches a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic

from ps_protocol.consistency import Consistency, needed_clock, oldest_start
from ps_protocol.errors import Conflict, ContributionMissing, FutureRound
from ps_protocol.membership import Membership
from ps_protocol.optimizers import HyperParameters
from ps_protocol.slots import StepState
from ps_protocol.vocabulary import Incarnation, Rank, Round

from .admission import Admission, admit, check_member
from .contribution import Contribution, Payload


@dataclass(slots=True)
class TrainerSteps(Generic[Payload]):
    """How far one trainer is here."""

    incarnation: Incarnation
    open: Round = 1  # the step that pushes are for
    clock: Round = 0  # every block of every step up to this one is applied
    is_restored: bool = False  # this pserver has come back, without what was staged
    may_skip_steps: bool = False  # and perhaps without steps that the trainer has taken, until it has taken one here
    staged: Contribution[Payload] = field(default_factory=Contribution)  # of the open step
    unapplied: dict[Round, int] = field(default_factory=dict)  # blocks that each taken step still waits for


@dataclass(frozen=True, slots=True)
class Committed(Generic[Payload]):
    """A whole contribution on its way through the queues of its blocks."""

    rank: Rank
    step: Round
    contribution: Contribution[Payload]
    steps: TrainerSteps[Payload]  # of the life that pushed it; the rank may have another by now
    number: int  # how many this pserver has taken with it


class Clocks(Generic[Payload]):
    """Staging and clocks of one pserver. `applied` counts the contributions of which every block is applied.

    One that has come back begins with `applied` contributions, and for each rank the newest `steps` in them and the
    life that they came from. The first step that a trainer takes then may be a later one: those before it are lost.
    """

    def __init__(
        self,
        members: Mapping[Rank, Incarnation],
        consistency: Consistency,
        *,
        applied: int = 0,
        steps: Mapping[Rank, tuple[Incarnation, Round]] | None = None,
        is_short: bool = False,
    ) -> None:
        self.members = dict(members)
        self.applied = applied
        self.num_committed = applied  # contributions that are applied or queued
        self._rules = consistency
        self._is_restored, self._is_short = steps is not None, is_short
        self._steps: dict[Rank, TrainerSteps[Payload]] = {rank: TrainerSteps(life) for rank, life in members.items()}
        for rank, (life, step) in (steps or {}).items():
            self.members[rank] = life
            self._steps[rank] = TrainerSteps(life, open=step + 1, clock=step, is_restored=True, may_skip_steps=is_short)

    def __repr__(self) -> str:
        clocks = ", ".join(f"trainer {rank}: {clock}" for rank, clock in self.clocks.items())
        return f"<Clocks [{self.applied} contributions applied | {clocks}]>"

    @property
    def clocks(self) -> dict[Rank, Round]:
        """Completed steps of each member."""
        return {rank: self._steps[rank].clock for rank in sorted(self.members)}

    @property
    def open_steps(self) -> dict[Rank, Round]:
        """The step that each rank would push next, members or not."""
        return {rank: steps.open for rank, steps in sorted(self._steps.items())}

    @property
    def newest_steps(self) -> dict[Rank, tuple[Incarnation, Round]]:
        """The newest step that was taken from each rank, and the life it came from."""
        return {rank: (steps.incarnation, steps.open - 1) for rank, steps in sorted(self._steps.items())}

    def staged(self, rank: Rank) -> Contribution[Payload]:
        """What a member has staged for its open step."""
        return self._steps[rank].staged

    def admit(self, rank: Rank, incarnation: Incarnation, step: Round) -> Admission:
        """Say where a push belongs, or raise Conflict (`stale_trainer`) or FutureRound. Changes nothing."""
        check_member(self.members, rank, incarnation)
        steps = self._steps[rank]
        may_skip_steps = steps.may_skip_steps and not steps.staged.is_complete  # else it is about to be taken
        return admit(step, steps.open, max(step, steps.open) if may_skip_steps else steps.open)

    def skip_lost_steps(self, rank: Rank, step: Round) -> int:
        """Open the step of an admitted push; returns how many before it this pserver has lost with an earlier life."""
        steps = self._steps[rank]
        num_lost = step - steps.open
        if num_lost <= 0 or not steps.may_skip_steps:
            return 0
        steps.open, steps.clock, steps.staged = step, step - 1, Contribution()
        return num_lost

    def check_delay(self, rank: Rank, step: Round, computed_on: Round) -> None:
        """Raise `delay_exceeded` if the gradient of `step` was computed on parameters that are too old, FutureRound
        if on some that this trainer cannot have got."""
        if computed_on >= step:
            raise FutureRound(f"step {step} cannot have been computed on version {computed_on}", current=step - 1)
        oldest = oldest_start(step, self._rules.max_delay)
        if computed_on < oldest:
            raise Conflict(
                f"trainer {rank} computed step {step} on parameters of its step {computed_on}",
                code="delay_exceeded", expected=f">= {oldest} (max_delay {self._rules.max_delay})", actual=computed_on,
            )  # fmt: skip

    def stage_blocks(
        self,
        rank: Rank,
        blocks: Mapping[str, Payload],
        num_blocks: int | None,
        hyper_parameters: list[HyperParameters] | None,
        computed_on: Round | None,
        num_slots: int = 0,
    ) -> int:
        """Stage one admitted push of the open step; returns how many blocks are new. See `Contribution.stage`."""
        steps = self._steps[rank]
        num_new = steps.staged.stage(rank, steps.open, blocks, num_blocks, hyper_parameters, num_slots=num_slots)
        if steps.staged.computed_on is None:
            steps.staged.computed_on = computed_on
        return num_new

    def stage_slots(self, rank: Rank, slots: Mapping[str, Payload | StepState]) -> int:
        """Stage slots that a trainer has loaded, with its open step; returns how many are new."""
        steps = self._steps[rank]
        return steps.staged.stage_slots(rank, steps.open, slots)

    def commit(self, rank: Rank) -> Committed[Payload]:
        """Take the complete contribution of the open step, to be queued as a whole; the next step opens."""
        steps = self._steps[rank]
        assert steps.staged.is_complete
        self.num_committed += 1
        taken = Committed(rank, steps.open, steps.staged, steps, self.num_committed)
        steps.open += 1
        steps.may_skip_steps = False  # from here on the trainer's steps come one after another
        steps.staged = Contribution()
        steps.unapplied[taken.step] = len(taken.contribution.blocks)
        self._advance(steps)
        return taken

    def count_applied_block(self, taken: Committed[Payload]) -> bool:
        """One block of it is applied; returns whether that completed a step."""
        taken.steps.unapplied[taken.step] -= 1
        return self._advance(taken.steps)

    def _advance(self, steps: TrainerSteps[Payload]) -> bool:
        before = steps.clock
        # In order: a later step may be complete first, if it has no gradient for a block that is slow.
        while steps.unapplied.get(steps.clock + 1) == 0:
            steps.clock += 1
            del steps.unapplied[steps.clock]
        self.applied += steps.clock - before
        return steps.clock > before

    def find_missing(self, rank: Rank, step: Round) -> list[Rank]:
        """Whose updates a get of this trainer after its `step` has to wait for; nobody's: it may be answered.

        Raises FutureRound if the step has not been pushed, ContributionMissing if this pserver has lost it.
        """
        steps = self._steps[rank]
        if step >= steps.open:
            if steps.is_restored:
                raise ContributionMissing(f"this pserver has come back without step {step} of trainer {rank}")
            raise FutureRound(f"step {step} has not been pushed", current=steps.open)
        waits = set()
        if self._rules.wait_for_apply and self._steps[rank].clock < step:
            waits.add(rank)
        if self._rules.max_staleness is not None:
            needed = needed_clock(step, self._rules.max_staleness)
            waits |= {other for other in self.members if self._steps[other].clock < needed}
        return sorted(waits)

    def install_members(self, membership: Membership) -> None:
        """Install a set of members; what those who are gone have staged is dropped, what was taken stays queued.

        A new life of a rank goes on at its start, which may be behind what the old one has pushed here (then those
        steps count as taken) or ahead of it.
        """
        members = membership.members
        for rank, incarnation in self.members.items():
            if members.get(rank) != incarnation:
                self._steps[rank].staged = Contribution()
        for rank, incarnation in members.items():
            if self.members.get(rank) != incarnation:
                start = membership.starts.get(rank)
                known = self._steps.get(rank)
                if start is None or known is None or known.open < start:
                    start = start or 1
                    known = TrainerSteps(
                        incarnation,
                        open=start,
                        clock=start - 1,
                        is_restored=self._is_restored,
                        may_skip_steps=self._is_short,
                    )
                known.incarnation = incarnation
                self._steps[rank] = known
        self.members = dict(members)

    def pass_to(self, number: int) -> None:
        """Count as if so many contributions had been taken and applied: others have more. Nothing may be queued."""
        self.applied = self.num_committed = number
