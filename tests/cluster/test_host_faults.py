"""Processes of a host that die, stop or fail: torchrun starts them again, and nobody waits for ever."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from signal import SIGKILL, SIGSTOP
from typing import Any

import pytest
import torch

from ..soaking import parametrize_sampled
from .fault_script import digest_of, loss_of, make_model
from .faulty_run import FaultyRun
from .torchrun import NUM_HOSTS, PROCESSES, WORLD, free_port, torchrun

pytestmark = [pytest.mark.cluster, pytest.mark.hosts, pytest.mark.extended, pytest.mark.timeout(180)]

SCRIPT = Path(__file__).with_name("host_fault_script.py")
ROUNDS = 60
PATIENT = "--monitor-interval=3"  # an agent that lets the others of its host say what has ended them


@contextmanager
def hosts(*options: str, **arguments: Any) -> Iterator[FaultyRun]:
    run = FaultyRun(script=SCRIPT, environment={"OMP_NUM_THREADS": "1"}, **arguments)
    port = free_port()
    run.prefix = {host: torchrun(host, port, *options) for host in range(NUM_HOSTS)}
    with run:
        yield run


def pid_of(run: FaultyRun, rank: int, life: int = 1) -> int:
    return int(run.wait_for_line(f"] process {rank} ", life).split()[-1])


def expected_result(rounds: int) -> str:
    """In one process: means of the hosts, and their mean."""
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
    for round_ in range(1, rounds + 1):
        sums = []
        for host in range(NUM_HOSTS):
            model.zero_grad()
            parts = []
            for rank in range(host * PROCESSES, (host + 1) * PROCESSES):
                loss_of(model, rank, round_).backward()
                parts.append([p.grad for p in model.parameters()])
                model.zero_grad()
            sums.append([(one + other) * (1 / PROCESSES) for one, other in zip(*parts, strict=True)])
        for parameter, one, other in zip(model.parameters(), *sums, strict=True):
            parameter.grad = (one + other) * (1 / NUM_HOSTS)
        optimizer.step()
    return f"{digest_of(model)} {rounds}"


@parametrize_sampled("rank", [3, 2], [2], ids=["a follower", "the leader"])
def test_a_host_whose_process_dies_comes_back(rank: int) -> None:
    with hosts("--max-restarts=1", "--monitor-interval=0.1", rounds=ROUNDS) as run:
        run.wait_for_round(10)
        os.kill(pid_of(run, rank), SIGKILL)
        for other in (2, 3):
            pid_of(run, other, life=2)
        assert run.results(90) == [expected_result(ROUNDS)] * NUM_HOSTS
        results = [line for line in run.lines if "] result " in line]
        assert {line.split("result ")[1] for line in results} == {expected_result(ROUNDS)}
        assert len(results) == WORLD


@pytest.mark.soak
def test_who_is_stopped_is_named_within_a_lease() -> None:
    with hosts(PATIENT, rounds=1_000_000) as run:
        run.wait_for_round(5)
        stopped = pid_of(run, 3)
        os.kill(stopped, SIGSTOP)
        run.wait_for_line("ended 2 Ended: process 1 of this host has said nothing for 2 s", seconds=15)
        run.wait_for(lambda: "Ended: process 1" in str(run.cluster.status()), "the reason at the coordinator", 10)
        os.kill(stopped, SIGKILL)


@parametrize_sampled(("rank", "other"), [(2, 3), (3, 2)], [(2, 3)])
def test_who_fails_is_named_with_the_reason(rank: int, other: int) -> None:
    with hosts(PATIENT, rounds=1_000_000, nan_at=f"{rank}:5") as run:
        text = f"process {rank % PROCESSES} of this host has failed: ValueError: no data"
        run.wait_for_line(f"ended {other} Ended: {text}")


@parametrize_sampled(("rank", "other"), [(2, 3), (3, 2)], [(3, 2)])
def test_who_has_fewer_batches_is_named(rank: int, other: int) -> None:
    with hosts(PATIENT, rounds=1_000_000, nan_at=f"{rank}:5:done") as run:
        text = f"process {rank % PROCESSES} of this host was done before the others"
        run.wait_for_line(f"ended {other} Ended: {text}")


def test_all_processes_hear_what_has_ended_the_run() -> None:
    with hosts(PATIENT, rounds=1_000_000, on_trainer_loss="fail") as run:
        run.wait_for_round(5)
        for rank in (2, 3):
            os.kill(pid_of(run, rank), SIGKILL)
        for rank in (0, 1):
            line = run.wait_for_line(f"ended {rank} TrainerLost: ")
            assert re.search(r"trainer 1 (was lost|failed)", line)


def test_a_run_that_goes_back_takes_all_processes_along() -> None:
    with hosts(rounds=ROUNDS, durability="none", checkpoint_rounds=10) as run:
        run.wait_for_round(25)
        run.kill(run.cluster.pservers[1])
        run.cluster.start_pserver(1)
        assert run.results(90) == [expected_result(ROUNDS)] * NUM_HOSTS
        results = [line for line in run.lines if "] result " in line]
        assert {line.split("result ")[1] for line in results} == {expected_result(ROUNDS)}
        rounds = [line for line in run.lines if re.search(r"] round \d+$", line)]
        assert len(rounds) > WORLD * ROUNDS  # some were taken again
