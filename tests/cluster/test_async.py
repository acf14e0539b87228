"""The asynchronous modes on real clusters: nothing is lost or counted twice, what a get may see, and the bounds."""

from __future__ import annotations

import asyncio
import math
import random
import shutil
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch import nn

from ps_protocol.errors import NonFiniteGradient
from ps_protocol.vocabulary import ParameterSpec
from trainer_client import ParameterClient, RemoteOptimizer, Session
from trainer_client.pushing.buckets import Bucket

from ..raising import raises_code
from ..soaking import parametrize_sampled
from .conftest import StartCluster
from .faulty_run import FaultyRun
from .training import NUMBERS, SGD, run_all, run_trainers, step_with, wrap_weight

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


async def join_run(client: ParameterClient, specs: Sequence[ParameterSpec], value: float = 0.0) -> None:
    """Declare the model and upload the initial values, if this client is the uploader."""
    await client.declare(specs, SGD)
    if client.uploader == client.joined.rank:
        await client.send_initial({spec.name: torch.full(spec.shape, value) for spec in specs})
    await client.get(0)


def play(address: str, num_trainers: int, steps: int, seed: int) -> list[list[list[int]]]:
    """Train with trainers that are slow at random. Return for each trainer and step how many steps of each it has.

    Each trainer has elements of its own in every block and counts in them.
    """

    def train(session: Session) -> list[list[int]]:
        weight = nn.Parameter(torch.zeros(99))
        rate = num_trainers if session.mode == "sync" else 1  # rounds are averaged
        optimizer = RemoteOptimizer(torch.optim.SGD([("weight", weight)], lr=rate), session=session)
        chance = random.Random(seed * 100 + session.rank)
        held = []
        for _ in range(steps):
            held.append([-round(weight[rank::num_trainers].max().item()) for rank in range(num_trainers)])
            if chance.random() < 0.3:
                time.sleep(chance.uniform(0.01, 0.06))
            weight.grad = torch.zeros(99)
            weight.grad[session.rank :: num_trainers] = 1
            optimizer.step()
        return held

    return run_trainers(address, [train] * num_trainers)


@pytest.mark.parametrize(
    ("bound", "delay"),
    [(2, 0), pytest.param(2, 3, marks=pytest.mark.extended)],
)
def test_max_staleness_is_never_exceeded_and_is_reached(own_cluster: StartCluster, bound: int, delay: int) -> None:
    settings = {"mode": "ssp", "max_staleness": bound, "max_delay": delay, "min_block_size": 10}
    played = play(own_cluster(trainers=3, **settings).address, 3, 40, seed=bound)
    leads = [step - min(held) for trainer in played for step, held in enumerate(trainer)]
    if delay:
        assert bound < max(leads) <= bound + delay  # a step may begin so much ahead of the get that it starts on
    else:
        assert max(leads) == bound
    assert sum(lead > 0 for lead in leads) > 4  # it is not accidentally synchronous


@pytest.mark.parametrize(("delay", "mode"), [(1, "sync"), (3, "async")])
@pytest.mark.extended
def test_max_delay_is_never_exceeded_and_is_reached(own_cluster: StartCluster, mode: str, delay: int) -> None:
    cluster = own_cluster(mode=mode, max_delay=delay, min_block_size=10)
    played = play(cluster.address, 2, 30, seed=delay)
    for rank, trainer in enumerate(played):
        own = [held[rank] for held in trainer]
        assert max(step - count for step, count in enumerate(own)) == delay
        assert all(new >= old for old, new in pairwise(own))


def test_a_trainer_that_expects_another_mode_gets_the_difference(own_cluster: StartCluster) -> None:
    served = {"mode": "ssp", "max_staleness": 3}
    cluster = own_cluster(pservers=1, trainers=1, **served)
    with raises_code("mode_mismatch") as refused:
        Session(coordinator=cluster.address, mode="ssp", max_staleness=5)
    assert refused.value.facts["expected"] == {"max_staleness": 3}
    assert refused.value.facts["actual"] == {"max_staleness": 5}
    Session(coordinator=cluster.address, **served).close()


@pytest.mark.parametrize("delay", [0, 2])
@pytest.mark.extended
def test_a_step_that_could_not_begin_or_is_refused_holds_no_trainer_up(
    own_cluster: StartCluster, delay: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    def train(session: Session) -> float:
        weight, optimizer = wrap_weight(session, 100)
        step_with(optimizer, weight)
        if delay == 0:  # else the script would have to be started again
            with monkeypatch.context() as patch:
                patch.setattr(Bucket, "fill", interrupt)
                with pytest.raises(KeyboardInterrupt):
                    step_with(optimizer, weight, value=2.0)
            optimizer.synchronize()  # finishes it
        with pytest.raises(NonFiniteGradient):  # noqa: PT012 - with a delay a later step raises it
            for gradient in (math.nan, 10.0, 20.0):
                step_with(optimizer, weight, value=gradient)
            optimizer.synchronize()
        for _ in range(4):
            step_with(optimizer, weight)
        optimizer.synchronize()
        return weight[0].item()

    cluster = own_cluster(pservers=1, trainers=1, max_delay=delay)
    assert run_all(cluster, train) == [-5.0 if delay else -7.0]


@pytest.mark.asyncio
@pytest.mark.extended
async def test_a_trainer_may_leave_after_a_step_that_is_queued_everywhere(own_cluster: StartCluster) -> None:
    cluster = own_cluster(pservers=1, trainers=1, mode="async")
    async with ParameterClient(cluster.address, rank=0, world_size=1) as client:
        await join_run(client, [ParameterSpec("w", (4,))])
        await client.send(1, {"w": torch.ones(4)}, NUMBERS)
    assert cluster.status().state == "finished"


@pytest.mark.asyncio
@pytest.mark.extended
async def test_a_change_does_not_wait_until_no_push_waits_for_the_log(own_cluster: StartCluster) -> None:
    """Eight trainers push 8 MB as fast as they can, so that at the end of each fsync other pushes wait."""
    num_trainers, spec = 8, ParameterSpec("w", (2_000_000,))
    cluster = own_cluster(pservers=1, trainers=num_trainers, mode="async", durability="fsync")
    begun, stop = asyncio.Semaphore(0), asyncio.Event()

    async def train(rank: int) -> None:
        async with ParameterClient(cluster.address, rank=rank) as client:
            await join_run(client, [spec])
            step = 0
            while not stop.is_set():
                step += 1
                await client.send(step, {"w": torch.ones(spec.shape)}, NUMBERS)
                await client.get(step)
                begun.release()

    trainers = [asyncio.create_task(train(rank)) for rank in range(num_trainers)]
    async with httpx.AsyncClient(base_url=cluster.address, timeout=30) as http, asyncio.timeout(120):
        for _ in range(3 * num_trainers):
            await begun.acquire()
        for number in range(1, 5):
            began = time.monotonic()
            answer = await http.put("/v1/controls/rate", json={"rate": 1e-6 * number})
            assert answer.status_code == 200, answer.text
            assert time.monotonic() - began < 5
        stop.set()
        await asyncio.gather(*trainers)


ROUNDS = 150


def counting(rounds: int = ROUNDS, **settings: Any) -> FaultyRun:
    """Begin a run in which a get waits for the trainer's own updates only, so that trainers drift apart."""
    return FaultyRun(
        rounds, kind="counting", **{"mode": "async", "durability": "log", "min_block_size": 64, **settings}
    )


def assert_all_applied(run: FaultyRun) -> None:
    """Check that each trainer has seen all of its own contributions, and the last one those of all.

    The first to end may see a part of the others' steps.
    """
    seen, steps = zip(*(result.split() for result in run.results(90)), strict=True)
    assert min(map(int, steps)) >= ROUNDS
    assert ",".join(steps) in seen
    for rank, counts in enumerate(seen):
        assert counts.split(",")[rank] == steps[rank]


def kill_between_checkpoints(run: FaultyRun, state: Path) -> None:
    """Kill pserver 1 some steps after the first checkpoint, long before the next one."""
    run.wait_for(lambda: any(state.glob("checkpoints/*/*/manifest.json")), "a checkpoint")
    run.wait_for_round(run.round_of(0) + 5)
    run.kill(run.cluster.pservers[1])


@pytest.mark.extended
def test_each_role_dies_once() -> None:
    with counting(local_transport=False, checkpoint_rounds=40) as run:
        run.wait_for_round(20)
        run.restart_pserver(1)
        run.wait_for_round(run.round_of(0) + 30)
        run.restart_trainer(1)
        run.kill(run.cluster.coordinator)
        run.wait_for_round(run.round_of(0) + 10)
        run.cluster.restart_coordinator()
        assert_all_applied(run)
        begun = [int(line.split()[-1]) for line in run.lines if line.startswith("[trainer 1] begin")]
        assert begun[1] >= 30


@pytest.mark.extended
@parametrize_sampled(
    ("name", "passage"),
    [
        *((name, 40) for name in ("log.append.before", "log.append.after", "apply.before", "apply.after")),
        *((name, 2) for name in ("checkpoint.rename", "checkpoint.shard", "freeze.after", "install.before")),
    ],
    sample=[("apply.before", 40), ("checkpoint.shard", 2)],
)
def test_a_pserver_dies_at_each_point_and_nothing_is_lost(name: str, passage: int) -> None:
    with counting(mode="ssp", max_staleness=2, checkpoint_rounds=15) as run:
        run.wait_for_round(3)
        run.restart_pserver(1, GRADPOST_FAILPOINTS=f"{name}=kill@{passage}")
        if passage == 2:
            run.wait_for_rounds_or_death(3, run.cluster.pservers[1])
            run.restart_trainer(1)
        run.cluster.pservers[1].wait(40)
        run.cluster.start_pserver(1)
        assert_all_applied(run)


@pytest.mark.extended
@pytest.mark.parametrize("rules", [{"max_delay": 2}, {"compensation": "dc", "wait_for_apply": False}], ids=str)
def test_nothing_is_lost_under_other_rules(rules: dict[str, Any]) -> None:
    with counting(checkpoint_rounds=25, **rules) as run:
        for index in (0, 1):
            run.wait_for_round(20 + 50 * index)
            run.restart_pserver(index)
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
@pytest.mark.parametrize("durability", ["none", "log"])
def test_a_pserver_without_a_log_goes_on_from_its_checkpoint_and_logs_the_loss(tmp_path: Path, durability: str) -> None:
    """Under `log` the pserver has lost its disk."""
    with counting(durability=durability, state_dir=tmp_path, checkpoint_rounds=60) as run:
        kill_between_checkpoints(run, tmp_path)
        if durability == "log":
            shutil.rmtree(tmp_path / "pserver-1")
        run.cluster.start_pserver(1)
        results = [result.split()[0] for result in run.results(90)]
        lost = run.wait_for_line("steps that an earlier incarnation of this pserver acknowledged are lost")
        assert "[pserver 1]" in lost
        assert all("/" in result for result in results)  # pserver 0 has all of them
        assert run.cluster.pserver_state(0).round == 2 * ROUNDS
