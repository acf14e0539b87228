"""What does not change does not travel, and is still right."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from trainer_client import RemoteOptimizer, Session
from trainer_client.testing import LocalCluster

from .conftest import Carrier
from .parity_model import run_trainers

pytestmark = pytest.mark.cluster

LARGE, SMALL = 200_000, 1000
STEPS = 6


@pytest.fixture(scope="module", params=[0, pytest.param(2, marks=pytest.mark.extended)], ids="max_delay={}".format)
def max_delay(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(scope="module")
def cluster(max_delay: int, carrier: Carrier) -> Iterator[LocalCluster]:
    with LocalCluster(pservers=2, trainers=2, **carrier, max_delay=max_delay) as cluster:
        yield cluster


def pulled_bytes(session: Session) -> float:
    return session.client.metrics.pulled_bytes._value.get()


def has_gradient(name: str, step: int) -> bool:
    return name == "head" or step == 3


def train_locally() -> dict[str, Tensor]:
    parameters = {"backbone": nn.Parameter(torch.ones(LARGE)), "head": nn.Parameter(torch.ones(SMALL))}
    optimizer = torch.optim.SGD(parameters.values(), lr=0.1, fused=True)
    for step in range(STEPS):
        for name, parameter in parameters.items():
            parameter.grad = torch.full_like(parameter, 0.5) if has_gradient(name, step) else None
        optimizer.step()
    return {name: parameter.detach() for name, parameter in parameters.items()}


def test_frozen_parameters_travel_only_when_they_change(cluster: LocalCluster, max_delay: int) -> None:
    def train(session: Session) -> tuple[dict[str, Tensor], list[float]]:
        parameters = {"backbone": nn.Parameter(torch.ones(LARGE)), "head": nn.Parameter(torch.ones(SMALL))}
        optimizer = RemoteOptimizer(torch.optim.SGD(list(parameters.items()), lr=0.1), session=session)
        pulled = []
        for step in range(STEPS):
            for name, parameter in parameters.items():
                parameter.grad = torch.full_like(parameter, 0.5) if has_gradient(name, step) else None
            before = pulled_bytes(session)
            optimizer.step()
            optimizer.synchronize()
            pulled.append(pulled_bytes(session) - before)
        return {name: parameter.detach().clone() for name, parameter in parameters.items()}, pulled

    expected = train_locally()
    for actual, pulled in run_trainers(cluster.address, [train, train]):
        assert all(torch.equal(actual[name], expected[name]) for name in expected)
        assert pulled[3] > 4 * LARGE
        if max_delay == 0:  # else each landing set has to be filled once
            assert all(size < 4 * SMALL + 4000 for step, size in enumerate(pulled) if step not in (0, 3))
