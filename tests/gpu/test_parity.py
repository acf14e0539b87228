"""Trainers on a GPU have the results of one process on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

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


def step_table(table: nn.Embedding, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    for step in range(6):
        optimizer.zero_grad()
        table(torch.tensor([step, step, 40], device=DEVICE)).square().sum().backward()
        optimizer.step()
    return table.weight.detach()


def step_remotely(session: Session) -> torch.Tensor:
    table = make_table()
    sgd = torch.optim.SGD(table.parameters(), lr=0.1)
    return step_table(table, RemoteOptimizer(sgd, model=table, session=session))


def make_table() -> nn.Embedding:
    return nn.Embedding(50, 8, sparse=True, device=DEVICE, _weight=torch.ones(50, 8, device=DEVICE))


def test_the_rows_of_a_table_are_those_of_one_process(cluster: LocalCluster) -> None:
    alone = make_table()
    expected = step_table(alone, torch.optim.SGD(alone.parameters(), lr=0.1))
    found = run_trainers(cluster.address, [step_remotely, step_remotely], max_grad_norm=1000.0)
    with Session(strategy="local", max_grad_norm=1000.0) as session:
        found.append(step_remotely(session))
    for values in found:
        torch.testing.assert_close(values, expected, rtol=0, atol=ROUNDING)


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


# ---------------------------------------------------------------------- copies between host and device are made while


WIDTH, DEPTH, BATCH = 2048, 12, 8192  # 16 MiB a layer; backward of one takes longer than its copy
LONG = 100_000  # nanoseconds: copies of whole layers are


class Activity(NamedTuple):
    """An activity of the GPU, with times in nanoseconds."""

    name: str
    stream: int
    begin: int
    end: int


@pytest.fixture(scope="module")
def activities(cluster: LocalCluster) -> dict[str, list[Activity]]:
    """Return the kernels, and the copies by direction, of one trainer's process."""
    found: list[Any] = []

    def work(session: Session) -> None:
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH))).to(DEVICE)
        optimizer = RemoteOptimizer(
            torch.optim.SGD(model.parameters(), lr=1e-3), model=model, session=session, overlap=True, overlap_pulls=True
        )
        inputs = torch.randn(BATCH, WIDTH, device=DEVICE)
        with torch.profiler.profile() if session.rank == 0 else nullcontext() as profile:
            for _ in range(4):
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                optimizer.step()
            optimizer.synchronize()
            torch.cuda.synchronize()
        if profile is not None:
            found.extend(profile.profiler.kineto_results.events())

    run_trainers(cluster.address, [work, work])
    by_kind: dict[str, list[Activity]] = {"kernel": [], "dtoh": [], "htod": []}
    for event in found:
        name = event.name().lower()
        if event.device_type() == torch.autograd.DeviceType.CUDA and "memset" not in name:
            kind = next((kind for kind in ("dtoh", "htod") if kind in name), "kernel")
            begin = event.start_ns()
            by_kind[kind].append(Activity(name, event.device_resource_id(), begin, begin + event.duration_ns()))
    return by_kind


@pytest.mark.overlap
@pytest.mark.parametrize("way", ["dtoh", "htod"])
def test_they_run_on_streams_of_their_own(activities: dict[str, list[Activity]], way: str) -> None:
    copies = [copy for copy in activities[way] if copy.end - copy.begin > LONG]
    assert len(copies) >= 3 * DEPTH  # the last step's pulls may come after the trace
    assert not {copy.stream for copy in copies} & {kernel.stream for kernel in activities["kernel"]}


@pytest.mark.overlap
def test_gradients_leave_the_gpu_while_it_computes(activities: dict[str, list[Activity]]) -> None:
    def overlaps(copy: Activity) -> bool:
        return any(kernel.begin < copy.end and copy.begin < kernel.end for kernel in activities["kernel"])

    copies = [copy for copy in activities["dtoh"] if copy.end - copy.begin > LONG]
    assert len(copies) >= 4 * DEPTH
    assert sum(map(overlaps, copies)) > len(copies) / 2
