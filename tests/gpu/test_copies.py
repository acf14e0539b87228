"""Copies between host and device are made while the GPU computes, as its own trace says."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from gradpost import RemoteOptimizer, Session
from trainer_client.testing import LocalCluster

from ..cluster.training import run_trainers
from .network import DEVICE

pytestmark = pytest.mark.overlap

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


@pytest.mark.parametrize("way", ["dtoh", "htod"])
def test_they_run_on_streams_of_their_own(activities: dict[str, list[Activity]], way: str) -> None:
    copies = [copy for copy in activities[way] if copy.end - copy.begin > LONG]
    assert len(copies) >= 3 * DEPTH  # the last step's pulls may come after the trace
    assert not {copy.stream for copy in copies} & {kernel.stream for kernel in activities["kernel"]}


def test_gradients_leave_the_gpu_while_it_computes(activities: dict[str, list[Activity]]) -> None:
    def overlaps(copy: Activity) -> bool:
        return any(kernel.begin < copy.end and copy.begin < kernel.end for kernel in activities["kernel"])

    copies = [copy for copy in activities["dtoh"] if copy.end - copy.begin > LONG]
    assert len(copies) >= 4 * DEPTH
    assert sum(map(overlaps, copies)) > len(copies) / 2
