"""Two processes want to be the same pserver: one of them serves, and the other is told why it does not."""

from __future__ import annotations

from pathlib import Path
from signal import SIGCONT, SIGSTOP

import pytest

from .faulty_run import FaultyRun, expected_result

pytestmark = [pytest.mark.cluster, pytest.mark.extended, pytest.mark.timeout(120)]


def test_a_folder_that_is_in_use_is_refused() -> None:
    with FaultyRun(80) as run:
        run.wait_for_round(5)
        first = run.cluster.pservers[1]
        second = run.cluster.start_pserver(1)
        run.cluster.pservers[1] = first
        assert second.wait(30) == 1
        assert "is in use by another process" in run.wait_for_line("is in use by another process")
        assert run.results() == [expected_result(80)] * 2
        assert not [line for line in run.lines if "Traceback" in line]


def test_an_index_is_given_away_only_when_its_lease_has_ended_and_then_for_good(tmp_path: Path) -> None:
    """The second process has nothing on its disk, so the run goes back to the newest checkpoint in the shared place."""
    settings = {"checkpoints": tmp_path / "checkpoints", "checkpoint_rounds": 5, "lease_seconds": 1.5}
    with FaultyRun(250, state_dir=tmp_path / "first", **settings) as run:
        run.wait_for_round(5)
        first = run.cluster.pservers[1]
        address = run.cluster.status().pservers[1].address
        try:
            run.cluster.start_pserver(1, GRADPOST_STATE_DIR=str(tmp_path / "second"))
            run.wait_for_line(f"a living pserver at {address} has index 1")
            run.wait_for_round(run.round_of(0) + 5)
            first.signal(SIGSTOP)
            assert "the run is rolled back" in run.wait_for_line("the run is rolled back")
            run.wait_for_round(run.round_of(0) + 5)
            first.signal(SIGCONT)
            run.wait_for_line("the coordinator does not know this pserver any more")
            newer = run.cluster.status().pservers[1].address
            run.wait_for_line(f"a living pserver at {newer} has index 1")
            assert run.results() == [expected_result(250)] * 2
        finally:
            first.stop()
