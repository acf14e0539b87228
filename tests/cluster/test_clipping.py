"""Clipping by the global norm of the aggregated gradient, as one process does with `clip_grad_norm_`."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ps_protocol.errors import BadModel
from trainer_client import RemoteOptimizer, Session
from trainer_client.engines.collective_buffers import FlatBucket
from trainer_client.testing import LocalCluster

from .conftest import StartCluster
from .training import (
    SMALL,
    assert_close,
    assert_identical,
    run_all,
    seeded,
    set_average,
    step_with,
    values,
    wrap_weight,
)

pytestmark = [pytest.mark.cluster, pytest.mark.clip]
STEPS = 20
MAX_NORM = 0.5
BUCKETS = {"bucket_bytes": 2000}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "AdamW": partial(torch.optim.AdamW, lr=0.01),
}


@pytest.fixture(scope="module")
def cluster(shared_cluster: StartCluster) -> LocalCluster:
    return shared_cluster(pservers=3, on_trainer_loss="fail")


def make_model() -> nn.Module:
    return seeded(nn.Sequential(nn.Linear(20, 60), nn.Tanh(), nn.Linear(60, 20)))


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    inputs = torch.randn(8, 20, generator=generator)
    scale = (1e-3, 1.0, 30.0)[step % 3]  # steps that are not clipped, and such that are
    loss: Tensor = scale * (model(inputs) - inputs.flip(1)).square().mean()
    return loss


def train(session: Session, *, kind: str = "AdamW", **arguments: Any) -> tuple[dict[str, Tensor], list[float]]:
    model, norms = make_model(), []
    optimizer = RemoteOptimizer(OPTIMIZERS[kind](model.named_parameters()), model=model, session=session, **arguments)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step, session.rank).backward()
        optimizer.step()
        norms.append(optimizer.grad_norm)
    return values(model), norms


def train_locally(kind: str) -> tuple[dict[str, Tensor], list[float]]:
    model, norms = make_model(), []
    optimizer = OPTIMIZERS[kind](model.named_parameters())
    for step in range(STEPS):
        set_average(optimizer, [partial(loss_of, model, step, rank) for rank in range(2)])
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
    return values(model), norms


def check_parity(cluster: LocalCluster, kind: str, *, overlap: bool, **arguments: Any) -> None:
    work = partial(train, kind=kind, overlap=overlap, max_grad_norm=MAX_NORM)
    (one, norms), (other, same_norms) = run_all(cluster, work, **arguments)
    expected, expected_norms = train_locally(kind)
    assert_identical(one, other)
    assert norms == same_norms
    torch.testing.assert_close(torch.tensor(norms), torch.tensor(expected_norms))
    assert_close(one, expected, rtol=1e-4, atol=1e-5)
    assert min(norms) < MAX_NORM < max(norms)


@pytest.mark.parametrize(("kind", "overlap"), [("momentum", False), ("AdamW", True)])
def test_the_whole_gradient_is_clipped_as_in_one_process(cluster: LocalCluster, kind: str, overlap: bool) -> None:
    check_parity(cluster, kind, overlap=overlap, **SMALL)


@pytest.mark.ring
def test_a_ring_clips_the_same(ring: LocalCluster) -> None:
    check_parity(ring, "momentum", overlap=True, **BUCKETS)


@pytest.mark.ring
def test_all_of_a_ring_clip_by_one_number(ring: LocalCluster) -> None:
    """Machines may add squares up in another order, and parameters that differ in a bit stay different."""

    def work(session: Session) -> tuple[dict[str, Tensor], list[float]]:
        error = 1e-3 * session.rank
        model, norms = make_model(), []
        local = OPTIMIZERS["momentum"](model.named_parameters())
        optimizer = RemoteOptimizer(local, session=session, max_grad_norm=MAX_NORM)
        for bucket in optimizer._engine._gradients.buckets:
            bucket.sum_of_squares = lambda bucket=bucket: FlatBucket.sum_of_squares(bucket) * (1 + error)
        for step in range(6):
            optimizer.zero_grad()
            loss_of(model, step, session.rank).backward()
            optimizer.step()
            norms.append(optimizer.grad_norm)
        return values(model), norms

    (one, norms), (other, same) = run_all(ring, work, **BUCKETS)
    assert_identical(one, other)
    assert norms == same


def skip_one(session: Session) -> list[float]:
    weight = nn.Parameter(torch.zeros(4))
    sgd = torch.optim.SGD([("weight", weight)], lr=1.0)
    optimizer = RemoteOptimizer(sgd, session=session, max_grad_norm=1.0, nonfinite="skip_round")
    norms = []
    for step in range(3):
        step_with(optimizer, weight, value=math.nan if (session.rank, step) == (1, 1) else 3.0)
        norms.append(optimizer.grad_norm)
    assert weight.tolist() == pytest.approx([-1.0] * 4, rel=1e-6)  # two steps of norm 1
    return norms


@pytest.mark.ring
def test_a_skipped_round_has_no_norm(ring: LocalCluster, cluster: LocalCluster) -> None:
    for one in (ring, cluster):
        for norms in run_all(one, skip_one):
            assert norms == [6.0, pytest.approx(math.nan, nan_ok=True), 6.0]


def test_a_limit_that_is_never_reached_changes_no_bit(cluster: LocalCluster) -> None:
    clipped, _ = run_all(cluster, partial(train, max_grad_norm=1e9), **SMALL)[0]
    unclipped, norms = run_all(cluster, train, **SMALL)[0]
    assert_identical(clipped, unclipped)
    assert set(norms) == {None}


def test_only_one_gradient_of_all_can_be_clipped(own_cluster: StartCluster) -> None:
    def work(session: Session) -> None:
        with pytest.raises(BadModel, match="max_grad_norm needs the synchronous mode"):
            wrap_weight(session, 4, max_grad_norm=1.0)

    run_all(own_cluster(pservers=1, trainers=1, mode="async"), work)
