"""Training gives what torch.optim gives in one process; asynchronous modes lose nothing, within their bounds."""

from __future__ import annotations

import random
import time
from functools import partial
from itertools import pairwise, product

import pytest
import torch
from torch import nn

from ps_protocol.vocabulary import PLACEMENTS
from trainer_client import RemoteOptimizer, Session

from ..soaking import parametrize_sampled
from .conftest import StartCluster
from .training import (
    OPTIMIZERS,
    assert_identical,
    run_all,
    run_trainers,
    train_locally,
    train_remotely,
)

pytestmark = pytest.mark.cluster

CUTS = (1, 100, 8192)  # min_block_size, in elements


# The golden runs have every optimizer.
@parametrize_sampled(
    ("name", "cut", "placement"),
    product(OPTIMIZERS, CUTS, PLACEMENTS),
    [*zip(("SGD-nesterov", "Adam", "Adagrad"), CUTS, PLACEMENTS, strict=True)],
)
def test_same_gradients_give_the_bits_of_one_process(
    own_cluster: StartCluster, name: str, cut: int, placement: str
) -> None:
    expected = train_locally(name)
    cluster = own_cluster(pservers=3, min_block_size=cut, placement=placement)
    for actual in run_all(cluster, partial(train_remotely, name)):
        assert_identical(actual, expected)


# ---------------------------------------------------------------------- async


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


@pytest.mark.timeout(300)
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


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("delay", "mode"), [(1, "sync"), (3, "async")])
@pytest.mark.extended
def test_max_delay_is_never_exceeded_and_is_reached(own_cluster: StartCluster, mode: str, delay: int) -> None:
    cluster = own_cluster(mode=mode, max_delay=delay, min_block_size=10)
    played = play(cluster.address, 2, 30, seed=delay)
    for rank, trainer in enumerate(played):
        own = [held[rank] for held in trainer]
        assert max(step - count for step, count in enumerate(own)) == delay
        assert all(new >= old for old, new in pairwise(own))
