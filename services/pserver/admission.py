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
