"""Processes are killed and come back; the result has the very bits of a run in which nothing happened."""

from __future__ import annotations

import random

import pytest

from .faulty_run import FaultyRun, expected_result

pytestmark = pytest.mark.cluster


def test_each_role_dies_once(server: str) -> None:
    with FaultyRun(100, server=server) as run:
        run.wait_for_round(10)
        run.kill(run.cluster.pservers[1])
        run.cluster.start_pserver(1)
        run.wait_for_round(30)
        run.kill(run.cluster.trainers[1])
        run.start_trainer(1)
        run.wait_for_round(50)
        run.kill(run.cluster.coordinator)
        run.wait_for_round(run.round_of(0) + 15)  # training goes on without it
        run.cluster.restart_coordinator()
        assert run.results() == [expected_result(100)] * 2
        assert run.wait_for_line("restored from disk")
        begun = [line for line in run.lines if line.startswith("[trainer 1] begin")]
        assert begun[0] == "[trainer 1] begin 0"
        assert int(begun[1].split()[-1]) >= 29


@pytest.mark.extended
@pytest.mark.parametrize("seed", range(3))
def test_everybody_dies_at_random_points(seed: int) -> None:
    chance = random.Random(seed)
    with FaultyRun(160, checkpoint_rounds=7) as run:
        for round_ in range(10, 140, 25):
            run.wait_for_round(round_)
            victims = chance.sample(["coordinator", "pserver 0", "pserver 1", "trainer 0", "trainer 1"], 2)
            for victim in victims:
                role, _, number = victim.partition(" ")
                if role == "coordinator":
                    run.kill(run.cluster.coordinator)
                    run.cluster.restart_coordinator()
                elif role == "pserver":
                    run.kill(run.cluster.pservers[int(number)])
                    run.cluster.start_pserver(int(number))
                else:
                    run.kill(run.cluster.trainers[int(number)])
                    run.start_trainer(int(number))
        assert run.results(90) == [expected_result(160)] * 2
