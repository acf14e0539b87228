"""The synchronous round as a pure state machine: it takes events and returns what must follow.

    pushes of round r ──► batch barriers of r = members ──► Apply(r) ──► gets of r ──► fetch barriers of r
                                       ▲                                                     │
                                       └───────────── r + 1 is applied only after ───────────┘

Barriers are sets of ranks, so one that is sent twice counts once. Nothing here waits, knows a clock or touches a
tensor: a staged block is an opaque payload that can be compared with another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic

from ps_protocol.errors import ContributionMissing, FutureRound
from ps_protocol.optimizers import HyperParameters
from ps_protocol.vocabulary import Incarnation, Rank, Round

from .admission import Admission, admit, check_member
from .contribution import Contribution, Payload


@dataclass(frozen=True, slots=True)
class Apply(Generic[Payload]):
    """Order to aggregate these contributions, which stand in rank order, and step the optimizer once."""

    round: Round
    ranks: tuple[Rank, ...]
    contributions: tuple[Contribution[Payload], ...]

    @property
    def hyper_parameters(self) -> list[HyperParameters]:
        """Those of the lowest rank: the same set on every pserver, so the same choice."""
        chosen = self.contributions[0].hyper_parameters
        assert chosen is not None  # a complete contribution has them
        return chosen


class Rounds(Generic[Payload]):
    """Staging and barriers of one pserver. `applied` is the newest applied round, `open` the one being staged."""

    def __init__(self, members: Mapping[Rank, Incarnation]) -> None:
        self.members = dict(members)
        self.applied: Round = 0
        self.applying: Apply[Payload] | None = None
        self.contributions: dict[Rank, Contribution[Payload]] = {}
        self.batch_barriers: set[Rank] = set()  # of the open round
        self.fetch_barriers: set[Rank] = set()  # of the applied round

    @property
    def open(self) -> Round:
        """The round that pushes and batch barriers are for."""
        return self.applied + 1

    @property
    def missing(self) -> list[Rank]:
        """Whom the open batch barrier waits for."""
        return sorted(self.members.keys() - self.batch_barriers)

    def __repr__(self) -> str:
        state = "applying" if self.applying else f"batch barriers: {len(self.batch_barriers)} of {len(self.members)}"
        waiting = ", ".join(f"trainer {rank}" for rank in self.missing) or "nobody"
        return f"<Round {self.open} [{state} | waiting for: {waiting}]>"

    def check_member(self, rank: Rank, incarnation: Incarnation) -> None:
        """Raise StaleTrainer unless this is the current life of a member."""
        check_member(self.members, rank, incarnation)

    def admit(self, rank: Rank, incarnation: Incarnation, round_: Round) -> Admission:
        """Say where a message belongs, or raise StaleTrainer or FutureRound. Changes nothing.

        Called at a request's headers and again after its last byte, because rounds go on meanwhile.
        """
        self.check_member(rank, incarnation)
        return admit(round_, self.open)

    def blocks_arrived(
        self,
        rank: Rank,
        blocks: Mapping[str, Payload],
        num_blocks: int | None,
        hyper_parameters: list[HyperParameters] | None,
    ) -> int:
        """Stage one admitted push of the open round, which proves the last fetch; returns how many blocks are new.

        All or nothing, see `Contribution.stage`.
        """
        staged = self.contributions.get(rank, Contribution())
        num_new = staged.stage(rank, self.open, blocks, num_blocks, hyper_parameters)
        self.contributions[rank] = staged
        self.fetch_barriers.add(rank)
        return num_new

    def batch_barrier_arrived(self, rank: Rank, incarnation: Incarnation, round_: Round) -> Apply[Payload] | None:
        """Count a trainer's batch barrier; returns the apply that it completes, if any."""
        if self.admit(rank, incarnation, round_) == "already_applied":
            return None
        staged = self.contributions.get(rank)
        if staged is None or not staged.is_complete:
            raise ContributionMissing(
                f"trainer {rank} has not pushed its whole contribution of round {round_} to this pserver",
                expected="an unknown number of blocks" if staged is None else staged.num_blocks,
                actual=0 if staged is None else len(staged.blocks),
            )
        self.batch_barriers.add(rank)
        self.fetch_barriers.add(rank)
        return self._start_apply()

    def fetch_barrier_arrived(self, rank: Rank, incarnation: Incarnation, round_: Round) -> Apply[Payload] | None:
        """Count a trainer's fetch barrier of the applied round; one of an older round is long implied."""
        if self.admit(rank, incarnation, round_) == "open":
            raise FutureRound(
                f"round {round_} has not been applied, so nothing of it was fetched", current=self.applied
            )
        if round_ == self.applied:
            self.fetch_barriers.add(rank)
        return self._start_apply()

    def members_changed(self, members: Mapping[Rank, Incarnation]) -> Apply[Payload] | None:
        """Install a set of members; what those who are gone have staged is dropped, unless it is being applied."""
        gone = [rank for rank, incarnation in self.members.items() if members.get(rank) != incarnation]
        self.members = dict(members)
        for rank in gone:
            self.contributions.pop(rank, None)
            self.batch_barriers.discard(rank)
            self.fetch_barriers.discard(rank)
        return self._start_apply()

    def round_applied(self) -> None:
        """The apply is done: its round becomes readable and the next one opens."""
        assert self.applying is not None
        self.applied = self.applying.round
        self.applying = None
        self.contributions.clear()
        self.batch_barriers.clear()
        self.fetch_barriers.clear()

    def _start_apply(self) -> Apply[Payload] | None:
        members = self.members.keys()
        if self.applying or not members or self.batch_barriers != members or self.fetch_barriers != members:
            return None
        ranks = tuple(sorted(members))
        self.applying = Apply(self.open, ranks, tuple(self.contributions[rank] for rank in ranks))
        return self.applying
