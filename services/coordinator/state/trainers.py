"""The reports of a run's trainers, which are not persisted."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ps_protocol.messages import DeclareModel, TrainerHeartbeat
from ps_protocol.vocabulary import Incarnation, Rank, Round

from .record import TrainerRecord


def name_ranks(ranks: Iterable[Rank]) -> str:
    """Return the trainers of these ranks in words.

    >>> name_ranks([0, 2])
    'trainer 0, trainer 2'
    """
    return ", ".join(f"trainer {rank}" for rank in ranks)


@dataclass(frozen=True, slots=True)
class TrainerReport:
    """The newest heartbeat of a trainer, its declaration, and times by the monotonic clock."""

    heartbeat: TrainerHeartbeat
    seen_at: float
    joined_at: float
    gone_at: float = 0.0  # when it was lost or failed
    cut_off_at: float = -math.inf  # when it last reported the current incarnation of a pserver as unreachable
    has_chosen: bool = False  # its rank was set with RANK
    is_stuck: bool = False  # lost although it is alive, because it does not progress
    declaration: DeclareModel | None = None  # the model that it declared to this process

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
