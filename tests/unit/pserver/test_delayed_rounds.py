"""Rounds that are staged ahead (`max_delay`): arbitrary interleavings of trainers that do what the client does."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ps_protocol.errors import FutureRound
from services.pserver.rounds import Apply, Rounds

from ...soaking import examples

NUMBERS = [{"lr": 0.1}]
NUM_TRAINERS = 3


class DelayedRounds(RuleBasedStateMachine):
    """A trainer computes round r on version r - 1 - k at the oldest; it pushes, sends its barrier, and gets."""

    k: int

    @initialize()
    def begin(self) -> None:
        self.rounds: Rounds[str] = Rounds(dict.fromkeys(range(NUM_TRAINERS), 1), self.k)
        self.pushed = [0] * NUM_TRAINERS  # newest round of each
        self.barriers = [0] * NUM_TRAINERS
        self.got = [0] * NUM_TRAINERS  # newest version of each
        self.is_applying = False
        self.applied: list[Apply[str]] = []
        self.furthest = 0  # how many rounds ahead of the applied one something was staged

    def start(self, apply: Apply[str] | None) -> None:
        if apply is None:
            return
        assert not self.is_applying
        self.is_applying = True
        # Strictly in order, complete, with exactly the contributions of this round in the order of ranks.
        assert apply.round == len(self.applied) + 1
        assert min(self.barriers) >= apply.round
        assert [[*c.blocks.values()] for c in apply.contributions] == [
            [f"round {apply.round} of {rank}"] for rank in range(NUM_TRAINERS)
        ]
        self.applied.append(apply)

    @rule(rank=st.integers(0, NUM_TRAINERS - 1))
    def push(self, rank: int) -> None:
        round_ = self.pushed[rank] + 1
        if self.got[rank] < round_ - 1 - self.k:
            return  # it has to wait for parameters first
        assert self.rounds.admit(rank, 1, round_) == "open"
        self.rounds.stage_blocks(rank, {"w": f"round {round_} of {rank}"}, 1, NUMBERS, round_)
        self.pushed[rank] = round_
        self.furthest = max(self.furthest, round_ - self.rounds.applied)

    @rule(rank=st.integers(0, NUM_TRAINERS - 1))
    def push_again(self, rank: int) -> None:
        round_ = self.pushed[rank]
        if round_ and self.rounds.admit(rank, 1, round_) == "open":
            assert self.rounds.stage_blocks(rank, {"w": f"round {round_} of {rank}"}, 1, NUMBERS, round_) == 0

    @rule(rank=st.integers(0, NUM_TRAINERS - 1), again=st.booleans())
    def send_barrier(self, rank: int, again: bool) -> None:
        round_ = self.barriers[rank] + (0 if again else 1)
        if 0 < round_ <= self.pushed[rank]:
            self.barriers[rank] = round_
            self.start(self.rounds.count_batch_barrier(rank, 1, round_))

    @precondition(lambda self: self.is_applying)
    @rule()
    def finish_apply(self) -> None:
        self.is_applying = False
        self.start(self.rounds.finish_apply())

    @rule(rank=st.integers(0, NUM_TRAINERS - 1))
    def get(self, rank: int) -> None:
        """The newest version, if it is the one that is asked for or a later one."""
        if self.got[rank] < self.rounds.applied and self.got[rank] + 1 <= self.barriers[rank]:
            self.got[rank] = self.rounds.applied if self.k else self.got[rank] + 1

    @rule(rank=st.integers(0, NUM_TRAINERS - 1))
    def send_too_early(self, rank: int) -> None:
        with pytest.raises(FutureRound):
            self.rounds.admit(rank, 1, self.rounds.applied + 1 + self.k + 1)

    @invariant()
    def nothing_deadlocks(self) -> None:
        """As soon as all barriers of a round are in, it is applied, or being applied."""
        if hasattr(self, "rounds"):
            due = min(self.barriers)
            assert self.rounds.applied >= due or self.is_applying

    @invariant()
    def no_more_rounds_are_staged_than_may_be(self) -> None:
        if hasattr(self, "rounds"):
            assert {round_ for round_, _, _ in self.rounds.staged()} <= {
                *range(self.rounds.open, self.rounds.open + 1 + self.k)
            }


def machine(k: int) -> type[RuleBasedStateMachine]:
    cls = type(f"DelayedRounds{k}", (DelayedRounds,), {"k": k})
    cls.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=60, deadline=None)
    return cls


TestWithoutDelay = machine(0).TestCase
TestDelay1 = machine(1).TestCase
TestDelay3 = machine(3).TestCase


@pytest.mark.parametrize("k", [0, 1, 3])
def test_the_bound_is_reached(k: int) -> None:
    """It is not accidentally synchronous: one trainer gets k + 1 rounds ahead of what is applied, and no further."""
    rounds: Rounds[str] = Rounds({0: 1, 1: 1}, k)
    for round_ in range(1, k + 2):
        assert rounds.admit(0, 1, round_) == "open"
        rounds.stage_blocks(0, {"w": str(round_)}, 1, NUMBERS, round_)
        assert rounds.count_batch_barrier(0, 1, round_) is None
    with pytest.raises(FutureRound):
        rounds.admit(0, 1, k + 2)
    for round_ in range(1, k + 2):  # the other one comes, and everything is applied in turn
        rounds.stage_blocks(1, {"w": str(round_)}, 1, NUMBERS, round_)
        rounds.count_batch_barrier(1, 1, round_)
    applied = []
    while rounds.applying is not None:
        applied.append(rounds.applying.round)
        rounds.finish_apply()
    assert applied == list(range(1, k + 2))
