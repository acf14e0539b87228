"""Decisions on members and rollbacks: the rounds in which incarnations of a trainer begin."""

from __future__ import annotations

from ps_protocol.membership import FrozenRounds, Membership
from services.coordinator.state.decision import Rollback, decide_rounds, decide_steps, newest_common

TWO = Membership({0: 1, 1: 1})


def test_steps_that_a_pserver_has_lost_are_not_repeated():
    answers = [FrozenRounds(applied=60, opens={0: 31, 1: 30}), FrozenRounds(applied=4, opens={0: 3})]
    assert decide_steps(TWO, {0: 2, 1: 2}, answers, take_over=[0, 1]).starts == {0: 30, 1: 29}
    assert decide_steps(TWO, {0: 2}, answers, take_over=[0], max_delay=2).starts == {0: 28}


def test_a_run_goes_back_to_a_round_that_every_pserver_can_restore():
    assert newest_common(9, [[(8, 12), (0, 5)], [(0, 7)]]) == 5
    assert newest_common(9, [[(8, 12)], [(0, 7)]]) is None


def test_a_start_is_kept_for_pservers_that_are_restored():
    answers = [FrozenRounds(applied=22, opens={0: 7, 1: 17})]
    resumed = Membership({0: 1, 1: 1}, starts={0: 5, 1: 9})
    assert decide_steps(resumed, {0: 1, 1: 2}, answers, take_over=[1]).starts == {0: 5, 1: 17}
    nothing = [FrozenRounds(applied=0)]
    assert decide_steps(resumed, {0: 1, 1: 2}, nothing, take_over=[1]).starts == {0: 5, 1: 9}


def test_contributions_of_an_earlier_incarnation_to_an_open_round_are_kept_at_the_next_change():
    """Otherwise the round would lack its rank, which begins with the round after it."""
    holds = FrozenRounds(applied=60, complete={61: (0, 1)}, counted={61: (1,)})
    first = decide_rounds(Membership({0: 2, 1: 1}), {0: 2, 1: 2}, [holds, holds], take_over=[1])
    assert isinstance(first, Membership)
    assert (first.sets, first.starts) == ({61: (0, 1)}, {1: 62})
    again = decide_rounds(first, {0: 2, 1: 2}, [holds, holds])
    assert isinstance(again, Membership)
    assert (again.sets, again.starts) == ({61: (0, 1)}, {1: 62})
    lost = FrozenRounds(applied=60)
    assert decide_rounds(first, {0: 2, 1: 2}, [holds, lost]) == Rollback(60)


def test_a_round_that_was_applied_without_a_rank_is_not_taken_over_by_it():
    """Its earlier incarnation was new in the run, and would have begun with the round after."""
    before = Membership({0: 1, 1: 1, 2: 1}, starts={2: 8}, sets={7: (0, 1)})
    answers = [FrozenRounds(applied=7, participants={7: (0, 1)}), FrozenRounds(applied=6, complete={7: (0, 1)})]
    decided = decide_rounds(before, {0: 1, 1: 1, 2: 2}, answers, take_over=[2])
    assert isinstance(decided, Membership)
    assert (decided.starts, decided.sets) == ({2: 8}, {7: (0, 1), 8: (0, 1, 2)})


def test_without_trainers_all_pservers_end_at_the_same_round():
    """One pserver has applied round 7 with both trainers, and another one has staged it."""
    applied = FrozenRounds(applied=7, participants={7: (0, 1)})
    holds = FrozenRounds(applied=6, complete={7: (0, 1)}, counted={7: (1,)})
    assert decide_rounds(TWO, {}, [applied, holds]) == Membership({}, sets={7: (0, 1)})
    assert decide_rounds(TWO, {}, [applied, FrozenRounds(applied=6)]) == Rollback(6)
    assert decide_rounds(TWO, {}, [applied, applied]) == Membership({})
    counted = FrozenRounds(applied=6, complete={7: (0,)}, counted={7: (0,)})
    assert decide_rounds(TWO, {}, [counted, counted]) == Membership({}, sets={7: (0,)})


def test_a_waiting_trainer_keeps_its_first_round_when_the_change_is_repeated():
    """Its first round is open by then, which the trainer does not know yet."""
    open_ = FrozenRounds(applied=25, participants={25: (0, 1)})
    waits = Membership({0: 1, 1: 2}, {1: 26}, {26: (0, 1)})
    assert decide_rounds(waits, {0: 1, 1: 2}, [open_, open_]) == Membership({0: 1, 1: 2}, {1: 26}, {26: (0, 1)})


def test_a_counted_contribution_of_a_trainer_that_left_is_in_its_open_round_unless_it_was_left_out():
    staged = FrozenRounds(applied=6, complete={7: (0, 1)})
    counted = FrozenRounds(applied=6, complete={7: (0, 1)}, counted={7: (1,)})
    left_out = Membership({0: 1, 1: 1}, sets={7: (0,)})
    cases = (TWO, [staged] * 2, (0,)), (TWO, [staged, counted], (0, 1)), (left_out, [counted], (0,))
    for before, answers, ranks in cases:
        decided = decide_rounds(before, {0: 1}, answers)
        assert isinstance(decided, Membership)
        assert decided.sets == {7: ranks}


def test_the_verdict_of_a_predecessor_does_not_count_for_its_successor() -> None:
    """The pserver has not installed the successor, as an earlier decision that was recorded wanted it to."""
    recorded = Membership({0: 1, 1: 3}, starts={1: 1}, sets={1: (0, 1)})
    has_predecessor = FrozenRounds(applied=0, complete={1: (0, 1)}, counted={1: (1,)}, verdicts={1: (1,)})
    decided = decide_rounds(recorded, {0: 1, 1: 3}, [has_predecessor, FrozenRounds(applied=0)], take_over=[1])
    assert decided == recorded
