"""The synchronous round as a state machine: rounds that are pushed ahead, changes of members, and clipping."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ps_protocol.errors import FutureRound
from ps_protocol.membership import Membership
from ps_protocol.norms import ShardNorm
from ps_protocol.requests import Completion
from services.pserver.run.rounds import Apply, Measure, Rounds
from services.pserver.run.staging import Push

from ...raising import raises_code
from ...soaking import examples
from .test_round_interleavings import LAMBDAS, payload

NUMBERS = [{"lr": 0.1}]
NUM_TRAINERS = 3


class RoundsAhead(RuleBasedStateMachine):
    """With `max_delay` k, a trainer computes round r on version r - 1 - k at the oldest, and pushes it ahead."""

    @initialize(k=st.sampled_from([0, 1, 3]))
    def begin(self, k: int) -> None:
        self.k = k
        self.rounds: Rounds[str] = Rounds(dict.fromkeys(range(NUM_TRAINERS), 1), k)
        self.pushed = [0] * NUM_TRAINERS  # newest round of each
        self.barriers = [0] * NUM_TRAINERS
        self.got = [0] * NUM_TRAINERS  # newest version of each
        self.is_applying = False
        self.applied: list[Apply[str]] = []

    def start(self, apply: Apply[str] | None) -> None:
        if apply is None:
            return
        assert not self.is_applying
        self.is_applying = True
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
            return  # the trainer has to get parameters first
        assert self.rounds.admit(rank, 1, round_) == "open"
        self.rounds.stage(rank, round_, Push({"w": f"round {round_} of {rank}"}, Completion(1, NUMBERS)))
        self.pushed[rank] = round_

    @rule(rank=st.integers(0, NUM_TRAINERS - 1))
    def push_again(self, rank: int) -> None:
        round_ = self.pushed[rank]
        if round_ and self.rounds.admit(rank, 1, round_) == "open":
            push = Push({"w": f"round {round_} of {rank}"}, Completion(1, NUMBERS))
            assert self.rounds.stage(rank, round_, push).num_new == 0

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
        if self.got[rank] < self.rounds.applied and self.got[rank] + 1 <= self.barriers[rank]:
            self.got[rank] = self.rounds.applied if self.k else self.got[rank] + 1

    @rule(rank=st.integers(0, NUM_TRAINERS - 1))
    def send_too_early(self, rank: int) -> None:
        with pytest.raises(FutureRound):
            self.rounds.admit(rank, 1, self.rounds.applied + 1 + self.k + 1)

    @invariant()
    def nothing_deadlocks(self) -> None:
        assert self.rounds.applied >= min(self.barriers) or self.is_applying

    @invariant()
    def no_more_rounds_are_staged_than_may_be(self) -> None:
        staged = {round_ for round_, _, _ in self.rounds.staged()}
        assert staged <= {*range(self.rounds.open, self.rounds.open + 1 + self.k)}


TestRoundsAhead = RoundsAhead.TestCase
TestRoundsAhead.settings = settings(max_examples=examples(90), stateful_step_count=60, deadline=None)


def complete(rounds: Rounds[str], rank: int, incarnation: int = 1) -> None:
    assert rounds.admit(rank, incarnation, rounds.open) == "open"
    rounds.stage(
        rank, rounds.open, Push({"a": payload(rank, incarnation, rounds.open, "a")}, Completion(1, LAMBDAS[0]))
    )


def test_a_change_to_no_members_applies_nothing_and_lets_the_running_apply_end():
    rounds: Rounds[str] = Rounds({0: 1, 1: 1})
    for rank in (1, 0):
        complete(rounds, rank)
    rounds.count_batch_barrier(1, 1, 1)
    assert repr(rounds) == "<Round 1 [batch barriers: 1 of 2 | waiting for: trainer 0]>"
    apply = rounds.install_members(Membership({1: 1}))
    assert apply is not None
    assert apply.ranks == (1,)
    assert rounds.install_members(Membership({})) is None
    assert rounds.applying is apply
    assert repr(rounds) == "<Round 1 [applying | waiting for: no trainer]>"
    rounds.finish_apply()
    assert rounds.applied == 1


def test_a_get_is_of_a_member_and_of_an_open_round_at_most():
    rounds: Rounds[str] = Rounds({0: 1, 1: 1}, 1)
    rounds.install_members(Membership({0: 1, 1: 1, 2: 1}, starts={2: 9}))
    for rank, newest in ((0, 2), (2, 8)):  # a joining trainer gets the version before its first round
        rounds.admit_get(rank, 1, newest)
        with pytest.raises(FutureRound):
            rounds.admit_get(rank, 1, newest + 1)
    for rank, incarnation in ((0, 2), (3, 1)):
        with raises_code("stale_trainer"):
            rounds.admit_get(rank, incarnation, 0)


def measured(rounds: Rounds[str]) -> Apply[str]:
    orders = []
    for rank, incarnation in rounds.members.items():
        complete(rounds, rank, incarnation)
        orders.append(rounds.count_batch_barrier(rank, incarnation, rounds.open))
    assert orders[:-1] == [None] * (len(orders) - 1)
    assert isinstance(orders[-1], Measure)
    return orders[-1].apply


@pytest.mark.clip
def test_rounds_that_are_staged_ahead_are_measured_one_after_the_other():
    rounds: Rounds[str] = Rounds({0: 1}, 1, clips=True)
    first = measured(rounds)
    assert repr(rounds) == "<Round 1 [measuring | waiting for: no trainer]>"
    rounds.stage(0, 2, Push({"a": "2"}, Completion(1, LAMBDAS[0])))
    assert rounds.count_batch_barrier(0, 1, 2) is None
    assert rounds.accept_norm() is first
    norm = ShardNorm("digest", 2.0)
    second = rounds.finish_apply(norm)
    assert isinstance(second, Measure)
    assert rounds.history.norms == {1: norm}
    assert second.apply.round == 2


@pytest.mark.clip
@pytest.mark.parametrize(
    ("members", "sets"), [({0: 1, 1: 1}, {}), ({0: 1}, {}), ({0: 1, 1: 2}, {}), ({0: 1}, {1: (0, 1)})]
)
def test_a_freeze_discards_the_measured_norm_and_its_end_measures_again(members, sets):
    rounds: Rounds[str] = Rounds({0: 1, 1: 1}, clips=True)
    before = measured(rounds)
    rounds.freeze()
    assert rounds.measuring is None
    order = rounds.install_members(Membership(members, sets=sets))
    if members == {0: 1, 1: 2}:
        assert order is None
        complete(rounds, 1, 2)
        order = rounds.count_batch_barrier(1, 2, 1)
    assert isinstance(order, Measure)
    is_same = members == {0: 1, 1: 1} or bool(sets)  # a lost trainer that stays in the round leaves its identity
    assert (order.apply.identity == before.identity) == is_same
    assert order.apply.identity[1] == (before.identity[1] if is_same else tuple(members.items()))


@pytest.mark.clip
def test_a_round_that_is_decided_to_be_empty_has_no_norm():
    rounds: Rounds[str] = Rounds({0: 1}, clips=True)
    measured(rounds)
    rounds.freeze()
    apply = rounds.install_members(Membership({1: 1}, starts={1: 2}, sets={1: ()}))
    assert isinstance(apply, Apply)
    assert apply.ranks == ()
    assert rounds.finish_apply() is None
    assert rounds.history.norms == {}


@pytest.mark.clip
def test_verdicts_belong_to_the_identity_of_a_measured_round():
    rounds: Rounds[str] = Rounds({0: 1}, clips=True)
    complete(rounds, 0)
    order = rounds.count_batch_barrier(0, 1, 1, is_finite=False)
    assert isinstance(order, Measure)
    assert order.apply.identity == (1, ((0, 1),), (0,))
