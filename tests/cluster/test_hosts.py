"""Several processes of a host are one trainer: two hosts, with two processes each."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from signal import SIGKILL
from typing import Any

import pytest

from .faulty_run import FaultyRun
from .trainer_processes import NUM_HOSTS, PROCESSES, WORLD, free_port, torchrun
from .training import Oracle

pytestmark = [pytest.mark.cluster, pytest.mark.extended, pytest.mark.hosts, pytest.mark.timeout(240)]

ROUNDS, FOREVER = 60, 1_000_000
PATIENT = "--monitor-interval=3"  # an agent that lets the others of its host print what has ended them


@contextmanager
def hosts(*options: str, **arguments: Any) -> Iterator[FaultyRun]:
    run = FaultyRun(environment={"OMP_NUM_THREADS": "1"}, **arguments)
    port = free_port()
    run.prefix = {host: torchrun(host, port, *options) for host in range(NUM_HOSTS)}
    with run:
        yield run


def assert_same_results(run: FaultyRun) -> None:
    """Compare the results of all processes with those of one process: means of the hosts, and their mean."""
    ranks = [range(host * PROCESSES, (host + 1) * PROCESSES) for host in range(NUM_HOSTS)]
    expected = Oracle(ranks).result(ROUNDS)
    assert run.results(90) == [expected] * NUM_HOSTS
    assert [line.split("result ")[1] for line in run.lines if "] result " in line] == [expected] * WORLD


def pid_of(run: FaultyRun, rank: int, life: int = 1) -> int:
    return int(run.wait_for_line(f"] process {rank} ", life).split()[-1])


def test_the_processes_of_hosts_in_a_ring_have_one_model() -> None:
    with hosts(rounds=ROUNDS, strategy="ring", pservers=0) as run:
        run.results(90)
        found = re.findall(r"^\[trainer (\d)\] result (.*)$", "\n".join(run.lines), re.MULTILINE)
    assert len(found) == WORLD
    assert len({result for _, result in found}) == 1


def test_a_host_whose_leader_dies_comes_back() -> None:
    with hosts("--max-restarts=1", "--monitor-interval=0.1", rounds=ROUNDS) as run:
        run.wait_for_round(10)
        os.kill(pid_of(run, 2), SIGKILL)
        for rank in (2, 3):
            pid_of(run, rank, life=2)
        assert_same_results(run)


@pytest.mark.parametrize(("trouble", "ended"), [("3:5:stop", 2), ("2:5:hang", 3)])
def test_a_process_that_hangs_or_has_fewer_batches_ends_the_others(trouble: str, ended: int) -> None:
    with hosts(PATIENT, rounds=FOREVER, trouble=trouble, round_timeout_seconds=5) as run:
        run.wait_for_line(f"ended {ended} Ended: another process of this host has ended, failed or hangs")


def test_all_processes_hear_what_has_ended_the_run() -> None:
    with hosts(PATIENT, rounds=FOREVER, on_trainer_loss="fail") as run:
        run.wait_for_round(5)
        for rank in (2, 3):
            os.kill(pid_of(run, rank), SIGKILL)
        for rank in (0, 1):
            line = run.wait_for_line(f"ended {rank} TrainerLost: ")
            assert re.search(r"trainer 1 (was lost|failed)", line)
