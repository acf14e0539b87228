"""The members of a simulated run: pservers with the real `Rounds`, trainers, and the coordinator's messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ps_protocol.membership import FrozenRounds, Membership
from ps_protocol.norms import AgreedNorm, ShardNorm
from services.pserver.run.rounds import Rounds
from services.pserver.run.staging import MembershipChanges
from services.pserver.shard.shard_state import History

LOST = -1  # the attempt of a pserver that has lost rounds, until members are installed


def find_nonfinite(round_: int, lives: Mapping[int, int]) -> tuple[int, ...]:
    """Return the ranks of a round whose gradients hold NaN or infinity; `lives` are the incarnations by rank."""
    return tuple(rank for rank, life in lives.items() if (round_ + rank + life) % 3 == 0)


@dataclass
class Pserver:
    rounds: Rounds[int]
    attempt: int = 0
    history: dict[int, dict[int, int]] = field(default_factory=dict)  # by round: which life of each rank is in it
    norms: dict[int, ShardNorm] = field(default_factory=dict)  # by round, where gradients are clipped: what was told
    totals: dict[int, float] = field(default_factory=dict)  # and what it was clipped by
    changes: MembershipChanges = field(default_factory=MembershipChanges)
    life: int = 1
    is_up: bool = True  # else it holds what is on its disk, and serves nothing

    def wait_for_writes(self, order: object, norm: ShardNorm | None = None) -> None:
        """Applies are done at once, and what follows from them, up to a round that waits for its norm."""
        while order is not None and order is not self.rounds.measuring:
            following = self.rounds.applying
            lives = {}
            for rank, contribution in zip(following.ranks, following.contributions, strict=True):
                assert contribution.is_complete, f"half of trainer {rank} would be applied"
                lives[rank] = contribution.blocks["b"]
            assert following.nonfinite == find_nonfinite(following.round, lives)
            self.history[following.round] = lives
            if norm is not None:
                self.norms[following.round] = norm
            order, norm = self.rounds.finish_apply(self.rounds.history_after(following, norm)), None

    def norm_of(self, round_: int, index: int) -> ShardNorm | None:
        """Return the norm of a complete round, whose sum identifies the incarnations in it and the pserver.

        Return None if the round is not complete, or was empty.
        """
        if round_ <= self.rounds.applied:
            return self.rounds.history.norms.get(round_)
        measured = self.rounds.measuring
        if measured is None or measured.round != round_:
            return None
        lives = (contribution.blocks["b"] for contribution in measured.contributions)
        return ShardNorm(repr(measured.identity), float(100 * index + sum(lives)))

    def take_norm(self, round_: int, index: int, norm: AgreedNorm) -> bool:
        """Accept the norm of a get; return whether it matches the measured round, unless that is applied."""
        own = self.norm_of(round_, index)
        if own is None or not norm.own.is_same(own):
            return round_ <= self.rounds.applied
        if self.rounds.measuring is not None and round_ > self.rounds.applied:
            self.totals[round_] = norm.total
            self.wait_for_writes(self.rounds.accept_norm(), own)
        return True

    def restore(self, applied: int, max_delay: int) -> None:
        """Restore the state on the disk: all rounds up to `applied`."""
        for known in (self.history, self.norms, self.totals):
            for round_ in [round_ for round_ in known if round_ > applied]:
                del known[round_]
        newest = range(applied - max_delay, applied + 1)
        participants = {r: tuple(lives) for r, lives in self.history.items() if r in newest}
        nonfinite = {r: ranks for r in participants if (ranks := find_nonfinite(r, self.history[r]))}
        norms = {r: norm for r, norm in self.norms.items() if r in newest}
        history = History(participants, nonfinite, norms=norms)
        self.rounds = Rounds({}, max_delay, applied=applied, history=history, clips=self.rounds.clips)


@dataclass
class Trainer:
    rank: int
    incarnation: int
    round: int  # that it works on
    attempt: int
    pushed: set[int] = field(default_factory=set)  # pservers that have acknowledged every push
    counted: dict[int, int] = field(default_factory=dict)  # by pserver: its life when the batch barrier reached it
    pulled: set[int] = field(default_factory=set)
    norms: dict[int, ShardNorm | None] = field(default_factory=dict)  # by pserver; None: it is over there without one
    finished: int = 0  # rounds before its first
    has_begun: bool = True  # a joining trainer begins once it has pulled the round before its first


@dataclass
class Change:
    number: int
    targets: dict[int, int]
    lives: list[int]  # of the pservers that it froze
    answers: dict[int, FrozenRounds] = field(default_factory=dict)
    to_install: set[int] | None = None  # None: not decided yet


@dataclass
class Sent:
    """A freeze, or without it an installation, as it was sent to one pserver."""

    index: int
    life: int
    number: int
    attempt: int
    resume: int
    decided: Membership | None = None
