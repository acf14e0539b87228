"""The synchronous round as a pure state machine: it takes events and returns what must follow.

    pushes of round r ──► batch barriers of r = members ──► Apply(r) ──► gets of r ──► fetch barriers of r
                                       ▲                                                     │
                                       └───────────── r + 1 is applied only after ───────────┘

Barriers are sets of ranks, so one that is sent twice counts once. Nothing here waits, knows a clock or touches a
tensor: a staged block is an opaque payload that can be compared with another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
    """Staging and barriers of one pserver. `applied` is the newest applied round, `open` the one after it.

    With `max_delay` = k the k rounds after the open one are staged, too, each with barriers of its own. Rounds are
    applied strictly one after another.
    """

    def __init__(self, members: Mapping[Rank, Incarnation], max_delay: int = 0) -> None:
        self.members = dict(members)
        self.max_delay = max_delay
        self.applied: Round = 0
        self.applying: Apply[Payload] | None = None
        self._staged: dict[Round, dict[Rank, Contribution[Payload]]] = {}
        self._batch_barriers: dict[Round, set[Rank]] = {}
        self._fetched: dict[Rank, Round] = {}  # the newest version that a member is known to have read

    @property
    def open(self) -> Round:
        """The oldest round that pushes and batch barriers are for."""
        return self.applied + 1

    @property
    def contributions(self) -> dict[Rank, Contribution[Payload]]:
        """What is staged for the open round."""
        return self._staged.get(self.open, {})

    @property
    def batch_barriers(self) -> set[Rank]:
        """Whose batch barrier of the open round is in."""
        return self._batch_barriers.get(self.open, set())

    @property
    def fetch_barriers(self) -> set[Rank]:
        """Who is known to have read the applied round."""
        return {rank for rank, version in self._fetched.items() if version >= self.applied}

    @property
    def missing(self) -> list[Rank]:
        """Whom the open batch barrier waits for."""
        return sorted(self.members.keys() - self.batch_barriers)

    def __repr__(self) -> str:
        state = "applying" if self.applying else f"batch barriers: {len(self.batch_barriers)} of {len(self.members)}"
        waiting = ", ".join(f"trainer {rank}" for rank in self.missing) or "nobody"
        return f"<Round {self.open} [{state} | waiting for: {waiting}]>"

    def staged(self) -> Iterator[tuple[Round, Rank, Contribution[Payload]]]:
        """Everything that is staged, in order."""
        for round_, contributions in sorted(self._staged.items()):
            for rank, contribution in sorted(contributions.items()):
                yield round_, rank, contribution

    def admit(self, rank: Rank, incarnation: Incarnation, round_: Round) -> Admission:
        """Say where a message belongs, or raise StaleTrainer or FutureRound. Changes nothing.

        Called at a request's headers and again after its last byte, because rounds go on meanwhile.
        """
        check_member(self.members, rank, incarnation)
        return admit(round_, self.open, self.open + self.max_delay)

    def blocks_arrived(
        self,
        rank: Rank,
        blocks: Mapping[str, Payload],
        num_blocks: int | None,
        hyper_parameters: list[HyperParameters] | None,
        round_: Round | None = None,
    ) -> int:
        """Stage one admitted push of a round, the open one by default; returns how many blocks are new.

        All or nothing, see `Contribution.stage`. A push proves the fetch of what its gradient was computed on.
        """
        round_ = self.open if round_ is None else round_
        contribution = self._staged.get(round_, {}).get(rank, Contribution())
        num_new = contribution.stage(rank, round_, blocks, num_blocks, hyper_parameters)
        self._staged.setdefault(round_, {})[rank] = contribution
        self._has_fetched(rank, round_ - 1 - self.max_delay)
        return num_new

    def is_complete(self, rank: Rank, round_: Round) -> bool:
        """Whether a trainer's whole contribution of an open round is here."""
        contribution = self._staged.get(round_, {}).get(rank)
        return contribution is not None and contribution.is_complete

    def _has_fetched(self, rank: Rank, version: Round) -> None:
        self._fetched[rank] = max(self._fetched.get(rank, version), version)

    def batch_barrier_arrived(self, rank: Rank, incarnation: Incarnation, round_: Round) -> Apply[Payload] | None:
        """Count a trainer's batch barrier; returns the apply that it completes, if any."""
        if self.admit(rank, incarnation, round_) == "already_applied":
            return None
        if not self.is_complete(rank, round_):
            staged = self._staged.get(round_, {}).get(rank)
            raise ContributionMissing(
                f"trainer {rank} has not pushed its whole contribution of round {round_} to this pserver",
                expected="an unknown number of blocks" if staged is None else staged.num_blocks,
                actual=0 if staged is None else len(staged.blocks),
            )
        self._batch_barriers.setdefault(round_, set()).add(rank)
        self._has_fetched(rank, round_ - 1 - self.max_delay)
        return self._start_apply()

    def fetch_barrier_arrived(self, rank: Rank, incarnation: Incarnation, round_: Round) -> Apply[Payload] | None:
        """Count a trainer's fetch barrier of an applied round."""
        if self.admit(rank, incarnation, round_) == "open":
            raise FutureRound(
                f"round {round_} has not been applied, so nothing of it was fetched", current=self.applied
            )
        self._has_fetched(rank, round_)
        return self._start_apply()

    def members_changed(self, members: Mapping[Rank, Incarnation]) -> Apply[Payload] | None:
        """Install a set of members; what those who are gone have staged is dropped, unless it is being applied."""
        gone = [rank for rank, incarnation in self.members.items() if members.get(rank) != incarnation]
        self.members = dict(members)
        for rank in gone:
            self._fetched.pop(rank, None)
            for contributions in self._staged.values():
                contributions.pop(rank, None)
            for barriers in self._batch_barriers.values():
                barriers.discard(rank)
        return self._start_apply()

    def round_applied(self) -> Apply[Payload] | None:
        """The apply is done: its round becomes readable. Returns the next one if it is complete already."""
        assert self.applying is not None
        self.applied = self.applying.round
        self.applying = None
        self._staged.pop(self.applied, None)
        self._batch_barriers.pop(self.applied, None)
        return self._start_apply()

    def _start_apply(self) -> Apply[Payload] | None:
        if self.applying or not self.members or self.missing:
            return None
        # What a round's gradients were computed on has been read by then, by everybody.
        needed = self.open - 1 - self.max_delay
        if any(self._fetched.get(rank, -1) < needed for rank in self.members):
            return None
        ranks = tuple(sorted(self.members))
        self.applying = Apply(self.open, ranks, tuple(self.contributions[rank] for rank in ranks))
        return self.applying
