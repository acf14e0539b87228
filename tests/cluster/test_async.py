"""The asynchronous modes on real clusters: nothing is lost or counted twice, what a get may see, and the bounds."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from torch import nn

from ps_protocol.errors import NonFiniteGradient
from ps_protocol.vocabulary import ParameterSpec
from trainer_client import ParameterClient, RemoteOptimizer, Session
from trainer_client.client.buckets import Bucket

from .conftest import StartCluster
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
