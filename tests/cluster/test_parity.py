"""Asynchronous modes and delayed steps lose nothing, and keep within their bounds."""

from __future__ import annotations

import random
import time
from itertools import pairwise

import pytest
import torch
from torch import nn

from gradpost import RemoteOptimizer, Session

from .conftest import StartCluster
from .training import (
    run_trainers,
)

pytestmark = pytest.mark.cluster


def play(address: str, num_trainers: int, steps: int, seed: int) -> list[list[list[int]]]:
    """Train with trainers that are slow at random. Return for each trainer and step how many steps of each it has.

    Each trainer has elements of its own in every block and counts in them.
    """

    def train(session: Session) -> list[list[int]]:
        weight = nn.Parameter(torch.zeros(99))
        optimizer = RemoteOptimizer(torch.optim.SGD([("weight", weight)], lr=1), session=session)
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


@pytest.mark.timeout(300)
def test_max_staleness_is_never_exceeded_and_is_reached(own_cluster: StartCluster) -> None:
    cluster = own_cluster(trainers=3, mode="ssp", max_staleness=2, min_block_size=10)
    played = play(cluster.address, 3, 40, seed=2)
    leads = [step - min(held) for trainer in played for step, held in enumerate(trainer)]
    assert max(leads) == 2
    assert sum(lead > 0 for lead in leads) > 4  # it is not accidentally synchronous


@pytest.mark.timeout(300)
@pytest.mark.extended
def test_max_delay_is_never_exceeded_and_is_reached(own_cluster: StartCluster) -> None:
    played = play(own_cluster(mode="async", max_delay=3, min_block_size=10).address, 2, 30, seed=3)
    for rank, trainer in enumerate(played):
        own = [held[rank] for held in trainer]
        assert max(step - count for step, count in enumerate(own)) == 3
        assert all(new >= old for old, new in pairwise(own))
