"""Clipping by the global norm of the aggregated gradient, as one process does with `clip_grad_norm_`."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainer_client import RemoteOptimizer, Session
from trainer_client.engines.collective.buffers import FlatBucket
from trainer_client.testing import LocalCluster

from .conftest import StartCluster
from .training import (
    SMALL,
    Net,
    assert_close,
    assert_identical,
    net_loss,
    run_all,
    train_net,
    train_net_locally,
)

pytestmark = [pytest.mark.cluster, pytest.mark.clip]
MAX_NORM = 0.5
BUCKETS = {"bucket_bytes": 2000}
Found = tuple[dict[str, Tensor], list[float]]  # the values, and the norm of each step


@pytest.fixture(scope="module")
def cluster(shared_cluster: StartCluster) -> LocalCluster:
    return shared_cluster(pservers=3, on_trainer_loss="fail")


def loss_of(model: Net, step: int, rank: int, part: int = 0) -> Tensor:
    """Return a loss whose gradient is clipped in some steps only."""
    return (1e-2, 1.0, 30.0)[step % 3] * net_loss(model, step, rank)


def train(session: Session, **arguments: Any) -> Found:
    norms: list[float] = []

    def after_step(optimizer: RemoteOptimizer) -> None:
        norms.append(optimizer.grad_norm)

    return train_net(session, loss_of=loss_of, after_step=after_step, **arguments), norms


def train_locally(kind: str, **arguments: Any) -> Found:
    norms: list[float] = []

    def clip(model: Net) -> None:
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))

    return train_net_locally(kind, loss_of=loss_of, before_step=clip, **arguments), norms


@pytest.mark.parametrize("strategy", ["ps", pytest.param("ring", marks=pytest.mark.ring)])
def test_the_whole_gradient_is_clipped_as_in_one_process(
    cluster: LocalCluster, ring: LocalCluster, strategy: str
) -> None:
    work = partial(train, kind="momentum", overlap=True, max_grad_norm=MAX_NORM)
    cluster, arguments = (ring, BUCKETS) if strategy == "ring" else (cluster, SMALL)
    (one, norms), (other, same_norms) = run_all(cluster, work, **arguments)
    expected, expected_norms = train_locally("momentum")
    assert_identical(one, other)
    assert norms == same_norms
    torch.testing.assert_close(torch.tensor(norms), torch.tensor(expected_norms))
    assert_close(one, expected, rtol=1e-4, atol=1e-5)
    assert min(norms) < MAX_NORM < max(norms)


@pytest.mark.ring
def test_all_of_a_ring_clip_by_one_number(ring: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines may add squares up in another order, and parameters that differ in a bit stay different."""
    square, calls = FlatBucket.sum_of_squares, itertools.count()
    monkeypatch.setattr(FlatBucket, "sum_of_squares", lambda bucket: square(bucket) * (1 + 1e-3 * next(calls)))
    (one, norms), (other, same) = run_all(ring, partial(train, kind="momentum", max_grad_norm=MAX_NORM), **BUCKETS)
    assert_identical(one, other)
    assert norms == same


def test_in_asynchronous_modes_a_trainer_clips_its_own_gradient(own_cluster: StartCluster) -> None:
    cluster = own_cluster(pservers=2, trainers=1, mode="async")
    [(found, norms)] = run_all(cluster, partial(train, kind="AdamW", max_grad_norm=MAX_NORM), **SMALL)
    expected, expected_norms = train_locally("AdamW", num_trainers=1)
    assert_identical(found, expected)
    assert norms == expected_norms
    assert min(norms) < MAX_NORM < max(norms)
