"""What is trained on a device goes the same ways, with copies between: here torch.cpu is the device.

The real thing is in tests/gpu, for machines with a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer_client import RemoteOptimizer, Session, steps
from trainer_client.device_copies import GradientCopies, ParameterCopies
from trainer_client.pulling import landing
from trainer_client.testing import LocalCluster

from .parity_model import assert_identical, run_trainers
from .test_overlap import SMALL, train, train_locally

pytestmark = [pytest.mark.cluster, pytest.mark.overlap]


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """All parameters are treated as if they were in a device's own memory; returns how many copies were made."""
    counts = {"out": 0, "in": 0}
    begin, copy = GradientCopies.begin, ParameterCopies.copy

    def begin_and_count(self: GradientCopies, step: int, gradients: Any) -> None:
        counts["out"] += len(gradients)
        begin(self, step, gradients)

    def copy_and_count(self: ParameterCopies, parameter: Tensor, host: Tensor) -> None:
        counts["in"] += 1
        copy(self, parameter, host)

    monkeypatch.setattr(GradientCopies, "begin", begin_and_count)
    monkeypatch.setattr(ParameterCopies, "copy", copy_and_count)
    monkeypatch.setattr(steps, "is_away", lambda _: True)
    monkeypatch.setattr(landing, "is_away", lambda _: True)
    monkeypatch.setattr(landing, "lands_directly", lambda _: False)
    return counts


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(pservers=2, trainers=2, lease_seconds=2, on_trainer_loss="fail") as cluster:
        yield cluster


@pytest.mark.parametrize(
    "arguments",
    [{}, {"overlap": True}, {"overlap": True, "overlap_pulls": True}],
    ids=["in step", "overlap", "overlap_pulls"],
)
def test_the_bits_are_the_same(cluster: LocalCluster, counts: dict[str, int], arguments: dict[str, Any]) -> None:
    work = partial(train, kind="AdamW", **arguments)
    for actual in run_trainers(cluster.address, [work, work], **SMALL):
        assert_identical(actual, train_locally("AdamW"))
    assert counts["out"] > 0
    assert counts["in"] > 0


@pytest.mark.extended
def test_steps_that_are_delayed_have_memory_of_their_own(counts: dict[str, int]) -> None:
    """Each trainer's gradients depend on nothing but the step, so that delay changes no number."""
    with LocalCluster(pservers=2, trainers=2, lease_seconds=2, on_trainer_loss="fail", max_delay=2) as cluster:
        one, other = run_trainers(cluster.address, [constant, constant])
    assert counts["out"] > 0
    for name, value in one.items():
        assert (value == other[name]).all()
        assert value.flatten()[0].item() == -sum(1.5 * (step + 1) for step in range(12))


def constant(session: Session) -> dict[str, Tensor]:
    weight = torch.nn.Parameter(torch.zeros(40_000))
    optimizer = RemoteOptimizer(torch.optim.SGD([("weight", weight)], lr=1.0), session=session)
    weight.grad = torch.empty(40_000)
    for step in range(12):
        weight.grad.fill_((step + 1.0) * (session.rank + 1))
        optimizer.step()
    optimizer.synchronize()
    return {"weight": weight.detach().clone()}
