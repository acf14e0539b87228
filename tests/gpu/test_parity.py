"""Trainers on a GPU have the results of one process on it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from gradpost import RemoteOptimizer, Session
from trainer_client.testing import LocalCluster

from ..cluster.training import run_trainers
from .network import DEVICE, MAX_NORM, train_alone, train_remotely

ROUNDING = 2e-5  # a GPU adds in another order
COARSE = 5e-3  # where numbers have fewer bits, and fall on the other side
OVERLAP: dict[str, Any] = {"overlap": True}
BOTH: dict[str, Any] = {"overlap": True, "overlap_pulls": True}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {  # settings, how all train, how near they come
    "plain": ({}, {}, ROUNDING),
    "overlap": (OVERLAP, {}, ROUNDING),
    "overlap of both": (BOTH, {}, ROUNDING),
    "bfloat16 pushes": ({"push_type": "bfloat16"}, {}, COARSE),
    "8-bit pulls": ({"pull_type": "int8"}, {}, COARSE),
    "accumulation": ({}, {"parts": 3}, ROUNDING),
    "accumulation, overlap of both": (BOTH, {"parts": 3}, ROUNDING),
    "autocast to bfloat16": (BOTH, {"dtype": torch.bfloat16}, COARSE),
    "GradScaler": ({}, {"dtype": torch.float16, "scaled": True}, COARSE),
}


def marks(settings: dict[str, Any], how: dict[str, Any]) -> list[pytest.MarkDecorator]:
    """Return the marks by which the kind is selected."""
    found = [pytest.mark.overlap] if settings.get("overlap") else []
    return [*found, pytest.mark.amp] if "dtype" in how else found


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=marks(*KINDS[kind][:2])) for kind in KINDS])
def test_the_results_are_those_of_one_process(cluster: LocalCluster, kind: str) -> None:
    settings, how, tolerance = KINDS[kind]
    work = partial(train_remotely, settings=settings, **how)
    one, other = run_trainers(cluster.address, [work, work], bucket_bytes=100_000)
    for name, value in train_alone(**how).items():
        assert torch.equal(one[name], other[name])
        torch.testing.assert_close(one[name], value, rtol=0, atol=tolerance)


@pytest.mark.clip
@pytest.mark.parametrize("kind", ["plain", "overlap", "GradScaler"])
def test_the_aggregated_gradient_is_clipped(cluster: LocalCluster, kind: str) -> None:
    settings, how, tolerance = KINDS[kind]
    work = partial(train_remotely, settings={**settings, "max_grad_norm": MAX_NORM}, **how)
    one, other = run_trainers(cluster.address, [work, work], bucket_bytes=100_000)
    for name, value in train_alone(max_norm=MAX_NORM, **how).items():
        assert torch.equal(one[name], other[name])
        torch.testing.assert_close(one[name], value, rtol=0, atol=tolerance)


def test_steps_that_are_delayed() -> None:
    def work(session: Session) -> float:
        weight = nn.Parameter(torch.zeros(300_000, device=DEVICE))
        optimizer = RemoteOptimizer(torch.optim.SGD([("weight", weight)], lr=1.0), session=session)
        weight.grad = torch.empty_like(weight)
        for step in range(12):
            weight.grad.fill_((step + 1.0) * (session.rank + 1))
            optimizer.step()
        optimizer.synchronize()
        assert (weight == weight[0]).all()
        return weight[0].item()

    with LocalCluster(pservers=2, trainers=2, lease_seconds=5, on_trainer_loss="fail", max_delay=2) as cluster:
        assert run_trainers(cluster.address, [work, work]) == [-sum(1.5 * (step + 1) for step in range(12))] * 2


@pytest.fixture
def ring() -> Iterator[LocalCluster]:
    with LocalCluster(pservers=0, trainers=1, strategy="ring", lease_seconds=5) as cluster:
        yield cluster


@pytest.mark.ring
def test_a_ring_of_one_steps_on_the_gpu(ring: LocalCluster) -> None:
    """NCCL wants a GPU for each trainer, and there may be one."""
    [actual] = run_trainers(ring.address, [partial(train_remotely, settings=OVERLAP)])
    for name, value in train_alone(ranks=[0]).items():
        torch.testing.assert_close(actual[name], value, rtol=0, atol=ROUNDING)
