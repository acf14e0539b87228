"""Processes are killed and come back; the result has the very bits of a run in which nothing happened."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from .faulty_run import FaultyRun

LEASE = 2.5  # short of that, a busy machine may lose a living process
PATIENCE = 20.0  # for what takes a busy machine less, and would take minutes otherwise
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


COUNTING = {"kind": "counting", "mode": "async", "min_block_size": 64}


def test_each_role_dies_once() -> None:
    with FaultyRun(100, local_transport=False) as run:
        run.wait_for_round(10)
        run.kill(run.cluster.pservers[1])
        for _ in range(5):
            run.cluster.summary()  # as the live line of `gradpost up` asks
        run.cluster.start_pserver(1)
        run.wait_for_round(30)
        lines = [line for line in run.lines if line.startswith("[coordinator]") and '"waiting for pserver 1"' in line]
        assert len(lines) in (1, 2), lines  # the connection is reset, then refused
        run.restart_trainer(1)
        run.wait_for_round(50)
        run.kill(run.cluster.coordinator)
        run.wait_for_round(run.round_of(0) + 15)  # training goes on without it
        run.cluster.restart_coordinator()
        run.check_results()
        restored = json.loads(run.wait_for_line("restored from disk").partition("] ")[2])
        assert restored["round"] == restored["snapshot"] + restored["updates"] >= 9
        assert 0 < restored["load_seconds"] < 10 > restored["replay_seconds"] > 0
        assert json.loads(run.wait_for_line("run installed", 3).partition("] ")[2])["round"] == restored["round"]
        begun = [line for line in run.lines if line.startswith("[trainer 1] begin")]
        assert begun[0] == "[trainer 1] begin 0"
        assert int(begun[1].split()[-1]) >= 29


@pytest.mark.extended
def test_the_others_go_on_within_a_lease_and_a_trainer_that_comes_back_joins() -> None:
    with FaultyRun(300, lease_seconds=LEASE, on_trainer_loss="continue") as run:
        run.wait_for_round(10)
        begun = time.monotonic()
        run.kill(run.cluster.trainers[1])
        run.wait_for_round(run.round_of(0) + 3)
        assert time.monotonic() - begun < LEASE + PATIENCE
        assert '"trainers": [0]' in run.wait_for_line("members installed", 2)
        assert "no heartbeat for" in run.wait_for_line("trainer 1 was lost")
        run.start_trainer(1)
        run.wait_for_line("[trainer 1] begin", 2)
        run.wait_for_round(run.round_of(0) + 20, rank=1)
        assert len(set(run.results(120))) == 1


@pytest.mark.extended
def test_no_trainer_is_waited_for_beyond_the_rejoin_time_out() -> None:
    with FaultyRun(100, lease_seconds=LEASE, rejoin_timeout_seconds=1.5) as run:
        run.wait_for_round(10)
        run.kill(run.cluster.trainers[1])
        assert run.cluster.trainers[0].wait(LEASE + 1.5 + PATIENCE) == 1
        run.wait_for_line("TrainerLost: trainer 1 was lost")
        run.wait_for_line("did not come back within the rejoin time-out of 1.5 s")


@pytest.mark.extended
def test_a_rolling_restart_fails_no_step() -> None:
    """A trainer that is given up could not come back under this policy."""
    with FaultyRun(120, local_transport=False, on_trainer_loss="continue") as run:
        for index in (0, 1):
            run.wait_for_round(20 + 30 * index)
            run.restart_gracefully(index)
        run.check_results()
        assert not [line for line in run.lines if "Traceback" in line]


@pytest.mark.extended
def test_rounds_that_a_log_has_lost_are_taken_again(tmp_path: Path) -> None:
    """The log is shortened as by a power failure, and the trainers report the rounds that it lacks."""
    with FaultyRun(100, state_dir=tmp_path, checkpoint_rounds=1000) as run:
        run.wait_for_round(30)
        run.kill(run.cluster.pservers[1])
        [log] = (tmp_path / "pserver-1" / "log").glob("*.log")
        os.truncate(log, log.stat().st_size * 2 // 3)
        run.cluster.start_pserver(1)
        run.check_results()  # the loop takes the lost rounds again
        run.wait_for_line("has received round")
        run.wait_for_line("the run is rolled back")
        run.wait_for_line("must be repeated", 2)


def test_an_asynchronous_pserver_that_dies_returns_with_its_newest_checkpoint() -> None:
    with FaultyRun(150, checkpoint_rounds=25, **COUNTING) as run:
        run.wait_for_round(45)
        run.restart_pserver(1)
        restored = json.loads(run.wait_for_line("restored from disk").partition("] ")[2])
        assert restored["round"] == restored["snapshot"] >= 25
        for result in run.results(90):
            seen, steps = result.split()
            assert int(steps) >= run.rounds
            counts = [int(count) for counts in seen.split(",") for count in counts.split("/")]
            assert 0 < max(counts) <= run.rounds
