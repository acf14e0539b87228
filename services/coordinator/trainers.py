"""A trainer of a run, from joining to its end. Pure: the caller passes the time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from ps_protocol.messages import DeclareModel, Link, Software
from ps_protocol.vocabulary import Incarnation, PserverIndex, Rank, Round

EVICTED = "was evicted by an administrator"

TrainerState = Literal["joined", "declared", "done", "failed", "lost"]


def name_ranks(ranks: Iterable[Rank]) -> str:
    """Return the trainers of these ranks in words.

    >>> name_ranks([0, 2])
    'trainer 0, trainer 2'
    """
    return ", ".join(f"trainer {rank}" for rank in ranks)


@dataclass(slots=True)
class TrainerMember:
    """The newest incarnation of a rank, present or gone."""

    rank: Rank
    incarnation: Incarnation
    instance: str
    seen_at: float  # by the monotonic clock
    metrics_address: str | None
    state: TrainerState = "joined"
    declaration: DeclareModel | None = None
    joined_at: float = 0.0
    round: Round = 0
    results: dict[str, float] = field(default_factory=dict)
    gone_at: float = 0.0  # when it was lost or failed
    why: str = ""  # the reason in words
    is_awaited: bool = False  # the run waits for this rank, whichever process takes it
    is_resumed: bool = False  # awaited since the run was resumed, so that all begin together
    has_chosen: bool = False  # its rank was set with RANK
    software: Software | None = None
    links: Mapping[PserverIndex, Link] = field(default_factory=dict)
    unreachable: Mapping[PserverIndex, float] = field(default_factory=dict)  # seconds
    cut_off_at: float = -math.inf  # when it last reported the current incarnation of a pserver as unreachable
    waiting_seconds: float = 0.0  # strategy ring: how long it waits in its next round
    is_done: bool = False  # strategy ring: it has no batches left
    is_stuck: bool = False  # lost although it is alive, because it does not progress

    @property
    def is_here(self) -> bool:
        """True if the trainer holds its rank."""
        return self.state in ("joined", "declared")

    @property
    def was_evicted(self) -> bool:
        """True if an administrator evicted the trainer."""
        return self.state == "lost" and self.why.endswith(EVICTED)

    def lose(self, state: Literal["failed", "lost"], why: str, now: float, *, is_awaited: bool) -> None:
        """Mark the trainer as gone."""
        self.state, self.why, self.gone_at, self.is_awaited = state, why, now, is_awaited

    def revive(self) -> None:
        """Undo the loss of a trainer. It stays awaited until the pservers have installed it."""
        self.state = "joined" if self.declaration is None else "declared"
        self.is_stuck = False
