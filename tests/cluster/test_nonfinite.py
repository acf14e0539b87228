"""NaN and infinity in gradients: refused, or the round is skipped on all pservers alike."""

from __future__ import annotations

import pytest

from .conftest import Carrier
from .faulty_run import FaultyRun, expected_result

pytestmark = [pytest.mark.cluster, pytest.mark.extended, pytest.mark.timeout(300)]


def test_a_round_is_skipped_by_all_pservers_alike(carrier: Carrier) -> None:
    """The NaN is in one block on one pserver; the others learn of it by the trainer's barrier. One dies meanwhile."""
    with FaultyRun(40, **carrier, nonfinite="skip_round", nan_at="1:20", min_block_size=64) as run:
        run.wait_for_round(21)
        run.kill(run.cluster.pservers[1])
        run.cluster.start_pserver(1)
        assert run.results() == [expected_result(40, skipped={20})] * 2
        said = run.wait_for_line("round 20 was skipped on all pservers")
        assert "NaN or infinity in gradients of trainer 1" in said
        found = run.wait_for_line("NaN or infinity in a gradient")
        assert '"trainer": 1' in found
        assert '"round": 20' in found
        assert len([line for line in run.lines if "round skipped" in line]) == 2


def test_under_reject_the_trainer_fails_and_may_come_back(carrier: Carrier) -> None:
    with FaultyRun(30, **carrier, nan_at="1:10") as run:
        run.wait_for_line("NonFiniteGradient: trainer 1 pushed NaN or infinity in block '0.weight.block0' in round 10")
        assert run.cluster.trainers[1].wait(30) == 1
        run.nan_at = ""
        run.start_trainer(1)
        assert run.results() == [expected_result(30)] * 2
