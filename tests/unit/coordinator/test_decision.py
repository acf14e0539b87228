"""Where another life of a trainer begins, and what its former one has left."""

from __future__ import annotations

from ps_protocol.membership import FrozenRounds, Membership
from services.coordinator.decision import Rollback, decide, decide_steps

TWO = Membership({0: 1, 1: 1})


def test_another_life_goes_on_with_the_oldest_step_that_is_open_to_its_rank():
    """However many contributions of all trainers the pservers have applied."""
    answers = [FrozenRounds(applied=22, opens={0: 7, 1: 17}), FrozenRounds(applied=30, opens={0: 8, 1: 24})]
    assert decide_steps(TWO, {0: 2, 1: 1}, answers, take_over=[0]) == Membership({0: 2, 1: 1}, starts={0: 7})


def test_nobody_has_to_wait_for_one_who_comes_in_besides():
    answers = [FrozenRounds(applied=22, opens={0: 7, 1: 17}), FrozenRounds(applied=30, opens={0: 8, 1: 18})]
    assert decide_steps(TWO, {0: 2, 1: 1}, answers).starts == {0: 17}
    assert decide_steps(TWO, {0: 1, 1: 2}, answers).starts == {1: 17}  # its own is later


def test_what_a_pserver_has_lost_is_not_taken_again():
    answers = [FrozenRounds(applied=60, opens={0: 31, 1: 30}), FrozenRounds(applied=4, opens={0: 3})]
    assert decide_steps(TWO, {0: 2, 1: 2}, answers, take_over=[0, 1]).starts == {0: 30, 1: 29}
    assert decide_steps(TWO, {0: 2}, answers, take_over=[0], max_delay=2).starts == {0: 28}


def test_who_goes_leaves_no_step_behind():
    answers = [FrozenRounds(applied=22, opens={0: 7, 1: 17})]
    assert decide_steps(TWO, {1: 1}, answers) == Membership({1: 1})


def test_a_start_is_remembered_for_pservers_that_come_back():
    answers = [FrozenRounds(applied=22, opens={0: 7, 1: 17})]
    resumed = Membership({0: 1, 1: 1}, starts={0: 5, 1: 9})
    assert decide_steps(resumed, {0: 1, 1: 2}, answers, take_over=[1]).starts == {0: 5, 1: 17}
    nothing = [FrozenRounds(applied=0)]
    assert decide_steps(resumed, {0: 1, 1: 2}, nothing, take_over=[1]).starts == {0: 5, 1: 9}


def test_what_a_former_life_has_put_into_an_open_round_is_not_forgotten_at_the_next_change():
    """Else the round would be made without its rank, which begins with the round after it."""
    holds = FrozenRounds(applied=60, complete={61: (0, 1)}, counted={61: (1,)})
    first = decide(Membership({0: 2, 1: 1}), {0: 2, 1: 2}, [holds, holds], take_over=[1])
    assert isinstance(first, Membership)
    assert (first.sets, first.starts) == ({61: (0, 1)}, {1: 62})
    again = decide(first, {0: 2, 1: 2}, [holds, holds])
    assert isinstance(again, Membership)
    assert (again.sets, again.starts) == ({61: (0, 1)}, {1: 62})
    lost = FrozenRounds(applied=60)
    assert decide(first, {0: 2, 1: 2}, [holds, lost]) == Rollback(60)


def test_nobody_takes_over_a_round_that_was_applied_without_its_rank():
    """Its former life had come in besides, and was to begin with the round after."""
    before = Membership({0: 1, 1: 1, 2: 1}, starts={2: 8}, sets={7: (0, 1)})
    answers = [FrozenRounds(applied=7, participants={7: (0, 1)}), FrozenRounds(applied=6, complete={7: (0, 1)})]
    decided = decide(before, {0: 1, 1: 1, 2: 2}, answers, take_over=[2])
    assert isinstance(decided, Membership)
    assert (decided.starts, decided.sets) == ({2: 8}, {7: (0, 1), 8: (0, 1, 2)})


def test_when_nobody_is_left_all_pservers_still_end_at_the_same_round():
    """A pserver has applied round 7 with both, another holds it: whoever joins next must find the same on both."""
    applied = FrozenRounds(applied=7, participants={7: (0, 1)})
    holds = FrozenRounds(applied=6, complete={7: (0, 1)}, counted={7: (1,)})
    assert decide(TWO, {}, [applied, holds]) == Membership({}, sets={7: (0, 1)})
    assert decide(TWO, {}, [applied, FrozenRounds(applied=6)]) == Rollback(6)
    assert decide(TWO, {}, [applied, applied]) == Membership({})
    counted = FrozenRounds(applied=6, complete={7: (0,)}, counted={7: (0,)})
    assert decide(TWO, {}, [counted, counted]) == Membership({}, sets={7: (0,)})


def test_who_waits_is_told_its_first_round_though_the_change_was_made_again():
    """Its round is the open one by then, but that it does not know."""
    open_ = FrozenRounds(applied=25, participants={25: (0, 1)})
    waits = Membership({0: 1, 1: 2}, {1: 26}, {26: (0, 1)})
    assert decide(waits, {0: 1, 1: 2}, [open_, open_]) == Membership({0: 1, 1: 2}, {1: 26}, {26: (0, 1)})
