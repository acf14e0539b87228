"""Pservers and trainers of the asynchronous modes die and come back: every contribution is applied exactly once."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from signal import SIGKILL
from typing import Any

import pytest
import torch
from torch import Tensor

from ps_protocol.optimizers import check_optimizer
from ps_protocol.vocabulary import ParameterSpec
from trainer_client import ParameterClient
from trainer_client.testing import LocalCluster

from ..soaking import parametrize_sampled
from .conftest import Carrier
from .counting_script import SIZES
from .faulty_run import FaultyRun, wait_for_state

SCRIPT = Path(__file__).with_name("counting_script.py")
ROUNDS = 150
SGD = check_optimizer("SGD", [{"nesterov": False, "maximize": False}])
NUMBERS = [{"lr": 1.0, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0}]

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


def counting(rounds: int = ROUNDS, **settings: Any) -> FaultyRun:
    """A run in which a get waits for the trainer's own updates only, so that trainers drift apart."""
    assert len(SIZES) > 2
    return FaultyRun(rounds, script=SCRIPT, **{"mode": "async", "durability": "log", "min_block_size": 64, **settings})


def assert_all_applied(run: FaultyRun) -> None:
    """Each trainer has seen all of its own contributions; and who was last, those of everybody.

    The first to end may see the others' steps half, or not all.
    """
    seen, steps = zip(*(result.split() for result in run.results(90)), strict=True)
    assert min(map(int, steps)) >= ROUNDS
    assert ",".join(steps) in seen
    for rank, counts in enumerate(seen):
        assert counts.split(",")[rank] == steps[rank]


def kill_between_checkpoints(run: FaultyRun, state: Path) -> None:
    """Some steps after the first checkpoint pserver 1 dies; the next one would have been far away."""
    run.wait_for(lambda: any(state.glob("checkpoints/*/*/manifest.json")), "a checkpoint")
    run.wait_for_round(run.round_of(0) + 5)
    run.kill(run.cluster.pservers[1])


@pytest.mark.extended
def test_each_role_dies_once(carrier: Carrier) -> None:
    with counting(**carrier, checkpoint_rounds=40) as run:
        run.wait_for_round(20)
        run.kill(run.cluster.pservers[1])
        run.cluster.start_pserver(1)
        run.wait_for_round(run.round_of(0) + 30)
        run.kill(run.cluster.trainers[1])
        run.start_trainer(1)
        run.kill(run.cluster.coordinator)
        run.wait_for_round(run.round_of(0) + 10)
        run.cluster.restart_coordinator()
        assert_all_applied(run)
        begun = [int(line.split()[-1]) for line in run.lines if line.startswith("[trainer 1] begin")]
        assert begun[1] >= 30


@pytest.mark.extended
@parametrize_sampled(
    "name", ["log.append.before", "log.append.after", "apply.before", "apply.after"], sample=["apply.before"]
)
def test_a_pserver_dies_at_each_point_and_nothing_is_lost(name: str) -> None:
    with counting(mode="ssp", max_staleness=2) as run:
        run.wait_for_round(3)
        run.kill(run.cluster.pservers[1])
        run.cluster.start_pserver(1, GRADPOST_FAILPOINTS=f"{name}=kill@40")
        run.cluster.pservers[1].wait(40)
        run.cluster.start_pserver(1)
        assert_all_applied(run)


@pytest.mark.extended
@parametrize_sampled(
    "name", ["checkpoint.rename", "checkpoint.shard", "freeze.after", "install.before"], sample=["checkpoint.shard"]
)
def test_a_pserver_dies_in_a_checkpoint_or_a_change_and_nothing_is_lost(name: str) -> None:
    with counting(checkpoint_rounds=15) as run:
        run.wait_for_round(3)
        run.kill(run.cluster.pservers[1])
        run.cluster.start_pserver(1, GRADPOST_FAILPOINTS=f"{name}=kill@2")
        run.wait_for_rounds_or_death(3, run.cluster.pservers[1])
        run.kill(run.cluster.trainers[1])
        run.start_trainer(1)
        run.cluster.pservers[1].wait(40)
        run.cluster.start_pserver(1)
        assert_all_applied(run)


@pytest.mark.extended
@pytest.mark.parametrize(
    "rules",
    [
        {"max_delay": 2},
        pytest.param({"mode": "ssp", "max_staleness": 0, "read_consistency": "shard"}, marks=pytest.mark.soak),
        pytest.param({"compensation": "dc"}, marks=pytest.mark.soak),
        pytest.param({"wait_for_apply": False}, marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_nothing_is_lost_under_other_rules(rules: dict[str, Any]) -> None:
    with counting(checkpoint_rounds=25, **rules) as run:
        for index in (0, 1):
            run.wait_for_round(20 + 50 * index)
            run.kill(run.cluster.pservers[index])
            run.cluster.start_pserver(index)
        if rules.get("wait_for_apply", True):
            assert_all_applied(run)
        else:
            run.results(90)
            assert {run.cluster.pserver_state(index).round for index in (0, 1)} == {2 * ROUNDS}


@pytest.mark.extended
def test_a_rolling_restart_loses_nothing_even_without_a_log() -> None:
    with counting(durability="none") as run:
        for index in (0, 1):
            run.wait_for_round(20 + 50 * index)
            run.restart_gracefully(index)
        assert_all_applied(run)


@pytest.mark.extended
def test_without_a_log_a_killed_pserver_goes_on_from_its_checkpoint_and_says_what_is_lost(tmp_path: Path) -> None:
    with counting(durability="none", state_dir=tmp_path, checkpoint_rounds=60) as run:
        kill_between_checkpoints(run, tmp_path)
        run.cluster.start_pserver(1)
        results = [result.split()[0] for result in run.results(90)]
        lost = run.wait_for_line("steps that an earlier incarnation of this pserver acknowledged are lost")
        assert "[pserver 1]" in lost
        assert all("/" in result for result in results)  # pserver 0 has all of them
        assert run.cluster.pserver_state(0).round == 2 * ROUNDS


@pytest.mark.extended
def test_a_pserver_that_has_lost_its_disk_goes_on_from_a_shared_checkpoint(tmp_path: Path) -> None:
    with counting(state_dir=tmp_path, checkpoint_rounds=60) as run:
        kill_between_checkpoints(run, tmp_path)
        shutil.rmtree(tmp_path / "pserver-1")
        run.cluster.start_pserver(1)
        results = [result.split()[0] for result in run.results(90)]
        run.wait_for_line("steps that an earlier incarnation of this pserver acknowledged are lost")
        assert all("/" in result for result in results)
        assert run.cluster.pserver_state(0).round == 2 * ROUNDS


@pytest.mark.asyncio
@pytest.mark.extended
@parametrize_sampled("policy", ["fail", "continue"], ["fail"])
async def test_no_trainer_is_blamed_for_a_pserver_that_is_away_longer_than_the_round_time_out(policy: str) -> None:
    """Trainer 1 cannot get step 1 from pserver 1, so at pserver 0 trainer 0 waits in vain for step 2 of trainer 1."""
    specs = [ParameterSpec(name, (10,)) for name in "ab"]
    gradient = {spec.name: torch.ones(spec.shape) for spec in specs}
    rules = {"mode": "ssp", "max_staleness": 0, "durability": "log", "on_trainer_loss": policy}
    with LocalCluster(pservers=2, trainers=2, lease_seconds=2, round_timeout_seconds=3, **rules) as cluster:

        async def begin(client: ParameterClient, rank: int) -> None:
            await client.declare(specs, SGD)
            if client.uploader == rank:
                await client.send_initial({spec.name: torch.zeros(spec.shape) for spec in specs})
            await client.get(0)
            await client.send(1, gradient, NUMBERS)

        async def go_on(client: ParameterClient) -> dict[str, Tensor]:
            await client.get(1)
            await client.send(2, gradient, NUMBERS)
            return await client.get(2)

        async with ParameterClient(cluster.address, rank=0) as first, ParameterClient(cluster.address, rank=1) as other:
            await asyncio.gather(begin(first, 0), begin(other, 1))
            ahead = asyncio.create_task(go_on(first))
            await asyncio.to_thread(wait_for_state, cluster, lambda state: state.missing == (1,))
            cluster.pservers[1].signal(SIGKILL)
            behind = asyncio.create_task(go_on(other))
            await asyncio.to_thread(wait_for_state, cluster, lambda state: state.waiting_seconds > 5)
            cluster.start_pserver(1)
            for values in await asyncio.gather(ahead, behind):
                assert all(torch.equal(values[spec.name], torch.full((10,), -4.0)) for spec in specs)


@pytest.mark.extended
def test_who_comes_back_under_continue_need_not_catch_up() -> None:
    with counting(1000, mode="ssp", max_staleness=3, on_trainer_loss="continue", lease_seconds=1) as run:
        run.wait_for_round(10, rank=1)
        run.kill(run.cluster.trainers[1])
        run.wait_for_round(run.round_of(1) + 40)  # beyond the bound: nobody waits for it any more
        run.start_trainer(1)
        run.wait_for_line("[trainer 1] begin", 2)
        before = run.round_of(0)
        assert run.round_of(1) >= 45
        run.wait_for_round(before + 50)
        assert abs(run.round_of(0) - run.round_of(1)) <= 3 + 2
