"""Clipping by the global norm of the aggregated gradient, as one process does with `clip_grad_norm_`."""

from __future__ import annotations

import itertools
import math
import time
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ps_protocol.errors import NonFiniteGradient
from trainer_client import RemoteOptimizer, Session
from trainer_client.engines.collective.buffers import FlatBucket
from trainer_client.optimizer import step_measures
from trainer_client.testing import LocalCluster

from .conftest import StartCluster
from .training import (
    SMALL,
    Net,
    assert_close,
    assert_identical,
    net_loss,
    run_all,
    step_with,
    train_net,
    train_net_locally,
    wrap_weight,
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
def test_all_of_a_ring_clip_by_one_number(ring: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines may add squares up in another order, and parameters that differ in a bit stay different."""
    square, calls = FlatBucket.sum_of_squares, itertools.count()
    monkeypatch.setattr(FlatBucket, "sum_of_squares", lambda bucket: square(bucket) * (1 + 1e-3 * next(calls)))
    (one, norms), (other, same) = run_all(ring, partial(train, kind="momentum", max_grad_norm=MAX_NORM), **BUCKETS)
    assert_identical(one, other)
    assert norms == same


def skip_one(session: Session) -> list[float]:
    weight, optimizer = wrap_weight(session, 4, max_grad_norm=1.0, nonfinite="skip_round")
    norms = []
    for step in range(3):
        step_with(optimizer, weight, value=math.nan if (session.rank, step) == (1, 1) else 3.0)
        norms.append(optimizer.grad_norm)
    assert weight.tolist() == pytest.approx([-1.0] * 4, rel=1e-6)  # two steps of norm 1
    return norms


@pytest.mark.ring
def test_a_skipped_round_has_no_norm(ring: LocalCluster, cluster: LocalCluster) -> None:
    for norms in run_all(ring, skip_one) + run_all(cluster, skip_one):
        assert norms == [6.0, pytest.approx(math.nan, nan_ok=True), 6.0]


@pytest.mark.parametrize("kind", ["momentum", "AdamW"])
def test_in_asynchronous_modes_a_trainer_clips_its_own_gradient(own_cluster: StartCluster, kind: str) -> None:
    cluster = own_cluster(pservers=2, trainers=1, mode="async")
    [(found, norms)] = run_all(cluster, partial(train, kind=kind, max_grad_norm=MAX_NORM), **SMALL)
    expected, expected_norms = train_locally(kind, num_trainers=1)
    assert_identical(found, expected)
    assert norms == expected_norms
    assert min(norms) < MAX_NORM < max(norms)


def test_a_gradient_without_a_norm_is_refused_before_it_is_clipped(own_cluster: StartCluster) -> None:
    def work(session: Session) -> None:
        weight, optimizer = wrap_weight(session, 4, max_grad_norm=1.0)
        weight.grad = torch.tensor([3.0, math.inf, 3.0, 3.0])
        with pytest.raises(NonFiniteGradient, match="NaN or infinity in the gradient of 'weight' in step 1"):
            optimizer.step()
        step_with(optimizer, weight, value=3.0)
        assert weight.tolist() == pytest.approx([-0.5] * 4, rel=1e-6)

    run_all(own_cluster(pservers=1, trainers=1, mode="ssp"), work, min_block_size=1)


@pytest.mark.parametrize(
    ("limit", "is_constant", "is_warned"), [(0.125, False, True), (0.125, True, False), (0.25317, False, False)]
)
def test_a_script_that_clips_for_itself_is_a_warning(
    cluster: LocalCluster,
    limit: float,
    is_constant: bool,
    is_warned: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A norm may be the same for another reason: because the gradient is, or because it is no round number."""
    if not is_warned:  # the warning is at the real pace: each second step at least is measured
        monkeypatch.setattr(step_measures, "PERIOD_SECONDS", 0.0)
        monkeypatch.setattr(step_measures, "PAUSE", 0)

    def work(session: Session) -> None:
        model = Net()
        optimizer = RemoteOptimizer(torch.optim.SGD(model.named_parameters(), lr=0.0), session=session)
        for step in range(5):
            optimizer.zero_grad()
            net_loss(model, 0 if is_constant else step, session.rank).backward()
            nn.utils.clip_grad_norm_(model.parameters(), limit)
            optimizer.step()
            time.sleep(1.25 * step_measures.PERIOD_SECONDS)

    run_all(cluster, work)
    said = capsys.readouterr().err
    assert said.count("have the norm 0.125, as after clip_grad_norm_") == 2 * is_warned  # once a trainer
    assert said.count("max_grad_norm=0.125") == 2 * is_warned
