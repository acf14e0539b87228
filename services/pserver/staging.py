"""The messages that count now, of trainers and of the coordinator, and contributions while they are staged. Pure.

A staged block is an opaque payload.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, Literal, NamedTuple, TypeVar

from ps_protocol.errors import Conflict, ContributionConflict, FutureRound
from ps_protocol.optimizers import HyperParameters, StepState
from ps_protocol.vocabulary import Incarnation, Rank, Round

Payload = TypeVar("Payload")

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
            raise Conflict("this change of members is over", current=max(self.begun, self.ended), actual=number)

    def is_current(self, number: int) -> bool:
        """Return whether this change may be installed.

        The installation of an abandoned change may arrive when the other pservers are frozen for a later one, and
        would unfreeze this pserver alone.
        """
        return number >= self.begun and number > self.ended

    def end_change(self, number: int) -> None:
        """Note that this change is installed."""
        self.begun = self.ended = number


@dataclass(frozen=True, slots=True)
class Push(Generic[Payload]):
    """One push: blocks of a gradient, or optimizer state. The last push of a contribution announces all of it."""

    blocks: Mapping[str, Payload]
    num_blocks: int | None = None  # of the contribution; None before its last push
    hyper_parameters: list[HyperParameters] | None = None
    num_slots: int = 0  # of the contribution, slots and step states
    computed_on: Round | None = None  # asynchronous modes: the step after which its parameters were pulled
    slots: Mapping[str, Payload | StepState] = field(default_factory=dict)  # optimizer state that a trainer has loaded

    @property
    def num_entries(self) -> int:
        """The number of blocks and slots in this push."""
        return len(self.blocks) + len(self.slots)


class Staged(NamedTuple):
    """The effect of a push on a contribution."""

    num_new: int  # blocks and slots that were not staged yet
    is_complete: bool
    num_lost: int = 0  # steps before it that an earlier incarnation of the pserver has lost


@dataclass(slots=True)
class Contribution(Generic[Payload]):
    """The staged part of one trainer's gradient; complete once all announced blocks and slots are staged."""

    blocks: dict[str, Payload] = field(default_factory=dict)
    incarnation: Incarnation = 0  # of the trainer
    num_blocks: int | None = None
    hyper_parameters: list[HyperParameters] | None = None
    computed_on: Round | None = None
    slots: dict[str, Payload | StepState] = field(default_factory=dict)
    num_slots: int = 0

    @property
    def is_complete(self) -> bool:
        """True if all of it is staged. Its batch barrier is counted separately."""
        return self.num_blocks == len(self.blocks) and self.num_slots == len(self.slots)

    def stage(self, rank: Rank, round_: Round, push: Push[Payload]) -> Staged:
        """Stage one push. `rank` and `round_` are for messages.

        A ContributionConflict (other bytes or hyper-parameters for the same block or round, or more blocks or slots
        than announced) stages nothing.
        """
        where = f"trainer {rank} pushed", f"in round {round_}"
        blocks = _find_new(self.blocks, push.blocks, "other bytes for block", *where)
        slots = _find_new(self.slots, push.slots, "something else for", *where)
        is_announced, announces = self.num_blocks is not None, push.num_blocks is not None
        own_slots, pushed_slots = self.num_slots if is_announced else None, push.num_slots if announces else None
        _check_total("blocks", len(self.blocks) + len(blocks), self.num_blocks, push.num_blocks, *where)
        _check_total("slots", len(self.slots) + len(slots), own_slots, pushed_slots, *where)
        if is_announced and announces and push.hyper_parameters != self.hyper_parameters:
            raise ContributionConflict(f"{where[0]} two sets of hyper-parameters {where[1]}")
        self.blocks.update(blocks)
        self.slots.update(slots)
        if announces and not is_announced:
            self.num_blocks, self.num_slots = push.num_blocks, push.num_slots
            self.hyper_parameters, self.computed_on = push.hyper_parameters, push.computed_on
        return Staged(len(blocks) + len(slots), self.is_complete)


def _find_new(
    known: Mapping[str, Payload], pushed: Mapping[str, Payload], what: str, who: str, when: str
) -> dict[str, Payload]:
    new = {}
    for name, payload in pushed.items():
        if name not in known:
            new[name] = payload
        elif payload != known[name]:
            raise ContributionConflict(f"{who} {what} {name!r} {when}")
    return new


def _check_total(noun: str, staged: int, announced: int | None, pushed: int | None, who: str, when: str) -> None:
    total = announced if pushed is None else pushed
    if total is not None and (staged > total or announced not in (None, total)):
        raise ContributionConflict(
            f"{who} more {noun} {when} than it announced, or announced two numbers",
            expected=total if announced is None else announced,
            actual=max(total, staged),
        )
