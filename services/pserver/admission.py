"""Which messages count now: from a member's current life, for the open round or step, or for one that is over. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from ps_protocol.errors import Conflict, FutureRound
from ps_protocol.vocabulary import Incarnation, Rank, Round

Admission = Literal["open", "already_applied"]


def check_member(members: Mapping[Rank, Incarnation], rank: Rank, incarnation: Incarnation) -> None:
    """Raise Conflict unless this is the current life of a member."""
    if members.get(rank) != incarnation:
        raise Conflict(
            f"trainer {rank} incarnation {incarnation} is not a member: it was taken out, or another life has come",
            code="stale_trainer", current={str(r): i for r, i in members.items()},
        )  # fmt: skip


def admit(round_: Round, first_open: Round, last_open: Round) -> Admission:
    """Say where a message for `round_` belongs, or raise FutureRound."""
    if round_ > last_open:
        raise FutureRound(f"round {round_} is not open yet", current=last_open)
    return "open" if round_ >= first_open else "already_applied"


class MembershipChanges:
    """Those of one run. Their numbers go up, also from attempt to attempt."""

    def __init__(self, run: str = "") -> None:
        self.run = run
        self.begun = 0
        self.ended = 0

    def begin_change(self, number: int) -> None:
        """A freeze has come, whatever it is answered. Raises Conflict if that change is over, or a later one has begun.

        From now on the end of an earlier change, which was given up for this one, does nothing.
        """
        self.check_change(number)
        self.begun = number

    def check_change(self, number: int) -> None:
        """Raise Conflict unless this change may end here."""
        if not self.is_current(number):
            raise Conflict("this change of members is over", current=max(self.begun, self.ended), actual=number)

    def is_current(self, number: int) -> bool:
        """Whether the end of this change is to be carried out.

        That of one that was given up may arrive when all others have answered the freeze of a later one, and would set
        this pserver going alone.
        """
        return number >= self.begun and number > self.ended

    def end_change(self, number: int) -> None:
        """This change is installed."""
        self.begun = self.ended = number
