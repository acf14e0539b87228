"""Where another life of a trainer begins in the asynchronous modes."""

from __future__ import annotations

from ps_protocol.messages import FrozenRounds
from services.coordinator.decision import Membership, decide


def test_another_life_goes_on_with_the_oldest_step_that_is_open_to_its_rank():
    """However many contributions of all trainers the pservers have applied."""
    answers = [FrozenRounds(applied=22, opens={0: 7, 1: 17}), FrozenRounds(applied=30, opens={0: 8, 1: 24})]
    assert decide(Membership({0: 1, 1: 1}), {0: 2, 1: 1}, answers) == Membership({0: 2, 1: 1}, starts={0: 7})


def test_who_goes_leaves_no_step_behind():
    answers = [FrozenRounds(applied=22, opens={0: 7, 1: 17})]
    assert decide(Membership({0: 1, 1: 1}), {1: 1}, answers) == Membership({1: 1})
