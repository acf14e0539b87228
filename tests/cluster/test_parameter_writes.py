"""Writes of a script to parameters: the start of the run before the first step, refused or on purpose later."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradpost import RemoteOptimizer, Session
from ps_protocol.errors import BadModel
from trainer_client.testing import LocalCluster

from .conftest import StartCluster
from .training import assert_identical, run_all, seeded, values

pytestmark = pytest.mark.cluster
STEPS = 6


@pytest.fixture(scope="module")
def alone(shared_cluster: StartCluster) -> LocalCluster:
    return shared_cluster(trainers=1, min_block_size=4, on_trainer_loss="fail")


@pytest.fixture(scope="module")
def pair(shared_cluster: StartCluster) -> LocalCluster:
    return shared_cluster(min_block_size=4, on_trainer_loss="fail")


def make_model(seed: int) -> nn.Module:
    return seeded(nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4)), seed, 0.4)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.named_parameters(), lr=0.1, momentum=0.9, fused=True)


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, rank: int = 0) -> None:
    inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * number + rank))
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()


def make_checkpoint() -> dict[str, Any]:
    model = make_model(seed=7)
    optimizer = momentum(model)
    for number in range(3):
        take_step(model, optimizer, 100 + number)
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


CHECKPOINT = make_checkpoint()


def resume(session: Session, *, is_early: bool, **arguments: Any) -> dict[str, Tensor]:
    model = make_model(seed=session.rank)
    if is_early:
        model.load_state_dict(CHECKPOINT["model"])
    optimizer = RemoteOptimizer(momentum(model), model=model, session=session, **arguments)
    if not is_early:
        model.load_state_dict(CHECKPOINT["model"])
    optimizer.load_state_dict(copy.deepcopy(CHECKPOINT["optimizer"]))  # which is used in place
    for number in range(STEPS):
        take_step(model, optimizer, number, session.rank)
    optimizer.synchronize()
    return values(model)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"overlap": True, "overlap_pulls": True},
        {"bucket_bytes": 100},  # in a ring
    ],
    ids=lambda it: " ".join(it) or "plain",
)
def test_what_is_loaded_after_the_wrap_is_where_the_run_begins(
    pair: LocalCluster, ring: LocalCluster, arguments: dict[str, Any]
) -> None:
    cluster = ring if "bucket_bytes" in arguments else pair
    late, early = (run_all(cluster, partial(resume, is_early=is_early, **arguments)) for is_early in (False, True))
    for mine, theirs in zip(late, early, strict=True):
        assert_identical(mine, theirs)


def test_the_lowest_rank_alone_may_load(pair: LocalCluster, ring: LocalCluster) -> None:
    def train(session: Session) -> dict[str, Tensor]:
        model = make_model(seed=session.rank)
        optimizer = RemoteOptimizer(momentum(model), session=session)
        if session.rank == 0:
            model.load_state_dict(CHECKPOINT["model"])
        optimizer.step()  # without any gradient
        return values(model)

    for found in run_all(pair, train) + run_all(ring, train):
        assert_identical(found, CHECKPOINT["model"])


def in_place(model: nn.Module) -> None:
    with torch.no_grad():
        model[0].weight.mul_(0.5)


def other_memory(model: nn.Module) -> None:
    model[2].weight.data = torch.ones(4, 9)


@pytest.mark.parametrize("write", [in_place, other_memory])
def test_later_writes_are_refused_until_they_are_on_purpose(
    alone: LocalCluster, write: Callable[[nn.Module], None]
) -> None:
    def train(session: Session) -> dict[str, Tensor]:
        model = make_model(seed=1)
        optimizer = RemoteOptimizer(momentum(model), session=session)
        take_step(model, optimizer, 0)
        take_step(model, optimizer, 1)
        write(model)
        for _ in range(2):
            with pytest.raises(BadModel, match=r"with optimizer\.write_parameters"):
                take_step(model, optimizer, 2)
        with optimizer.write_parameters():
            pass  # it is on purpose after all
        take_step(model, optimizer, 2)
        return values(model)

    expected = make_model(seed=1)
    optimizer = momentum(expected)
    take_step(expected, optimizer, 0)
    take_step(expected, optimizer, 1)
    write(expected)
    take_step(expected, optimizer, 2)
    [actual] = run_all(alone, train)
    assert_identical(actual, values(expected))


@pytest.mark.parametrize(("dtype", "wire"), [(torch.bfloat16, {}), (torch.float32, {"pull_type": "bfloat16"})])
def test_elements_that_are_not_written_keep_their_masters(
    alone: LocalCluster, dtype: torch.dtype, wire: dict[str, str]
) -> None:
    """Steps are smaller than half of what bfloat16 can tell apart."""

    def train(session: Session) -> Tensor:
        weight = nn.Parameter(torch.linspace(1, 2, 8, dtype=dtype))
        optimizer = RemoteOptimizer(torch.optim.SGD([("weight", weight)], lr=1e-3), session=session, **wire)
        for number in range(8):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
            with optimizer.write_parameters(), torch.no_grad():
                weight[0] = 2 + number
        return weight.detach().float()

    [found] = run_all(alone, train)
    expected = torch.linspace(1, 2, 8, dtype=dtype).float() - 8e-3
    assert found.tolist() == [9.0, *expected.bfloat16().float()[1:].tolist()]
