"""Training on a cluster gives what torch.optim gives in one process."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import cycle, product

import pytest
import torch
from torch import Tensor, nn

from ps_protocol.vocabulary import PLACEMENTS
from trainer_client import RemoteOptimizer, Session
from trainer_client.testing import LocalCluster

from ..soaking import parametrize_sampled
from .conftest import Carrier, StartCluster
from .training import (
    OPTIMIZERS,
    Parameters,
    assert_identical,
    run_all,
    train_locally,
    train_remotely,
    values,
)

pytestmark = pytest.mark.cluster
CUTS = (1, 100, 8192)  # min_block_size, in elements


@pytest.fixture(scope="module", params=[(1, 1), (3, 1)], ids=str)
def cluster(request: pytest.FixtureRequest, carrier: Carrier) -> Iterator[LocalCluster]:
    """Pservers and their torch threads; serves all runs of the matrix, one after another."""
    pservers, threads = request.param
    with LocalCluster(pservers=pservers, trainers=2, threads=threads, **carrier) as cluster:
        yield cluster


# CI takes every optimizer with one cut.
@parametrize_sampled(("name", "cut"), product(OPTIMIZERS, CUTS), [*zip(OPTIMIZERS, cycle(CUTS))])
def test_same_gradients_give_the_bits_of_one_process(cluster: LocalCluster, name: str, cut: int) -> None:
    expected = train_locally(name)
    train = partial(train_remotely, name)
    for actual in run_all(cluster, train, min_block_size=cut):
        assert_identical(actual, expected)


@parametrize_sampled(("placement", "cut"), product(PLACEMENTS, CUTS), [*zip(PLACEMENTS, CUTS, strict=True)])
def test_cuts_and_placement_change_no_bit(cluster: LocalCluster, cut: int, placement: str) -> None:
    expected = train_locally("Adam")
    train = partial(train_remotely, "Adam")
    for actual in run_all(cluster, train, min_block_size=cut, placement=placement):
        assert_identical(actual, expected)


LARGE, FEW = 200_000, 1000


@pytest.mark.parametrize("max_delay", [0, pytest.param(2, marks=pytest.mark.extended)])
def test_frozen_parameters_travel_only_when_they_change(own_cluster: StartCluster, max_delay: int) -> None:
    def make() -> Parameters:
        return {"backbone": nn.Parameter(torch.ones(LARGE)), "head": nn.Parameter(torch.ones(FEW))}

    def take_step(optimizer: torch.optim.Optimizer, parameters: Parameters, step: int) -> None:
        for name, parameter in parameters.items():
            parameter.grad = torch.full_like(parameter, 0.5) if name == "head" or step == 3 else None
        optimizer.step()

    def train(session: Session) -> tuple[dict[str, Tensor], list[float]]:
        parameters, counter = make(), session.client.metrics.pulled_bytes._value
        optimizer = RemoteOptimizer(torch.optim.SGD(parameters.items(), lr=0.1), session=session)
        pulled = []
        for step in range(6):
            before = counter.get()
            take_step(optimizer, parameters, step)
            optimizer.synchronize()
            pulled.append(counter.get() - before)
        return values(parameters), pulled

    expected = make()
    optimizer = torch.optim.SGD(expected.values(), lr=0.1, fused=True)
    for step in range(6):
        take_step(optimizer, expected, step)
    for actual, pulled in run_all(own_cluster(max_delay=max_delay), train):
        assert_identical(actual, values(expected))
        assert pulled[3] > 4 * LARGE
        if max_delay == 0:  # else each set of receive buffers has to be filled once
            assert all(size < 4 * FEW + 4000 for step, size in enumerate(pulled) if step not in (0, 3))
