"""The synchronous round as a state machine: what its interleavings could miss, one by one."""

from __future__ import annotations

import pytest

from ps_protocol.errors import ContributionConflict, ContributionMissing, FutureRound
from ps_protocol.membership import Membership
from ps_protocol.norms import ShardNorm
from services.pserver.rounds import Apply, Measure, Rounds

from ...raising import raises_code
from .test_round_interleavings import LAMBDAS, payload, snapshot


def complete(rounds: Rounds[str], rank: int, incarnation: int = 1) -> None:
    assert rounds.admit(rank, incarnation, rounds.open) == "open"
    rounds.stage_blocks(rank, {"a": payload(rank, incarnation, rounds.open, "a")}, 1, LAMBDAS[0])


def apply_round(rounds: Rounds[str]) -> Apply[str]:
    applies = []
    for rank, incarnation in rounds.members.items():
        complete(rounds, rank, incarnation)
        applies.append(rounds.count_batch_barrier(rank, incarnation, rounds.open))
    [apply] = [a for a in applies if a is not None]
    assert applies[-1] is apply
    rounds.finish_apply()
    return apply


def test_a_round_is_ordered_by_its_last_batch_barrier():
    rounds: Rounds[str] = Rounds({0: 1, 1: 1})
    assert repr(rounds) == "<Round 1 [batch barriers: 0 of 2 | waiting for: trainer 0, trainer 1]>"
    complete(rounds, 1)
    assert rounds.count_batch_barrier(1, 1, 1) is None
    assert repr(rounds) == "<Round 1 [batch barriers: 1 of 2 | waiting for: trainer 0]>"
    complete(rounds, 0)
    apply = rounds.count_batch_barrier(0, 1, 1)
    assert apply is not None
    assert apply.ranks == (0, 1)  # not the order of arrival
    assert [c.blocks["a"] for c in apply.contributions] == [payload(0, 1, 1, "a"), payload(1, 1, 1, "a")]
    assert repr(rounds) == "<Round 1 [applying | waiting for: nobody]>"
    rounds.finish_apply()
    assert (rounds.applied, rounds.open, rounds.contributions) == (1, 2, {})


def test_a_barrier_that_is_sent_twice_counts_once():
    rounds: Rounds[str] = Rounds({0: 1, 1: 1})
    complete(rounds, 0)
    assert rounds.count_batch_barrier(0, 1, 1) is None
    assert rounds.count_batch_barrier(0, 1, 1) is None
    assert rounds.missing == [1]


def test_a_barrier_that_is_repeated_while_its_round_is_applied_orders_no_second_apply():
    rounds: Rounds[str] = Rounds({0: 1})
    complete(rounds, 0)
    assert rounds.count_batch_barrier(0, 1, 1) is not None
    assert rounds.count_batch_barrier(0, 1, 1) is None


def test_a_late_batch_barrier_of_an_applied_round_does_not_count_for_the_open_one():
    rounds: Rounds[str] = Rounds({0: 1, 1: 1})
    apply_round(rounds)
    complete(rounds, 0)
    assert rounds.count_batch_barrier(0, 1, 1) is None
    assert rounds.missing == [0, 1]


@pytest.mark.parametrize("said", [None, (3, LAMBDAS[0])])
def test_contribution_missing_until_it_is_complete(said):
    rounds: Rounds[str] = Rounds({0: 1})
    with pytest.raises(ContributionMissing, match="trainer 0"):
        rounds.count_batch_barrier(0, 1, 1)
    rounds.stage_blocks(0, {"a": "1", "b": "2"}, *(said or (None, None)))
    with pytest.raises(ContributionMissing) as caught:
        rounds.count_batch_barrier(0, 1, 1)
    assert caught.value.facts["actual"] == 2
    assert rounds.batch_barriers == set()
    rounds.stage_blocks(0, {"c": "3"}, 3, LAMBDAS[0])
    assert rounds.count_batch_barrier(0, 1, 1) is not None


def test_an_empty_contribution_takes_part_once_it_says_so():
    rounds: Rounds[str] = Rounds({0: 1})
    rounds.stage_blocks(0, {}, None, None)
    with pytest.raises(ContributionMissing):
        rounds.count_batch_barrier(0, 1, 1)
    rounds.stage_blocks(0, {}, 0, LAMBDAS[0])
    apply = rounds.count_batch_barrier(0, 1, 1)
    assert apply is not None
    assert apply.contributions[0].blocks == {}


def test_a_bucket_is_only_packaging():
    rounds: Rounds[str] = Rounds({0: 1})
    assert rounds.stage_blocks(0, {"a": "1", "b": "2"}, None, None) == 2
    assert rounds.stage_blocks(0, {"b": "2", "c": "3"}, 3, LAMBDAS[0]) == 1
    assert rounds.stage_blocks(0, {"a": "1", "b": "2", "c": "3"}, 3, LAMBDAS[0]) == 0


@pytest.mark.parametrize(
    ("blocks", "said"),
    [
        ({"a": "other", "z": "9"}, (None, None)),
        ({"z": "9"}, (None, None)),  # more blocks than it said
        ({}, (1, LAMBDAS[0])),  # another number, smaller
        ({}, (3, LAMBDAS[0])),  # and larger
        ({}, (2, LAMBDAS[1])),  # other numbers for the optimizer: each pserver could keep another one of them
    ],
)
def test_other_content_under_one_identity_is_a_conflict_and_stages_nothing(blocks, said):
    rounds: Rounds[str] = Rounds({0: 1})
    rounds.stage_blocks(0, {"a": "1", "b": "2"}, 2, LAMBDAS[0])
    before = snapshot(rounds)
    with pytest.raises(ContributionConflict, match="trainer 0"):
        rounds.stage_blocks(0, blocks, *said)
    assert snapshot(rounds) == before


def test_a_refused_message_of_the_open_round_does_not_prove_the_last_fetch():
    rounds: Rounds[str] = Rounds({0: 1})
    apply_round(rounds)
    rounds.admit(0, 1, 2)
    with pytest.raises(ContributionMissing):
        rounds.count_batch_barrier(0, 1, 2)
    assert rounds.fetch_barriers == set()


def test_any_accepted_message_of_the_next_round_implies_the_fetch_barrier():
    rounds: Rounds[str] = Rounds({0: 1})
    apply_round(rounds)
    complete(rounds, 0)
    assert rounds.fetch_barriers == {0}


def test_a_fetch_barrier_of_a_round_that_was_not_applied_is_refused():
    rounds: Rounds[str] = Rounds({0: 1})
    with pytest.raises(FutureRound, match="nothing of it was fetched"):
        rounds.count_fetch_barrier(0, 1, 1)
    rounds.count_fetch_barrier(0, 1, 0)  # version 0 can be read, too
    assert rounds.fetch_barriers == {0}


def test_who_leaves_takes_back_what_it_staged_and_lets_the_others_go_on():
    rounds: Rounds[str] = Rounds({0: 1, 1: 1, 2: 1})
    for rank in (0, 1, 2):
        complete(rounds, rank)
    rounds.count_batch_barrier(0, 1, 1)
    rounds.count_batch_barrier(1, 1, 1)
    apply = rounds.install_members(Membership({1: 1, 2: 1}))
    assert apply is None
    apply = rounds.install_members(Membership({1: 1}))
    assert apply is not None
    assert apply.ranks == (1,)
    assert rounds.install_members(Membership({})) is None  # an empty set applies nothing, and the apply goes on
    assert rounds.applying is apply
    rounds.finish_apply()
    assert rounds.applied == 1


def test_what_is_being_applied_stays_when_its_trainer_leaves():
    rounds: Rounds[str] = Rounds({0: 1, 1: 1})
    complete(rounds, 0)
    complete(rounds, 1)
    rounds.count_batch_barrier(0, 1, 1)
    apply = rounds.count_batch_barrier(1, 1, 1)
    assert rounds.install_members(Membership({0: 1})) is None
    assert rounds.applying is apply
    assert apply is not None
    assert [c.blocks for c in apply.contributions] == [{"a": payload(r, 1, 1, "a")} for r in (0, 1)]


def test_a_new_life_of_a_rank_starts_with_nothing_staged():
    rounds: Rounds[str] = Rounds({0: 1, 1: 1})
    complete(rounds, 0)
    rounds.count_batch_barrier(0, 1, 1)
    rounds.install_members(Membership({0: 2, 1: 1}))
    with raises_code("stale_trainer", match="trainer 0 incarnation 1"):
        rounds.admit(0, 1, 1)
    with pytest.raises(ContributionMissing):
        rounds.count_batch_barrier(0, 2, 1)
    assert rounds.missing == [0, 1]


# ---------------------------------------------------------------- clipping


def measured(rounds: Rounds[str]) -> Apply[str]:
    orders = []
    for rank, incarnation in rounds.members.items():
        complete(rounds, rank, incarnation)
        orders.append(rounds.count_batch_barrier(rank, incarnation, rounds.open))
    assert orders[:-1] == [None] * (len(orders) - 1)
    assert isinstance(orders[-1], Measure)
    return orders[-1].apply


@pytest.mark.clip
def test_a_round_that_is_clipped_is_applied_when_its_norm_is_known():
    rounds: Rounds[str] = Rounds({0: 1, 1: 1}, clips=True)
    apply = measured(rounds)
    assert repr(rounds) == "<Round 1 [measuring | waiting for: nobody]>"
    assert rounds.count_batch_barrier(0, 1, 1) is None
    assert rounds.accept_norm() is apply
    assert (rounds.measuring, rounds.applying) == (None, apply)
    norm = ShardNorm("digest", 2.0)
    assert rounds.finish_apply(norm) is None
    assert rounds.history.norms == {1: norm}


@pytest.mark.clip
def test_rounds_that_are_staged_ahead_are_measured_one_after_the_other():
    rounds: Rounds[str] = Rounds({0: 1}, 1, clips=True)
    first = measured(rounds)
    rounds.stage_blocks(0, {"a": "2"}, 1, LAMBDAS[0], 2)
    assert rounds.count_batch_barrier(0, 1, 2) is None
    assert rounds.accept_norm() is first
    second = rounds.finish_apply()
    assert isinstance(second, Measure)
    assert second.apply.round == 2


@pytest.mark.clip
@pytest.mark.parametrize("members", [{0: 1, 1: 1}, {0: 1}, {0: 1, 1: 2}])
def test_a_freeze_forgets_what_was_measured_and_its_end_measures_again(members):
    rounds: Rounds[str] = Rounds({0: 1, 1: 1}, clips=True)
    before = measured(rounds)
    rounds.freeze()
    assert rounds.measuring is None
    order = rounds.install_members(Membership(members))
    if members == {0: 1, 1: 2}:
        assert order is None
        complete(rounds, 1, 2)
        order = rounds.count_batch_barrier(1, 2, 1)
    assert isinstance(order, Measure)
    assert (order.apply.identity == before.identity) == (members == {0: 1, 1: 1})
    assert order.apply.identity[1] == tuple(members.items())


@pytest.mark.clip
def test_what_was_measured_with_a_lost_trainer_is_so_again_if_it_is_in_the_round():
    """Another pserver has applied it already, with the norm that everybody has agreed on."""
    rounds: Rounds[str] = Rounds({0: 1, 1: 1}, clips=True)
    before = measured(rounds)
    rounds.freeze()
    order = rounds.install_members(Membership({0: 1}, sets={1: (0, 1)}))
    assert isinstance(order, Measure)
    assert order.apply.identity == before.identity


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
def test_verdicts_belong_to_the_identity_of_what_is_measured():
    rounds: Rounds[str] = Rounds({0: 1}, clips=True)
    complete(rounds, 0)
    order = rounds.count_batch_barrier(0, 1, 1, is_finite=False)
    assert isinstance(order, Measure)
    assert order.apply.identity == (1, ((0, 1),), (0,))
