"""Several processes of a host are one trainer: two hosts, with two processes each."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from signal import SIGKILL
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer_client.testing import LocalCluster

from . import faulty_run
from .faulty_run import FaultyRun
from .host_script import IN_SYNC, ROUNDING, play
from .test_failover import start_standbys, wait_for_status
from .trainer_processes import NUM_HOSTS, PROCESSES, WORLD, fork_hosts, free_port, torchrun
from .training import Oracle, assert_close, assert_identical, train_net_locally

pytestmark = [pytest.mark.cluster, pytest.mark.hosts, pytest.mark.timeout(240)]
LATE, EARLY = list(IN_SYNC)[:2]
CUT = {"min_block_size": 100}  # parameters that are cut
OWN_GROUPS = {"GLOO_SOCKET_IFNAME": "lo"}  # of the script, on any machine
Found = dict[str, list[dict[str, Tensor]]]  # by function of the script, what each process found


def run(cluster: LocalCluster, folder: Path, *names: str) -> Found:
    codes = fork_hosts(play, {"GRADPOST_COORDINATOR": cluster.address, **OWN_GROUPS}, folder, names)
    assert codes == [0] * WORLD, "\n".join(cluster.output)
    return {
        name: [torch.load(folder / f"{name}-{rank}.pt", weights_only=True) for rank in range(WORLD)] for name in names
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Found]:
    with LocalCluster(pservers=2, trainers=NUM_HOSTS, **CUT, lease_seconds=5) as cluster:
        yield run(cluster, tmp_path_factory.mktemp("hosts"), *IN_SYNC)


def assert_all_identical(found: list[dict[str, Tensor]]) -> None:
    for one in found:
        assert_identical(one, found[0])


def assert_like_one_process(found: Found) -> None:
    assert_all_identical([*found[LATE], *found[EARLY]])
    assert_close(found[LATE][0], train_net_locally("AdamW", num_trainers=WORLD), ROUNDING, ROUNDING)


@pytest.mark.extended
@pytest.mark.parametrize("name", IN_SYNC)
def test_two_hosts_are_two_trainers(found: Found, name: str) -> None:
    assert_all_identical(found[name])
    if name in (LATE, EARLY):
        assert_like_one_process(found)


@pytest.mark.extended
def test_a_ring_of_hosts(tmp_path: Path) -> None:
    with LocalCluster(pservers=0, trainers=NUM_HOSTS, lease_seconds=5, strategy="ring") as cluster:
        assert_like_one_process(run(cluster, tmp_path, LATE, EARLY))


@pytest.mark.extended
@pytest.mark.parametrize("settings", [{"max_delay": 1}, {"mode": "async"}], ids=str)
def test_other_modes(tmp_path: Path, settings: dict[str, Any]) -> None:
    with LocalCluster(pservers=2, trainers=NUM_HOSTS, **CUT, lease_seconds=5, **settings) as cluster:
        found = run(cluster, tmp_path, "delayed")["delayed"]
    assert_identical(found[0], found[1])  # of one host
    assert_identical(found[2], found[3])
    if "mode" not in settings:
        assert_identical(found[0], found[2])


ROUNDS, FOREVER = 60, 1_000_000
PATIENT = "--monitor-interval=3"  # an agent that lets the others of its host print what has ended them


@contextmanager
def hosts(*options: str, **arguments: Any) -> Iterator[FaultyRun]:
    run = FaultyRun(environment={"OMP_NUM_THREADS": "1"}, **arguments)
    port = free_port()
    run.prefix = {host: torchrun(host, port, *options) for host in range(NUM_HOSTS)}
    with run:
        yield run


def assert_same_results(run: FaultyRun, rounds: int = ROUNDS) -> None:
    """Compare the results of all processes with those of one process: means of the hosts, and their mean."""
    ranks = [range(host * PROCESSES, (host + 1) * PROCESSES) for host in range(NUM_HOSTS)]
    expected = Oracle(ranks).result(rounds)
    assert run.results(90) == [expected] * NUM_HOSTS
    assert [line.split("result ")[1] for line in run.lines if "] result " in line] == [expected] * WORLD


def pid_of(run: FaultyRun, rank: int, life: int = 1) -> int:
    return int(run.wait_for_line(f"] process {rank} ", life).split()[-1])


@pytest.mark.extended
def test_a_host_whose_leader_dies_comes_back() -> None:
    with hosts("--max-restarts=1", "--monitor-interval=0.1", rounds=ROUNDS) as run:
        run.wait_for_round(10)
        os.kill(pid_of(run, 2), SIGKILL)
        for rank in (2, 3):
            pid_of(run, rank, life=2)
        assert_same_results(run)


@pytest.mark.parametrize(
    ("trouble", "ended", "reason"),
    [
        ("2:5:raise", 3, "process 0 of this host has failed: ValueError: no data"),
        ("3:5:stop", 2, "process 1 of this host was done before the others"),
    ],
)
@pytest.mark.extended
def test_a_process_that_fails_or_has_fewer_batches_is_named(trouble: str, ended: int, reason: str) -> None:
    with hosts(PATIENT, rounds=FOREVER, trouble=trouble) as run:
        run.wait_for_line(f"ended {ended} Ended: {reason}")


@pytest.mark.extended
def test_all_processes_hear_what_has_ended_the_run() -> None:
    with hosts(PATIENT, rounds=FOREVER, on_trainer_loss="fail") as run:
        run.wait_for_round(5)
        for rank in (2, 3):
            os.kill(pid_of(run, rank), SIGKILL)
        for rank in (0, 1):
            line = run.wait_for_line(f"ended {rank} TrainerLost: ")
            assert re.search(r"trainer 1 (was lost|failed)", line)


@pytest.mark.extended
def test_a_fail_over_takes_all_processes_along(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faulty_run, "ROUND_SECONDS", 0.06)  # so that the run lasts until the standbys are in sync
    with hosts(rounds=240, durability="replicated") as run:
        start_standbys(run)
        run.kill(run.cluster.pservers[0])
        wait_for_status(run, "incarnation 2")
        assert_same_results(run, 240)


@pytest.mark.extended
def test_a_run_that_goes_back_takes_all_processes_along() -> None:
    with hosts(rounds=ROUNDS, durability="none", checkpoint_rounds=10) as run:
        run.wait_for_round(25)
        run.restart_pserver(1)
        assert_same_results(run)
        rounds = [line for line in run.lines if re.search(r"] round \d+$", line)]
        assert len(rounds) > WORLD * ROUNDS  # some were taken again
