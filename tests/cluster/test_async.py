"""The asynchronous modes on real clusters: nothing is lost or counted twice, what a get may see, and the bounds."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise, product
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load
from torch import Tensor, nn

from ps_protocol.errors import NonFiniteGradient
from ps_protocol.optimizers import check_optimizer
from ps_protocol.vocabulary import ParameterSpec
from trainer_client import ParameterClient, RemoteOptimizer, Session
from trainer_client.pushing.buckets import Bucket
from trainer_client.testing import LocalCluster

from ..raising import raises_code
from ..soaking import parametrize_sampled
from .conftest import Carrier
from .parity_model import run_trainers

pytestmark = pytest.mark.cluster

SGD = check_optimizer("SGD", [{"nesterov": False, "maximize": False}])
NUMBERS = [{"lr": 1.0, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0}]


@contextmanager
def cluster_of(
    trainers: int, carrier: Carrier, *, pservers: int = 1, mode: str = "async", **settings: Any
) -> Iterator[str]:
    with LocalCluster(pservers=pservers, trainers=trainers, **carrier, mode=mode, **settings) as cluster:
        yield cluster.address


# ---------------------------------------------------------------------- no pollution


@pytest.mark.asyncio
@parametrize_sampled("pushes", [300, 2000], [300])
async def test_many_trainers_hammer_the_same_block(carrier: Carrier, pushes: int) -> None:
    """With SGD of rate 1 and integers the value is the exact sum: every gradient was applied, and applied once."""
    num_trainers = 4
    specs = [ParameterSpec("w", (10,))]

    async def train(address: str, rank: int) -> Tensor:
        async with ParameterClient(address, rank=rank) as client:
            await client.declare(specs, SGD)
            if client.uploader == rank:
                await client.send_initial({"w": torch.zeros(10)})
            await client.get(0)
            for step in range(1, pushes + 1):
                gradient = torch.arange(10.0) + rank * step % 7
                await client.send(step, {"w": gradient}, NUMBERS)
            return (await client.get(pushes))["w"]

    settings = {"wait_for_apply": True, "max_delay": pushes, "max_queued": 4}
    with cluster_of(num_trainers, carrier, **settings) as address:
        results = await asyncio.gather(*(train(address, rank) for rank in range(num_trainers)))
    expected = -sum(
        pushes * torch.arange(10.0) + sum(rank * step % 7 for step in range(1, pushes + 1))
        for rank in range(num_trainers)
    )
    assert torch.equal(min(results, key=lambda values: values.sum().item()), expected)  # who came last saw everything


# ---------------------------------------------------------------------- what a get may see


async def watch(address: str, seconds: float, *, until_torn: bool) -> tuple[int, int, int]:
    """One trainer adds the same number to every element, over and over; the other looks, and counts what is torn.

    It looks for so long, and until it has seen three versions and, if that is wanted, something torn.
    Returns the number of different versions seen, and of looks in which one block, and the shard, were not uniform.
    """
    size = 4_000_000
    specs = [ParameterSpec("a", (size,)), ParameterSpec("b", (size,))]
    stop = asyncio.Event()

    async def push() -> None:
        async with ParameterClient(address, rank=0) as client:
            await client.declare(specs, SGD)
            await client.send_initial({spec.name: torch.zeros(size) for spec in specs})
            await client.get(0)
            gradient = {spec.name: torch.full((size,), -1.0) for spec in specs}
            step = 0
            while not stop.is_set():
                step += 1
                await client.send(step, gradient, NUMBERS)

    async def look() -> tuple[int, int, int]:
        seen, torn_blocks, torn_shards = set(), 0, 0
        async with ParameterClient(address, rank=1) as client:
            await client.declare(specs, SGD)
            begin = time.monotonic()
            while time.monotonic() < begin + seconds or len(seen) < 3 or (until_torn and not torn_blocks):
                assert time.monotonic() < begin + 100, f"{torn_blocks} looks of {len(seen)} versions were torn"
                values = await client.get(0)
                edges = [(values[name].min().item(), values[name].max().item()) for name in ("a", "b")]
                torn_blocks += any(low != high for low, high in edges)
                torn_shards += len({edge for block in edges for edge in block}) > 1
                seen.add(edges[0][0])
            stop.set()
        return len(seen), torn_blocks, torn_shards

    _, result = await asyncio.gather(push(), look())
    return result


@pytest.mark.asyncio
@pytest.mark.parametrize("consistency", [pytest.param("none", marks=pytest.mark.soak), "block", "shard"])
@pytest.mark.extended
async def test_torn_reads(carrier: Carrier, consistency: str) -> None:
    with cluster_of(2, carrier, read_consistency=consistency, max_delay=1_000_000, max_queued=2) as address:
        until_torn = consistency == "none"  # else the setting would mean nothing
        versions, torn_blocks, torn_shards = await watch(address, seconds=2, until_torn=until_torn)
    print(f"{consistency}: {versions} versions, {torn_blocks} torn blocks, {torn_shards} torn shards")
    assert versions >= 3
    if consistency != "none":
        assert torn_blocks == 0
    if consistency == "shard":
        assert torn_shards == 0


# ---------------------------------------------------------------------- the bounds hold, and are reached


def play(address: str, num_trainers: int, steps: int, seed: int) -> list[list[list[int]]]:
    """Trainers that are slow at random. For each trainer and step: how many steps of everybody its parameters hold.

    Each trainer has elements of its own in every block and counts in them, so that it is the values that tell.
    """

    def train(session: Session) -> list[list[int]]:
        weight = nn.Parameter(torch.zeros(99))
        rate = num_trainers if session.mode == "sync" else 1  # rounds are averaged
        optimizer = RemoteOptimizer(torch.optim.SGD([("weight", weight)], lr=rate), session=session)
        chance = random.Random(seed * 100 + session.rank)
        held = []
        for _ in range(steps):
            held.append([-round(weight[rank::num_trainers].max().item()) for rank in range(num_trainers)])
            if chance.random() < 0.3:
                time.sleep(chance.uniform(0.01, 0.06))
            weight.grad = torch.zeros(99)
            weight.grad[session.rank :: num_trainers] = 1
            optimizer.step()
        return held

    return run_trainers(address, [train] * num_trainers)


@pytest.mark.parametrize(
    ("bound", "delay"),
    [pytest.param(0, 0, marks=pytest.mark.soak), (2, 0), pytest.param(2, 3, marks=pytest.mark.extended)],
)
def test_max_staleness_is_never_exceeded_and_is_reached(carrier: Carrier, bound: int, delay: int) -> None:
    steps = 40
    settings = {"mode": "ssp", "max_staleness": bound, "max_delay": delay, "min_block_size": 10}
    with cluster_of(3, carrier, pservers=2, **settings) as address:
        played = play(address, 3, steps, seed=bound)
    leads = [step - min(held) for trainer in played for step, held in enumerate(trainer)]
    if delay:
        assert bound < max(leads) <= bound + delay  # a step may begin so much ahead of the get that it starts on
    else:
        assert max(leads) == bound
    if bound:
        assert sum(lead > 0 for lead in leads) > steps / 10  # it is not accidentally synchronous


@parametrize_sampled(("delay", "mode"), product((0, 1, 3), ("sync", "async")), [(1, "sync"), (3, "async")])
@pytest.mark.extended
def test_max_delay_is_never_exceeded_and_is_reached(carrier: Carrier, mode: str, delay: int) -> None:
    with cluster_of(2, carrier, pservers=2, mode=mode, max_delay=delay, min_block_size=10) as address:
        played = play(address, 2, 30, seed=delay)
    for rank, trainer in enumerate(played):
        own = [held[rank] for held in trainer]
        assert max(step - count for step, count in enumerate(own)) == delay
        assert all(new >= old for old, new in pairwise(own))


def test_a_run_with_delay_takes_every_step(carrier: Carrier) -> None:
    """What is on its way when the script ends is waited for."""

    def train(session: Session) -> float:
        weight = nn.Parameter(torch.zeros(100))
        optimizer = RemoteOptimizer(torch.optim.SGD([("weight", weight)], lr=1.0), session=session)
        for _ in range(10):
            weight.grad = torch.ones(100)
            optimizer.step()
        optimizer.synchronize()
        return weight[0].item()

    with cluster_of(2, carrier, pservers=2, mode="sync", max_delay=3, min_block_size=10) as address:
        assert run_trainers(address, [train, train]) == [-10.0, -10.0]


# ---------------------------------------------------------------------- looking inside


@pytest.mark.extended
def test_live_parameters_are_served_although_pservers_have_no_version_in_common(carrier: Carrier) -> None:
    stop = threading.Event()

    def train(session: Session) -> None:
        weight = nn.Parameter(torch.zeros(100))
        optimizer = RemoteOptimizer(torch.optim.SGD([("weight", weight)], lr=1.0), session=session)
        while not stop.is_set():
            weight.grad = torch.ones(100)
            optimizer.step()

    def look(address: str) -> list[float]:
        seen: list[float] = []
        try:
            while len(seen) < 5:
                response = httpx.get(f"{address}/v1/parameters/weight")
                if response.status_code == 200:
                    seen.append(load(response.content)["weight"][0].item())
        finally:
            stop.set()
        return seen

    with cluster_of(2, carrier, pservers=2, min_block_size=10) as address, ThreadPoolExecutor(1) as other:
        looking = other.submit(look, address)
        run_trainers(address, [train, train])
        seen = looking.result(30)
    assert seen == sorted(seen, reverse=True)


# ---------------------------------------------------------------------- one mode for all


def test_a_trainer_that_was_started_for_another_mode_is_told_the_difference(carrier: Carrier) -> None:
    with cluster_of(1, carrier, mode="ssp", max_staleness=3) as address:
        for expected in ({"mode": "sync"}, {"mode": "ssp", "max_staleness": 5}):
            with raises_code("mode_mismatch") as refused:
                Session(coordinator=address, **expected)
            wrong = {name: value for name, value in expected.items() if value != "ssp"}
            assert refused.value.facts["actual"] == wrong
            served = {"mode": "ssp", "max_staleness": 3}
            assert refused.value.facts["expected"] == {name: served[name] for name in wrong}
        Session(coordinator=address, mode="ssp", max_staleness=3).close()


# ---------------------------------------------------------------------- a step that fails


@pytest.mark.parametrize("delay", [0, 2])
@pytest.mark.extended
def test_a_step_that_could_not_begin_or_is_refused_holds_nobody_up(
    carrier: Carrier, delay: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(session: Session) -> float:
        weight = nn.Parameter(torch.zeros(100))
        optimizer = RemoteOptimizer(torch.optim.SGD([("weight", weight)], lr=1.0), session=session)

        def step(gradient: float) -> None:
            weight.grad = torch.full((100,), gradient)
            optimizer.step()

        step(1.0)
        if delay == 0:  # else the script would have to be started again
            with monkeypatch.context() as patch:
                patch.setattr(Bucket, "fill", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    step(2.0)
            optimizer.synchronize()  # finishes it
        with pytest.raises(NonFiniteGradient):  # noqa: PT012 - with a delay it is a later step that hears of it
            for gradient in (float("nan"), 10.0, 20.0):
                step(gradient)
            optimizer.synchronize()
        for _ in range(4):
            step(1.0)
        optimizer.synchronize()
        return weight[0].item()

    with cluster_of(1, carrier, mode="sync", max_delay=delay) as address:
        assert run_trainers(address, [train]) == [-5.0 if delay else -7.0]


def interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.asyncio
@pytest.mark.extended
async def test_who_leaves_after_a_step_that_is_queued_everywhere_fails_nobody(carrier: Carrier) -> None:
    with cluster_of(1, carrier) as address:
        client = ParameterClient(address, rank=0, world_size=1)
        await client.join()
        await client.declare([ParameterSpec("w", (4,), "F32", 0)], SGD)
        await client.send_initial({"w": torch.zeros(4)})
        await client.get(0)
        await client.send(1, {"w": torch.ones(4)}, NUMBERS)
        await client.leave()
        async with httpx.AsyncClient() as http:
            status = (await http.get(f"{address}/v1/status")).json()
        assert status["state"] == "finished", status


@pytest.mark.asyncio
@pytest.mark.extended
async def test_a_change_does_not_wait_until_no_push_waits_for_the_log(carrier: Carrier) -> None:
    """Eight trainers push 8 MB as fast as they can, so that at the end of each fsync other pushes wait."""
    num_trainers, spec = 8, ParameterSpec("w", (2_000_000,))
    begun, stop = asyncio.Semaphore(0), asyncio.Event()

    async def train(address: str, rank: int) -> None:
        gradient = torch.ones(spec.shape)
        async with ParameterClient(address, rank=rank) as client:
            await client.declare([spec], SGD)
            if client.uploader == rank:
                await client.send_initial({"w": torch.zeros(spec.shape)})
            await client.get(0)
            step = 0
            while not stop.is_set():
                step += 1
                await client.send(step, {"w": gradient}, NUMBERS)
                await client.get(step)
                begun.release()

    with cluster_of(num_trainers, carrier, durability="fsync") as address:
        trainers = [asyncio.create_task(train(address, rank)) for rank in range(num_trainers)]
        async with httpx.AsyncClient(base_url=address, timeout=30) as http, asyncio.timeout(120):
            for _ in range(3 * num_trainers):
                await begun.acquire()
            for number in range(1, 5):
                began = time.monotonic()
                answer = await http.put("/v1/controls/rate", json={"rate": 1e-6 * number})
                assert answer.status_code == 200, answer.text
                assert time.monotonic() - began < 5
            stop.set()
            await asyncio.gather(*trainers)
