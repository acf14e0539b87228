"""Trainers with different numbers of batches: one that is done leaves, or in a ring takes part without gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from ps_protocol.errors import NonFiniteGradient
from trainer_client import GradScaler, Session

from .conftest import StartCluster
from .training import run_all, wrap_model, wrap_weight

pytestmark = [pytest.mark.cluster, pytest.mark.extended]
NUM_BATCHES = [3, 0, 5, 9]
MAX_NORM = 400.0  # below the norms of the first rounds, above those of the last


class Kind(NamedTuple):
    settings: Mapping[str, Any] = MappingProxyType({})
    scaled: bool = False
    passes: int = 1
    max_delay: int = 0
    strategy: str = "ps"


KINDS = {
    "overlap of both, clipping": Kind({"overlap": True, "overlap_pulls": True, "max_grad_norm": MAX_NORM}),
    "GradScaler, overlap, accumulation, clipping": Kind(
        {"overlap": True, "accumulate_steps": 3, "max_grad_norm": MAX_NORM}, scaled=True, passes=3
    ),
    "delay, clipping": Kind({"max_grad_norm": MAX_NORM}, max_delay=2),
    "ring, overlap, clipping, GradScaler": Kind(
        {"overlap": True, "max_grad_norm": MAX_NORM}, scaled=True, strategy="ring"
    ),
}


class Model(nn.Module):
    """A model whose gradients do not depend on its values, so that a delay changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.early = nn.Parameter(torch.zeros(20, 20))
        self.late = nn.Parameter(torch.zeros(100))
        self.norm = nn.BatchNorm1d(4)
        for parameter in self.norm.parameters():
            parameter.requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.mean() * (self.early.sum() + self.late.sum()) + 0 * self.norm(inputs.expand(2, 4)).sum()


def gradient(rank: int, step: int) -> float:
    return float(2**rank * (10 - step))


def expected(kind: Kind) -> list[float]:
    """Return the value that each trainer leaves with."""
    value, values = 0.0, [0.0]
    for step in range(max(NUM_BATCHES)):
        present = [rank for rank, number in enumerate(NUM_BATCHES) if number > step]
        mean = sum(gradient(rank, step) for rank in present) / len(present)
        limit = kind.settings.get("max_grad_norm", math.inf)
        value -= mean * min(1.0, limit / (mean * math.sqrt(500)))
        values.append(value)
    return [values[number] for number in NUM_BATCHES]


def train(session: Session, kind: Kind) -> float:
    model = Model()
    optimizer = wrap_model(session, model, lr=1.0, **kind.settings)
    scaler = GradScaler(optimizer, "cpu", enabled=kind.scaled, init_scale=2.0**10, growth_interval=2)
    for step in range(NUM_BATCHES[session.rank]):
        optimizer.zero_grad()
        for _ in range(kind.passes):
            inputs = torch.full((1,), gradient(session.rank, step) / kind.passes)
            scaler.scale(model(inputs)).backward()
        scaler.step(optimizer)
        scaler.update()
    optimizer.synchronize()
    [value] = torch.cat([model.early.flatten(), model.late]).unique().tolist()
    return value


class Layers(nn.Module):
    """Three parameters of 10 elements each, of which two fit a bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Parameter(torch.zeros(10)) for _ in range(3))
        self.norm = nn.BatchNorm1d(4)
        self.norm.requires_grad_(False)


@pytest.mark.overlap
@pytest.mark.parametrize("strategy", [pytest.param("ring", marks=pytest.mark.ring), "ps"])
@pytest.mark.parametrize(
    ("late", "num_batches"), [(("third",), (2, 5)), (("third", "second", "first"), (5, 2)), ((), (3, 3))], ids=str
)
def test_nothing_counts_that_is_done_after_the_last_batch(
    shared_cluster: StartCluster,
    strategy: str,
    late: tuple[str, ...],
    num_batches: tuple[int, int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    def work(session: Session) -> dict[str, float]:
        model = Layers()
        optimizer = wrap_model(session, model, lr=1.0, overlap=True)
        for _ in range(num_batches[session.rank]):
            optimizer.zero_grad()
            torch.cat([model.first, model.second, model.third]).sum().backward()
            optimizer.step()
        values = {name: getattr(model, name).unique().item() for name in ("first", "second", "third")}
        if session.rank == 0:
            for name in late:
                (1000 * getattr(model, name)).sum().backward()
            model.norm.half()
        return values

    cluster = shared_cluster(pservers=1, strategy=strategy, lease_seconds=1)
    found = run_all(cluster, work, bucket_bytes=80)
    assert cluster.summary().state == "finished"
    assert "no longer takes part" not in capsys.readouterr().err
    for values, number in zip(found, num_batches, strict=True):
        assert set(values.values()) == {-float(number)}


@pytest.mark.parametrize("strategy", [pytest.param("ring", marks=pytest.mark.ring), "ps"])
def test_a_trainer_that_was_refused_may_be_done(shared_cluster: StartCluster, strategy: str) -> None:
    def work(session: Session) -> float:
        weight, optimizer = wrap_weight(session, 100)
        for step in range(6):
            optimizer.zero_grad()
            weight.sum().backward()
            if session.rank == 0 and step == 2:
                weight.grad = torch.full((100,), math.nan)
                with pytest.raises(NonFiniteGradient):
                    optimizer.step()
                break
            optimizer.step()
        return float(weight.unique().item())

    cluster = shared_cluster(pservers=1, strategy=strategy, lease_seconds=1)
    assert run_all(cluster, work) == [-2.0, -6.0]
    assert cluster.summary().state == "finished"


@pytest.mark.parametrize("name", KINDS)
def test_a_trainer_that_is_done_is_not_waited_for(shared_cluster: StartCluster, name: str) -> None:
    kind = KINDS[name]
    rules: dict[str, Any] = {"trainers": len(NUM_BATCHES), "strategy": kind.strategy, "nonfinite": "skip_round"}
    if kind.strategy == "ps":
        rules |= {"max_delay": kind.max_delay, "min_block_size": 50}
    cluster = shared_cluster(**rules)
    found = run_all(cluster, partial(train, kind=kind), bucket_bytes=400)
    assert cluster.summary().state == "finished"
    assert found == pytest.approx(expected(kind), rel=1e-5)
