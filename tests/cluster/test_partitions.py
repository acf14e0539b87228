"""A trainer is cut off from one pserver only, one way or both; everybody else reaches everybody."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from .faulty_run import FaultyRun, expected_result
from .namespaces import HOST, Direction, Namespace, namespace

pytestmark = [pytest.mark.cluster, pytest.mark.extended, pytest.mark.alone, pytest.mark.timeout(120)]

LEASE = 3


@pytest.fixture
def apart() -> Iterator[Namespace]:
    with namespace() as apart:
        yield apart


def start(rounds: int, apart: Namespace, **settings: object) -> FaultyRun:
    """Trainer 1 lives apart."""
    run = FaultyRun(
        rounds, host=HOST, insecure=True, lease_seconds=LEASE, round_timeout_seconds=4, **settings
    )  # fmt: skip
    run.prefix[1] = apart.prefix
    return run


def port_of(run: FaultyRun, pserver: int) -> int:
    return int(run.cluster.status().pservers[pserver].address.rpartition(":")[2])


def test_a_partition_that_heals_within_the_lease_costs_nothing_but_time(apart: Namespace) -> None:
    directions: tuple[Direction, ...] = ("out", "in", "both")
    with start(100, apart) as run:
        for direction in directions:
            run.wait_for_round(run.round_of(0) + 10)
            apart.cut(port_of(run, 0), direction)
            stands_at = run.round_of(0)
            time.sleep(LEASE / 3)
            assert run.round_of(0) <= stands_at + 1
            apart.heal()
        assert run.results() == [expected_result(100)] * 2
        assert not [line for line in run.lines if "was lost" in line or "though alive" in line]


def test_who_stays_cut_off_is_named_and_waited_for(apart: Namespace) -> None:
    with start(60, apart) as run:
        run.wait_for_round(10)
        apart.cut(port_of(run, 0), "both")
        assert "within the round time-out of 4 s, though alive" in run.wait_for_line("trainer 1 did not reach")
        run.wait_for(lambda: run.cluster.status().waiting_for == ("trainer 1",), "the status to name trainer 1")
        apart.heal()
        assert run.results() == [expected_result(60)] * 2


@pytest.mark.parametrize("direction", ["out", "in"])
def test_the_others_go_on_without_who_stays_cut_off(apart: Namespace, direction: Direction) -> None:
    with start(60, apart, on_trainer_loss="continue") as run:
        run.wait_for_round(10)
        apart.cut(port_of(run, 0), direction)
        assert run.cluster.trainers[0].wait(30) == 0
        assert run.cluster.trainers[1].wait(30) == 1
        assert "trainer 1 did not reach" in run.wait_for_line("[trainer 1] ps_protocol.errors.Conflict")
