"""Which messages count now, of trainers and of the coordinator. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from ps_protocol.errors import Conflict, FutureRound
from ps_protocol.vocabulary import Incarnation, Rank, Round

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
