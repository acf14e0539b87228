"""What trainers reckon their scale from: the lowest rank's state and the rounds that were skipped."""

from __future__ import annotations

from typing import Any

import pytest

from ps_protocol.grad_scalers import ScalerState
from trainer_client.amp.scale_agreement import ScaleAgreement

FACTORS: dict[str, Any] = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2}
OWN = ScalerState(0, 8.0, 0)


@pytest.fixture
def agreement() -> ScaleAgreement:
    return ScaleAgreement()


def tell(agreement: ScaleAgreement, newest: int, state: ScalerState | None = None, *skipped: int, keep: int = 2) -> Any:
    return agreement.tell(dict.fromkeys(skipped, (1,)), state, newest=newest, keep=keep)


def test_of_itself_it_goes_by_the_outcomes(agreement: ScaleAgreement) -> None:
    tell(agreement, 1)
    assert agreement.state_after(1, OWN, **FACTORS) == ScalerState(1, 8.0, 1)
    tell(agreement, 2)
    assert agreement.state_after(2, OWN, **FACTORS) == ScalerState(2, 16.0, 0)
    tell(agreement, 3, None, 3)
    assert agreement.state_after(3, OWN, **FACTORS) == ScalerState(3, 8.0, 0)


def test_what_the_lowest_rank_had_counts_instead(agreement: ScaleAgreement) -> None:
    tell(agreement, 7, ScalerState(6, 1024.0, 1))
    assert agreement.state_after(7, OWN, **FACTORS) == ScalerState(7, 2048.0, 0)


def test_with_delay_a_later_state_is_reckoned_from_an_earlier_one(agreement: ScaleAgreement) -> None:
    """As with max_delay 2: what was pushed in round 7 has the outcomes up to 4 in it."""
    tell(agreement, 7, ScalerState(4, 1024.0, 1), 6, keep=6)
    assert agreement.state_after(5, OWN, **FACTORS) == ScalerState(5, 2048.0, 0)
    assert agreement.state_after(6, OWN, **FACTORS) == ScalerState(6, 1024.0, 0)
    assert agreement.state_after(7, OWN, **FACTORS) == ScalerState(7, 1024.0, 1)


def test_skipped_rounds_are_told_of_once(agreement: ScaleAgreement) -> None:
    assert tell(agreement, 4, None, 3, 4) == {3: (1,), 4: (1,)}
    assert tell(agreement, 5, None, 4) == {}


def test_what_the_script_has_set_stands(agreement: ScaleAgreement) -> None:
    tell(agreement, 7, ScalerState(6, 1024.0, 0))
    agreement.set_by_script(7)
    mine = ScalerState(7, 4.0, 0)
    assert agreement.state_after(7, mine, **FACTORS) == mine
    tell(agreement, 8, ScalerState(6, 1024.0, 0))  # pushed before
    assert agreement.state_after(8, mine, **FACTORS) == ScalerState(8, 4.0, 1)
    tell(agreement, 9, ScalerState(8, 4.0, 1))
    assert agreement.state_after(9, OWN, **FACTORS) == ScalerState(9, 8.0, 0)


def test_when_the_run_goes_back_nothing_of_it_holds(agreement: ScaleAgreement) -> None:
    tell(agreement, 7, ScalerState(6, 1024.0, 0), 7)
    agreement.forget()
    assert agreement.num_returns == 1
    assert agreement.state_after(7, ScalerState(6, 8.0, 0), **FACTORS) == ScalerState(7, 8.0, 1)
    assert tell(agreement, 7, None, 7) == {7: (1,)}  # it may be skipped again


def test_what_is_pushed_is_pushed_in_the_block_alone(agreement: ScaleAgreement) -> None:
    with agreement.pushing(OWN):
        assert agreement.mine == OWN
    assert agreement.mine is None
