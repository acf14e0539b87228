"""Training on a real GPU: `make test-gpu`. Skips, and says so, where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainer_client import RemoteOptimizer, Session
from trainer_client.testing import LocalCluster

from ..cluster.parity_model import run_trainers

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU that torch can use (CUDA)"),
]

STEPS = 6
ROUNDING = 2e-5  # a GPU adds in another order
KINDS: list[dict[str, Any]] = [
    {},
    {"overlap": True},
    {"overlap": True, "overlap_pulls": True},
    {"push_type": "bfloat16"},
    {"pull_type": "int8"},
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(pservers=2, trainers=2, lease_seconds=5, on_trainer_loss="fail") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def delaying() -> Iterator[LocalCluster]:
    with LocalCluster(pservers=2, trainers=2, lease_seconds=5, on_trainer_loss="fail", max_delay=2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def ring() -> Iterator[LocalCluster]:
    with LocalCluster(pservers=0, trainers=1, strategy="ring", lease_seconds=5) as cluster:
        yield cluster


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(64 * 64, 512), nn.ReLU(), nn.Linear(512, 10)),
    )
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(8, 3, 8, 8, generator=generator), torch.randint(0, 10, (8,), generator=generator)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, ranks: list[int], device: str) -> dict[str, Tensor]:
    """A step has the mean of the gradients of these ranks."""
    model.train()
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in ranks:
            inputs, labels = (tensor.to(device) for tensor in batch(step, rank))
            (nn.functional.cross_entropy(model(inputs), labels) / len(ranks)).backward()
        optimizer.step()
    return {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}


def train_remotely(session: Session, **arguments: Any) -> dict[str, Tensor]:
    model = make_model().cuda()
    optimizer = RemoteOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-3), model=model, session=session, **arguments
    )
    train(model, optimizer, [session.rank], "cuda")
    optimizer.synchronize()
    return {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("arguments", KINDS, ids=str)
def test_the_results_are_those_of_the_gpu_alone(cluster: LocalCluster, arguments: dict[str, Any]) -> None:
    torch.backends.cudnn.deterministic = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    model = make_model().cuda()
    alone = train(model, torch.optim.AdamW(model.parameters(), lr=1e-3), [0, 1], "cuda")
    tolerance = ROUNDING if not {"push_type", "pull_type"} & arguments.keys() else 2e-2  # fewer bits
    one, other = run_trainers(
        cluster.address, [lambda session: train_remotely(session, **arguments)] * 2, bucket_bytes=100_000
    )
    for name, value in alone.items():
        assert torch.equal(one[name], other[name])
        torch.testing.assert_close(one[name], value, rtol=0, atol=tolerance)


def test_steps_that_are_delayed(delaying: LocalCluster) -> None:
    def work(session: Session) -> float:
        weight = nn.Parameter(torch.zeros(300_000, device="cuda"))
        optimizer = RemoteOptimizer(torch.optim.SGD([("weight", weight)], lr=1.0), session=session)
        weight.grad = torch.empty_like(weight)
        for step in range(12):
            weight.grad.fill_((step + 1.0) * (session.rank + 1))
            optimizer.step()
        optimizer.synchronize()
        assert (weight == weight[0]).all()
        return weight[0].item()

    assert run_trainers(delaying.address, [work, work]) == [-sum(1.5 * (step + 1) for step in range(12))] * 2


def test_copies_run_on_streams_of_their_own(cluster: LocalCluster) -> None:
    """In the profiler's trace copies between host and device are not on the stream that computes."""
    streams: dict[str, set[int]] = {"kernel": set(), "copy": set()}

    def work(session: Session) -> None:
        model = make_model().cuda()
        optimizer = RemoteOptimizer(torch.optim.AdamW(model.parameters()), model=model, session=session, overlap=True)
        inputs, labels = (tensor.cuda() for tensor in batch(0, 0))
        with torch.profiler.profile() if session.rank == 0 else nullcontext() as profile:
            for _ in range(3):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
            torch.cuda.synchronize()
        for event in [] if profile is None else profile.profiler.kineto_results.events():
            name = event.name().lower()
            if event.device_type() == torch.autograd.DeviceType.CUDA and "memset" not in name:
                streams["copy" if "htod" in name or "dtoh" in name else "kernel"].add(event.device_resource_id())

    run_trainers(cluster.address, [work, work])
    assert streams["copy"] - streams["kernel"], streams


def test_a_ring_of_one_steps_on_the_gpu(ring: LocalCluster) -> None:
    """NCCL wants a GPU for each trainer, and there may be one."""
    [actual] = run_trainers(ring.address, [lambda session: train_remotely(session, overlap=True)])
    model = make_model().cuda()
    expected = train(model, torch.optim.AdamW(model.parameters(), lr=1e-3), [0], "cuda")
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=0, atol=ROUNDING)
