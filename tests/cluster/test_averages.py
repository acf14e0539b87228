"""Means over the trainers: of parameters after local steps (local SGD, DiLoCo), and of float buffers in every step."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from safetensors.torch import load
from torch import Tensor, nn

from gradpost import Session
from trainer_client.testing import LocalCluster

from .conftest import StartCluster
from .training import run_all, seeded, step_with, wrap_model, wrap_weight

pytestmark = pytest.mark.cluster
PAIR = {"min_block_size": 2, "on_trainer_loss": "fail"}


@pytest.fixture(scope="module")
def cluster(shared_cluster: StartCluster) -> LocalCluster:
    return shared_cluster(**PAIR)


@pytest.mark.extended
def test_where_nothing_is_averaged_each_trainer_moves_its_share(own_cluster: StartCluster) -> None:
    """All pull towards 1; if each moved the parameters by its whole difference, they would end far beyond."""

    def work(session: Session) -> float:
        weight, optimizer = wrap_weight(session, 20, lr=0.4, local_steps=4)
        for _ in range(40):
            step_with(optimizer, weight, value=weight[0].item() - 1)
        return weight[0].item()

    for value in run_all(own_cluster(trainers=4, mode="async", min_block_size=4), work):
        assert value == pytest.approx(1, abs=0.1)


# ---------------------------------------------------------------------- buffers


def make_model() -> nn.Sequential:
    return seeded(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)), 1, 1.0)


def compute(model: nn.Module, step: int, rank: int) -> None:
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * step + rank)) + 3 * rank
    model(inputs).square().sum().backward()


@pytest.mark.clip
def test_buffers_are_no_part_of_the_norm_and_not_clipped(cluster: LocalCluster) -> None:
    def work(session: Session) -> tuple[float | None, float]:
        model = make_model()
        optimizer = wrap_model(session, model, lr=0.0, max_grad_norm=0.5)
        compute(model, 0, 0)
        own = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]).norm().item()
        optimizer.step()
        return optimizer.grad_norm, own

    for norm, own in run_all(cluster, work):
        assert norm == pytest.approx(own)


@pytest.mark.parametrize(
    ("settings", "arguments", "margin"),
    [
        (PAIR, {"overlap": True, "overlap_pulls": True}, 0.01),
        ({"mode": "async", "compensation": "dc"}, {}, 1.1),  # the last steps may be those of one trainer
    ],
    ids=str,
)
def test_a_model_that_is_read_has_statistics_of_its_weights(
    shared_cluster: StartCluster, settings: dict[str, Any], arguments: dict[str, Any], margin: float
) -> None:
    """Train with inputs whose mean is 1 on one trainer and 3 on the other, and read the mean from the model."""
    exported: list[dict[str, Tensor]] = []
    cluster = shared_cluster(**settings)

    def work(session: Session) -> None:
        model = nn.Sequential(nn.BatchNorm1d(1, momentum=0.5))
        optimizer = wrap_model(session, model, lr=0.01, **arguments)
        for _ in range(16):
            optimizer.zero_grad()
            model(torch.tensor([[-1.0], [1.0]]) + 1 + 2 * session.rank).square().sum().backward()
            optimizer.step()
        optimizer.synchronize()
        session.report(done=1)
        exported.append(load(b"".join(cluster.view.model())))

    run_all(cluster, work)
    assert exported[-1]["0.running_mean"].item() == pytest.approx(2, abs=margin)


def test_buffers_that_are_replaced_infinite_or_of_16_bits(cluster: LocalCluster) -> None:
    def work(session: Session) -> list[Tensor]:
        model = nn.Linear(2, 1)
        model.register_buffer("level", torch.zeros(3))
        model.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1))
        model.register_buffer("short", torch.zeros(2, dtype=torch.bfloat16))
        optimizer = wrap_model(session, model, lr=0.0)
        for step in range(3):
            model(torch.ones(1, 2)).sum().backward()
            model.level = model.level + (float("nan") if (session.rank, step) == (1, 2) else session.rank + 1.0)
            model.short.add_(session.rank)
            optimizer.step()
        return [model.level, model.mask, model.short]

    for level, mask, short in run_all(cluster, work):
        assert level.tolist() == [1.5 + 1.5 + 0.5] * 3  # the one that is not a number counts as it was before
        assert mask.tolist() == [[0, -torch.inf], [0, 0]]
        assert short.tolist() == [1.5, 1.5]


# ---------------------------------------------------------------------- the choice of buffers


class Queue(nn.Module):
    """A model with a queue of unit vectors and its pointer, as MoCo has them, beside statistics and constants."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("queue", torch.eye(4))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("freqs", torch.polar(torch.ones(3), torch.arange(3.0)))

    def enqueue(self, step: int, rank: int) -> Tensor:
        key = torch.randn(4, generator=torch.Generator().manual_seed(10 * step + rank))
        self.queue[step % 4] = key / key.norm()
        self.pointer += 1
        return self.queue.clone()


def train_queue(session: Session, **arguments: Any) -> tuple[list[Tensor], list[Tensor], Queue]:
    """Return the queue as this trainer wrote it in each step, and as it was after the step, and the model."""
    model = seeded(Queue())
    optimizer = wrap_model(session, model, **arguments)
    written, after = [], []
    for step in range(4):
        optimizer.zero_grad()
        model.norm(model.linear(torch.randn(8, 4))).square().sum().backward()
        written.append(model.enqueue(step, session.rank))
        optimizer.step()
        after.append(model.queue.clone())
    return written, after, model


@pytest.mark.parametrize("strategy", ["ps", pytest.param("ring", marks=pytest.mark.ring)])
def test_a_queue_can_be_that_of_the_lowest_rank_or_stay_where_it_is(
    cluster: LocalCluster, ring: LocalCluster, strategy: str
) -> None:
    run = partial(run_all, ring if strategy == "ring" else cluster)
    (written, *_), *_ = all_trainers = run(partial(train_queue, buffers={"queue*": "lowest_rank"}))
    for _, after, model in all_trainers:
        assert all(map(torch.equal, after, written))
        assert torch.equal(model.norm.running_mean, all_trainers[0][2].norm.running_mean)
    for written, after, _ in run(partial(train_queue, buffers={"queue": "leave"})):
        assert all(map(torch.equal, after, written))
