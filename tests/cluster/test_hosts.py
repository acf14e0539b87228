"""Several processes of a host are one trainer: two hosts, with two processes each."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from signal import SIGKILL, SIGSTOP
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer_client.testing import LocalCluster

from .faulty_run import FaultyRun
from .host_script import drop_gradients, play
from .trainer_processes import NUM_HOSTS, PROCESSES, WORLD, fork_hosts, free_port, torchrun
from .training import (
    Oracle,
    Parameters,
    assert_close,
    assert_identical,
    average,
    change_rates,
    make_optimizer,
    make_parameters,
    set_gradients,
    train_net_locally,
    values,
)

pytestmark = [pytest.mark.cluster, pytest.mark.hosts, pytest.mark.timeout(240)]
IN_SYNC = (
    *("late", "early", "streaming", "clipped", "unequal", "start", "refused", "sharing"),
    *("pulling", "averaging", "different", "scaled", "scaled_early", "kept", "broken_off", "contract"),
)
ROUNDING = 1e-5
CUT = {"min_block_size": 100}  # parameters that are cut
OWN_GROUPS = {"GLOO_SOCKET_IFNAME": "lo"}  # of the script, on any machine
Found = dict[str, list[dict[str, Tensor]]]  # by function of the script, what each process found


def run(cluster: LocalCluster, folder: Path, *names: str) -> Found:
    codes = fork_hosts(play, {"GRADPOST_COORDINATOR": cluster.address, **OWN_GROUPS}, folder, names)
    assert codes == [0] * WORLD, "\n".join(cluster.output)
    return read(folder, *names)


def read(folder: Path, *names: str) -> Found:
    return {
        name: [torch.load(folder / f"{name}-{rank}.pt", weights_only=True) for rank in range(WORLD)] for name in names
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Found]:
    with LocalCluster(pservers=2, trainers=NUM_HOSTS, **CUT, lease_seconds=5) as cluster:
        yield run(cluster, tmp_path_factory.mktemp("hosts"), *IN_SYNC)


def assert_near(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert_close(actual, expected, ROUNDING, ROUNDING)


def test_the_results_are_those_of_one_process_with_all_batches(found: Found) -> None:
    for one in found["late"]:
        assert_identical(one, found["late"][0])
    assert_near(found["late"][0], train_net_locally("AdamW", num_trainers=WORLD))


def test_overlap_changes_no_bit(found: Found) -> None:
    for one in found["early"]:
        assert_identical(one, found["late"][0])


def test_the_engines_of_a_host_follow_the_contract(found: Found) -> None:
    for one in found["contract"]:
        assert_identical(one, found["contract"][0])


def test_buckets_go_on_while_backward_runs(found: Found) -> None:
    assert found["streaming"] == [{}] * WORLD


def mean_gradients(
    parameters: Parameters, step: int, drop: Callable[..., None] = lambda *_, **__: None
) -> list[Tensor | None]:
    gradients = []
    for rank in range(WORLD):
        set_gradients(parameters, step, rank)
        drop(step, parameters, rank=rank)
        gradients.append([parameter.grad for parameter in parameters.values()])
    return average(gradients)


def test_every_process_knows_the_norm_of_the_aggregated_gradient(found: Found) -> None:
    parameters, expected = make_parameters(), []
    for step in range(3):
        means = [mean.reshape(-1) for mean in mean_gradients(parameters, step) if mean is not None]
        expected.append(torch.cat(means).norm())
    for one in found["clipped"]:
        assert_near(one, {"norms": torch.stack(expected)})


def test_processes_may_have_different_gradients(found: Found) -> None:
    parameters = make_parameters()
    optimizer = make_optimizer("AdamW", parameters, local=True)
    for step in range(6):
        means = mean_gradients(parameters, step, drop_gradients)
        for parameter, mean in zip(parameters.values(), means, strict=True):
            parameter.grad = mean
        assert (parameters["bias"].grad is not None) == (step % 4 != 1)
        optimizer.step()
        change_rates(optimizer, step)
    for one in found["unequal"]:
        assert_near(one, values(parameters))


def test_all_start_from_the_same_buffers(found: Found) -> None:
    for one in found["start"]:
        assert_identical(one, found["start"][0])
    assert {tensor.double().mean().item() for tensor in found["start"][3].values()} == {5.0, 1.0}


def test_a_gradient_that_is_refused_is_refused_for_the_host(found: Found) -> None:
    assert [int(one["told"]) for one in found["refused"]] == [0, 0, 1, 1]
    for one in found["refused"]:
        assert one["weight"].tolist() == [-6.0] * 4


def test_another_gradient_after_a_step_that_failed_is_refused_for_the_host(found: Found) -> None:
    for one in found["broken_off"]:
        assert one["weight"].tolist() == [-1.0] * 4


@pytest.mark.amp
@pytest.mark.parametrize("name", ["scaled", "scaled_early"])
def test_the_scale_is_the_same_in_all_processes(found: Found, name: str) -> None:
    for one in found[name]:
        assert one["scales"].tolist() == [1024.0, 1024.0, 2048.0, 2048.0, 1024.0, 1024.0]
        assert one["biases"].diff(dim=0)[:, 0].tolist() == pytest.approx([-0.5, -0.5, 0.0, -0.5, -0.5])


def test_checkpoints_of_scripts_have_slots_in_one_process(found: Found) -> None:
    for one in found["kept"]:
        assert one["weight"].tolist() == [-1.0 - 1.5 - 1.0] * 3  # the momentum was set to 0


def test_a_script_s_own_process_group_stays_its_own(found: Found) -> None:
    for one in found["sharing"]:
        assert one["weight"].tolist() == [-4.5] * 3
        assert one["total"].item() == WORLD**3


def test_what_is_for_single_processes_is_refused_in_all(found: Found) -> None:
    assert found["pulling"] == found["different"] == [{}] * WORLD


def test_all_processes_get_the_mean_of_the_first_processes_buffers(found: Found) -> None:
    processes = WORLD // NUM_HOSTS
    mean = torch.tensor([rank for rank in range(WORLD) if rank % processes == 0], dtype=torch.float32).mean()
    for one in found["averaging"]:
        assert one["1.running_mean"].tolist() == [mean] * 2


@pytest.mark.extended
def test_a_ring_of_hosts(tmp_path: Path) -> None:
    with LocalCluster(pservers=0, trainers=NUM_HOSTS, lease_seconds=5, strategy="ring") as cluster:
        found = run(cluster, tmp_path, "late", "early")
    for one in (*found["late"], *found["early"]):
        assert_identical(one, found["late"][0])
    assert_near(found["late"][0], train_net_locally("AdamW", num_trainers=WORLD))


@pytest.mark.extended
@pytest.mark.parametrize("settings", [{"max_delay": 1}, {"mode": "async"}], ids=str)
def test_other_modes(tmp_path: Path, settings: dict[str, Any]) -> None:
    with LocalCluster(pservers=2, trainers=NUM_HOSTS, **CUT, lease_seconds=5, **settings) as cluster:
        names = ["delayed", "scaled"] if "max_delay" in settings else ["delayed"]
        every = run(cluster, tmp_path, *names)
    if "scaled" in every:  # what becomes of a round counts a step later, in all processes
        scales = [1024.0, 1024.0, 1024.0, 2048.0, 2048.0, 1024.0]
        assert [one["scales"].tolist() for one in every["scaled"]] == [scales] * WORLD
    found = every["delayed"]
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


def assert_same_results(run: FaultyRun) -> None:
    """Compare the results of all processes with those of one process: means of the hosts, and their mean."""
    ranks = [range(host * PROCESSES, (host + 1) * PROCESSES) for host in range(NUM_HOSTS)]
    expected = Oracle(ranks).result(ROUNDS)
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


@pytest.mark.soak
@pytest.mark.extended
def test_a_stopped_process_is_named_within_a_lease() -> None:
    with hosts(PATIENT, rounds=FOREVER) as run:
        run.wait_for_round(5)
        stopped = pid_of(run, 3)
        os.kill(stopped, SIGSTOP)
        run.wait_for_line("ended 2 Ended: process 1 of this host has said nothing for 2 s", seconds=15)
        run.wait_for(lambda: "Ended: process 1" in str(run.cluster.status()), "the reason at the coordinator", 10)
        os.kill(stopped, SIGKILL)


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
def test_a_run_that_goes_back_takes_all_processes_along() -> None:
    with hosts(rounds=ROUNDS, durability="none", checkpoint_rounds=10) as run:
        run.wait_for_round(25)
        run.restart_pserver(1)
        assert_same_results(run)
        rounds = [line for line in run.lines if re.search(r"] round \d+$", line)]
        assert len(rounds) > WORLD * ROUNDS  # some were taken again
