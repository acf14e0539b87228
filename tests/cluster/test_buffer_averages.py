"""Statistics of batch norm that become their mean over all trainers in every so many rounds."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from safetensors.torch import load
from torch import Tensor, nn

from ps_protocol.errors import BadModel
from trainer_client import RemoteOptimizer, Session
from trainer_client.testing import LocalCluster

from .conftest import Carrier
from .parity_model import run_trainers

pytestmark = pytest.mark.cluster

INTERVAL, STEPS = 3, 8
ROUNDING = 1e-6
KINDS: list[dict[str, Any]] = [{}, {"overlap": True}, {"push_type": "topk"}, {"max_grad_norm": 1e-3}]
LOCAL = "1.num_batches_tracked"


@pytest.fixture(scope="module")
def cluster(carrier: Carrier) -> Iterator[LocalCluster]:
    with LocalCluster(
        pservers=2, trainers=2, **carrier, min_block_size=2, lease_seconds=2, on_trainer_loss="fail"
    ) as cluster:
        yield cluster


def make_model() -> nn.Sequential:
    generator = torch.Generator().manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-1, 1, generator=generator)
    return model


def compute(model: nn.Module, step: int, rank: int) -> None:
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * step + rank)) + 3 * rank
    model(inputs).square().sum().backward()


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def average(models: list[nn.Module]) -> None:
    for name, _ in models[0].named_buffers():
        if name != LOCAL:
            every = [dict(model.named_buffers())[name] for model in models]
            mean = torch.stack(every).mean(0)
            for one in every:
                one.copy_(mean)


def expected() -> list[list[dict[str, Tensor]]]:
    """By trainer and step; the weights stand still."""
    models: list[nn.Module] = [make_model() for _ in range(2)]
    found: list[list[dict[str, Tensor]]] = [[], []]
    for step in range(STEPS):
        for rank, model in enumerate(models):
            compute(model, step, rank)
        if (step + 1) % INTERVAL == 0:
            average(models)
        for rank, model in enumerate(models):
            found[rank].append(buffers_of(model))
    return found


def train(session: Session, **arguments: Any) -> list[dict[str, Tensor]]:
    model = make_model()
    optimizer = RemoteOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0), model=model, session=session, average_buffers=INTERVAL, **arguments
    )
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        compute(model, step, session.rank)
        optimizer.step()
        found.append(buffers_of(model))
    return found


def assert_as_expected(found: list[list[dict[str, Tensor]]]) -> None:
    for rank, steps in enumerate(expected()):
        for step, buffers in enumerate(steps):
            for name, buffer in buffers.items():
                torch.testing.assert_close(found[rank][step][name], buffer, rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize("arguments", KINDS, ids=str)
def test_they_are_averaged_at_intervals_and_left_alone_between(
    cluster: LocalCluster, arguments: dict[str, Any]
) -> None:
    assert_as_expected(run_trainers(cluster.address, [partial(train, **arguments)] * 2, bucket_bytes=50))


@pytest.mark.ring
def test_so_they_are_in_a_ring() -> None:
    with LocalCluster(pservers=0, trainers=2, strategy="ring", lease_seconds=2) as ring:
        assert_as_expected(run_trainers(ring.address, [train, train]))


@pytest.mark.clip
def test_they_are_no_part_of_the_norm_and_not_clipped(cluster: LocalCluster) -> None:
    def work(session: Session) -> tuple[float | None, float]:
        model = make_model()
        optimizer = RemoteOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.0),
            model=model,
            session=session,
            average_buffers=1,
            max_grad_norm=0.5,
        )
        compute(model, 0, 0)
        own = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]).norm().item()
        optimizer.step()
        return optimizer.grad_norm, own

    for norm, own in run_trainers(cluster.address, [work, work]):
        assert norm == pytest.approx(own)


def test_the_models_that_are_read_have_the_means(cluster: LocalCluster) -> None:
    models: list[bytes] = []

    def work(session: Session) -> dict[str, Tensor]:
        model = make_model()
        optimizer = RemoteOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.0), model=model, session=session, average_buffers=1
        )
        compute(model, 0, session.rank)
        optimizer.step()
        if session.rank == 0:  # the other one cannot end without it
            models.append(b"".join(cluster.view.model()))
        compute(model, 1, session.rank)
        optimizer.step()
        return buffers_of(model)

    run_trainers(cluster.address, [work, work])
    alone: list[nn.Module] = [make_model() for _ in range(2)]
    for rank, model in enumerate(alone):
        compute(model, 0, rank)
    average(alone)
    state = load(models[0])
    copy.deepcopy(alone[0]).load_state_dict(state)
    for name in ("1.running_mean", "1.running_var"):
        torch.testing.assert_close(state[name], dict(alone[0].named_buffers())[name])


def test_a_round_that_is_skipped_averages_nothing(carrier: Carrier) -> None:
    def work(session: Session) -> list[dict[str, Tensor]]:
        model = make_model()
        optimizer = RemoteOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.0), model=model, session=session, average_buffers=2
        )
        found = []
        for step in range(4):
            optimizer.zero_grad()
            compute(model, step, session.rank)
            before = buffers_of(model)
            if step == 1 and session.rank == 1:
                model[0].weight.grad.fill_(float("nan"))
            optimizer.step()
            after = buffers_of(model)
            found.append({name: after[name] - before[name] for name in before if name != LOCAL})
        return found

    with LocalCluster(
        pservers=2, trainers=2, **carrier, nonfinite="skip_round", on_trainer_loss="fail", lease_seconds=2
    ) as cluster:
        for found in run_trainers(cluster.address, [work, work]):
            moved = [any(change.abs().max() > 0 for change in step.values()) for step in found]
            assert moved == [False, False, False, True]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"local_steps": 2}, "without local_steps"),
        ({"overlap": True, "overlap_pulls": True}, "would not wait for the means"),
    ],
    ids=str,
)
def test_what_does_not_go_with_it_is_refused(cluster: LocalCluster, arguments: dict[str, Any], reason: str) -> None:
    def work(session: Session) -> None:
        with pytest.raises(BadModel, match=reason):
            train(session, **arguments)

    run_trainers(cluster.address, [work, work])


def test_a_model_without_buffers_has_none_to_average(cluster: LocalCluster) -> None:
    def work(session: Session) -> None:
        weight = nn.Parameter(torch.zeros(3))
        with pytest.raises(BadModel, match="no float buffers"):
            RemoteOptimizer(torch.optim.SGD([("weight", weight)], lr=0.1), session=session, average_buffers=1)

    run_trainers(cluster.address, [work, work])


def test_buffers_that_the_model_replaces_are_found(cluster: LocalCluster) -> None:
    """As `module.to` and statistics that are computed anew do; one that is not finite counts as it was."""

    def work(session: Session) -> Tensor:
        model = nn.Linear(2, 1)
        model.register_buffer("level", torch.zeros(3))
        optimizer = RemoteOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.0), model=model, session=session, average_buffers=1
        )
        for step in range(3):
            model(torch.ones(1, 2)).sum().backward()
            model.level = model.level + (float("nan") if (session.rank, step) == (1, 2) else session.rank + 1.0)
            optimizer.step()
        return model.level

    for level in run_trainers(cluster.address, [work, work]):
        assert level.tolist() == [(3.0 + 1.0 + 3.0) / 2] * 3  # twice 1.5 more, and then 1 more in one of them
