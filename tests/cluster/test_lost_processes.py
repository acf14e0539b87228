"""With policy `fail` and no log, and in a ring, the others get an error in time that names the lost process."""

from __future__ import annotations

import time
from collections.abc import Iterable
from signal import SIGCONT, SIGKILL, SIGSTOP, Signals
from typing import Any

import pytest

from .faulty_run import FaultyRun

pytestmark = pytest.mark.cluster

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


@pytest.mark.extended
def test_a_pserver_that_is_stopped_is_named() -> None:
    with endless("ps") as run:
        run.wait_for_round(3)
        run.cluster.pservers[1].signal(SIGSTOP)
        check_ends(run, range(3), "", LEASE_SECONDS + SLACK_SECONDS)
        ends = [line for line in run.lines if "] ended " in line]
        assert all("Ended: " in line or "Unreachable: " in line for line in ends), ends
        assert all("pserver 1" in line for line in ends), ends
