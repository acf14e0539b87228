"""Processes are killed and come back, with the bits of an undisturbed run; or the others get an error in time."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from signal import SIGCONT, SIGKILL, SIGSTOP, Signals
from typing import Any

import pytest

from .faulty_run import FaultyRun

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


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
def test_a_rolling_restart_fails_no_step() -> None:
    """A trainer that is given up could not come back under this policy."""
    with FaultyRun(120, local_transport=False, on_trainer_loss="continue") as run:
        for index in (0, 1):
            run.wait_for_round(20 + 30 * index)
            run.restart_gracefully(index)
        run.check_results()
        assert not [line for line in run.lines if "Traceback" in line]


def test_an_asynchronous_pserver_that_dies_returns_with_its_newest_checkpoint() -> None:
    with FaultyRun(
        70, round_seconds=0.05, checkpoint_rounds=10, kind="counting", mode="async", min_block_size=64
    ) as run:
        run.wait_for_round(25)
        run.restart_pserver(1)
        restored = json.loads(run.wait_for_line("restored from disk").partition("] ")[2])
        assert restored["round"] == restored["snapshot"] >= 10
        for result in run.results(90):
            seen, steps = result.split()
            assert int(steps) >= run.rounds
            counts = [int(count) for counts in seen.split(",") for count in counts.split("/")]
            assert 0 < max(counts) <= run.rounds


# ---------------------------------------------------------------------- lost processes are named


LEASE_SECONDS = 2.0
ROUND_TIMEOUT_SECONDS = 2.0
SLACK_SECONDS = 15.0  # for a busy machine; without an end of waits it would take minutes
SETTINGS: dict[str, Any] = {
    "trainers": 3,
    "lease_seconds": LEASE_SECONDS,
    "round_timeout_seconds": ROUND_TIMEOUT_SECONDS,
}
FOREVER = 1_000_000
OF_STRATEGY: dict[str, dict[str, Any]] = {
    "ps": {"on_trainer_loss": "fail", "durability": "none"},
    "ring": {"strategy": "ring", "pservers": 0},
}


def endless(strategy: str, trouble: str = "", **settings: Any) -> FaultyRun:
    return FaultyRun(FOREVER, trouble=trouble, **{**SETTINGS, **OF_STRATEGY[strategy], **settings})


def check_ends(run: FaultyRun, ranks: Iterable[int], error: str, seconds: float) -> None:
    """Check that these trainers end with the error within a time."""
    begun = time.monotonic()
    for rank in ranks:
        run.wait_for_line(f"ended {rank} {error}", of=f"trainer {rank}")
    assert time.monotonic() - begun < seconds


@pytest.mark.parametrize(
    ("strategy", "number"), [("ps", SIGKILL), pytest.param("ring", SIGSTOP, marks=pytest.mark.ring)]
)
def test_a_killed_or_stopped_trainer_is_named(strategy: str, number: Signals) -> None:
    with endless(strategy) as run:
        run.wait_for_round(3, rank=1)
        run.cluster.trainers[1].signal(number)
        lost = "TrainerLost: trainer 1 was lost: no heartbeat for"
        check_ends(run, (0, 2), lost, LEASE_SECONDS + SLACK_SECONDS)
        failure = run.cluster.status().failure
        assert failure is not None
        assert failure["ranks"] == [1]
        if number == SIGSTOP:
            run.cluster.trainers[1].signal(SIGCONT)
            run.wait_for_line(f"ended 1 {lost}")  # it gets the same error when it continues
        newest = max(run.round_of(rank) for rank in range(3))
        rounds = [run.cluster.view.pserver_state(index).round for index in range(run.cluster.num_pservers)]
        assert rounds in ([newest] * len(rounds), [newest + 1] * len(rounds))
        run.rounds = 3
        for rank in range(3):  # the cluster serves another run
            run.restart_trainer(rank)
        run.results()


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        pytest.param(
            "ps",
            "trainer 2 did not reach the batch barrier of round 4 within the round time-out of 2 s",
            marks=pytest.mark.extended,
        ),
        pytest.param("ring", "trainer 2 did not contribute to round 4 in the ring", marks=pytest.mark.ring),
    ],
)
def test_a_trainer_that_hangs_while_its_heartbeats_live_is_named(strategy: str, said: str) -> None:
    with endless(strategy, "2:3:hang") as run:
        run.wait_for_round(3, rank=2)
        check_ends(run, (0, 1), f"RoundTimeout: {said}", ROUND_TIMEOUT_SECONDS + SLACK_SECONDS)
        failure = run.cluster.status().failure
        assert failure is not None
        assert (failure["code"], failure["missing"]) == ("round_timeout", [2])  # not a trainer that stopped waiting


@pytest.mark.ring
def test_the_death_of_a_trainer_without_batches_ends_the_run_of_those_with_some() -> None:
    with endless("ring", "0:4:stop") as run:
        run.wait_for_round(8, rank=1)
        run.cluster.trainers[0].signal(SIGKILL)
        check_ends(run, (1, 2), "TrainerLost", LEASE_SECONDS + SLACK_SECONDS)
        assert run.cluster.status().state == "failed"
