"""Contributions while they are staged, and which messages of trainers count now. Pure.

A staged block is an opaque payload.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, Literal, NamedTuple, TypeVar

from ps_protocol.errors import Conflict, ContributionConflict, FutureRound
from ps_protocol.optimizers import HyperParameters, StepState
from ps_protocol.requests import Completion
from ps_protocol.vocabulary import Incarnation, Rank, Round

Payload = TypeVar("Payload")


@dataclass(frozen=True, slots=True)
class Push(Generic[Payload]):
    """One push: blocks of a gradient, or optimizer state."""

    blocks: Mapping[str, Payload]
    completion: Completion | None = None  # present in the last push of a contribution
    slots: Mapping[str, Payload | StepState] = field(default_factory=dict)  # optimizer state that a trainer has loaded

    @property
    def num_entries(self) -> int:
        """The number of blocks and slots in this push."""
        return len(self.blocks) + len(self.slots)


class Staged(NamedTuple):
    """The effect of a push on a contribution."""

    num_new: int  # blocks and slots that were not staged yet
    is_complete: bool
    num_lost: int = 0  # steps before this one that an earlier incarnation of the pserver has lost


@dataclass(slots=True)
class StagedContribution(Generic[Payload]):
    """The staged part of one trainer's gradient; complete once all announced blocks and slots are staged."""

    blocks: dict[str, Payload] = field(default_factory=dict)
    incarnation: Incarnation = 0  # the incarnation of the trainer
    completion: Completion | None = None  # present once the last push has arrived
    slots: dict[str, Payload | StepState] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """True if the whole contribution is staged. Its batch barrier is counted separately."""
        return self.completion is not None and self.completion.num_blocks == len(self.blocks) + len(self.slots)

    @property
    def hyper_parameters(self) -> list[HyperParameters]:
        """The hyperparameters of a complete contribution."""
        assert self.completion is not None
        return self.completion.hyper_parameters

    def stage(self, rank: Rank, round_: Round, push: Push[Payload]) -> Staged:
        """Stage one push. `rank` and `round_` are for messages.

        A ContributionConflict (other bytes or hyperparameters for the same block or round, or more blocks than
        announced) stages nothing.
        """
        blocks = _find_new(self.blocks, push.blocks, "other bytes for block", rank, round_)
        slots = _find_new(self.slots, push.slots, "something else for", rank, round_)
        announced = [each for each in (self.completion, push.completion) if each is not None]
        num_blocks = len(self.blocks) + len(self.slots) + len(blocks) + len(slots)
        if announced and (num_blocks > announced[-1].num_blocks or announced[0].num_blocks != announced[-1].num_blocks):
            raise ContributionConflict(
                f"trainer {rank} pushed more blocks in round {round_} than it announced, or announced two numbers",
                expected=announced[0].num_blocks,
                actual=max(announced[-1].num_blocks, num_blocks),
            )
        if announced and announced[0].hyper_parameters != announced[-1].hyper_parameters:
            raise ContributionConflict(f"trainer {rank} pushed two sets of hyperparameters in round {round_}")
        self.blocks.update(blocks)
        self.slots.update(slots)
        self.completion = self.completion or push.completion
        return Staged(len(blocks) + len(slots), self.is_complete)


def _find_new(
    known: Mapping[str, Payload], pushed: Mapping[str, Payload], what: str, rank: Rank, round_: Round
) -> dict[str, Payload]:
    new = {}
    for name, payload in pushed.items():
        if name not in known:
            new[name] = payload
        elif payload != known[name]:
            raise ContributionConflict(f"trainer {rank} pushed {what} {name!r} in round {round_}")
    return new


Admission = Literal["open", "already_applied"]


def check_member(members: Mapping[Rank, Incarnation], rank: Rank, incarnation: Incarnation) -> None:
    """Raise Conflict unless this is the current incarnation of a member."""
    if members.get(rank) != incarnation:
        raise Conflict(
            f"trainer {rank} incarnation {incarnation} is not a member: it was evicted, or a newer one has joined",
            code="stale_trainer", current={str(r): i for r, i in members.items()},
        )  # fmt: skip


def admit(round_: Round, first_open: Round, last_open: Round) -> Admission:
    """Return whether `round_` is open or already applied. Raises FutureRound if it is neither."""
    if round_ > last_open:
        raise FutureRound(f"round {round_} is not open yet", current=last_open)
    return "open" if round_ >= first_open else "already_applied"


class MembershipChanges:
    """The newest change of a run's members on this pserver. Messages of earlier changes may arrive at any time.

    freeze n ──► begun = n ──► the coordinator decides on all answers ──► install n ──► ended = n

    The numbers increase, also from attempt to attempt.
    """

    def __init__(self, run: str = "") -> None:
        self.run = run
        self.begun = 0
        self.ended = 0

    def begin_change(self, number: int) -> None:
        """Note a freeze. Raises Conflict if that change is over, or a later one has begun.

        From now on the installation of an earlier change, which was given up for this one, has no effect.
        """
        self.check_change(number)
        self.begun = number

    def check_change(self, number: int) -> None:
        """Raise Conflict unless this change may be installed."""
        if not self.is_current(number):
            raise Conflict("the change of members is over", current=max(self.begun, self.ended), actual=number)

    def is_current(self, number: int) -> bool:
        """Return whether this change may be installed.

        A late installation of an abandoned change must not unfreeze this pserver after a later freeze: the other
        pservers would stay frozen.
        """
        return number >= self.begun and number > self.ended

    def end_change(self, number: int) -> None:
        """Note that this change is installed."""
        self.begun = self.ended = number
