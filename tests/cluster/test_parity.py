"""Training gives what torch.optim gives in one process; asynchronous modes lose nothing, within their bounds."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import cycle, pairwise, product

import pytest
import torch
from torch import Tensor, nn

from ps_protocol.errors import NonFiniteGradient
from ps_protocol.vocabulary import PLACEMENTS, ParameterSpec
from ps_protocol.wire_types import GROUP
from trainer_client import ParameterClient, RemoteOptimizer, Session
from trainer_client.client.buckets import Bucket
from trainer_client.testing import LocalCluster

from ..soaking import parametrize_sampled
from .conftest import StartCluster
from .training import (
    NUMBERS,
    OPTIMIZERS,
    SGD,
    Parameters,
    assert_identical,
    run_all,
    run_trainers,
    step_with,
    train_locally,
    train_remotely,
    values,
    wrap_weight,
)

pytestmark = pytest.mark.cluster

CUTS = (1, 100, 8192)  # min_block_size, in elements


@pytest.fixture(scope="module", params=[pytest.param((1, 1), marks=pytest.mark.extended), (3, 1)], ids=str)
def cluster(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    """Pservers and their torch threads; serves all runs of the matrix, one after another."""
    pservers, threads = request.param
    with LocalCluster(pservers=pservers, trainers=2, threads=threads, local_transport=False) as cluster:
        yield cluster


# CI takes every optimizer with one cut.
@parametrize_sampled(("name", "cut"), product(OPTIMIZERS, CUTS), [*zip(OPTIMIZERS, cycle(CUTS))])
def test_same_gradients_give_the_bits_of_one_process(cluster: LocalCluster, name: str, cut: int) -> None:
    expected = train_locally(name)
    train = partial(train_remotely, name)
    for actual in run_all(cluster, train, min_block_size=cut):
        assert_identical(actual, expected)


@parametrize_sampled(("placement", "cut"), product(PLACEMENTS, CUTS), [*zip(PLACEMENTS, CUTS, strict=True)])
def test_cuts_and_placement_change_no_bit(cluster: LocalCluster, cut: int, placement: str) -> None:
    expected = train_locally("Adam")
    train = partial(train_remotely, "Adam")
    for actual in run_all(cluster, train, min_block_size=cut, placement=placement):
        assert_identical(actual, expected)


LARGE, FEW = 200_000, 1000


@pytest.mark.parametrize("max_delay", [0, pytest.param(2, marks=pytest.mark.extended)])
def test_frozen_parameters_travel_only_when_they_change(own_cluster: StartCluster, max_delay: int) -> None:
    def make() -> Parameters:
        return {"backbone": nn.Parameter(torch.ones(LARGE)), "head": nn.Parameter(torch.ones(FEW))}

    def take_step(optimizer: torch.optim.Optimizer, parameters: Parameters, step: int) -> None:
        for name, parameter in parameters.items():
            parameter.grad = torch.full_like(parameter, 0.5) if name == "head" or step == 3 else None
        optimizer.step()

    def train(session: Session) -> tuple[dict[str, Tensor], list[float]]:
        parameters, counter = make(), session.client.metrics.pulled_bytes._value
        optimizer = RemoteOptimizer(torch.optim.SGD(parameters.items(), lr=0.1), session=session)
        pulled = []
        for step in range(6):
            before = counter.get()
            take_step(optimizer, parameters, step)
            optimizer.synchronize()
            pulled.append(counter.get() - before)
        return values(parameters), pulled

    expected = make()
    optimizer = torch.optim.SGD(expected.values(), lr=0.1, fused=True)
    for step in range(6):
        take_step(optimizer, expected, step)
    for actual, pulled in run_all(own_cluster(max_delay=max_delay), train):
        assert_identical(actual, values(expected))
        assert pulled[3] > 4 * LARGE
        if max_delay == 0:  # else each set of receive buffers has to be filled once
            assert all(size < 4 * FEW + 4000 for step, size in enumerate(pulled) if step not in (0, 3))


# ---------------------------------------------------------------------- types on the wire


@pytest.fixture(scope="module")
def pair(shared_cluster: StartCluster) -> LocalCluster:
    return shared_cluster()


def test_a_difference_takes_a_quarter_of_the_bytes(pair: LocalCluster) -> None:
    def train(session: Session) -> list[float]:
        parameter = nn.Parameter(torch.zeros(100_000))
        optimizer = RemoteOptimizer(torch.optim.SGD([("w", parameter)], lr=0.1), session=session)
        pulled = session.client.metrics.pulled_bytes
        sizes = []
        for step in range(4):
            parameter.grad = torch.randn(100_000, generator=torch.Generator().manual_seed(step))
            before = pulled._value.get()
            optimizer.step()
            sizes.append(pulled._value.get() - before)
        return sizes

    for sizes in run_all(pair, train, pull_type="int8"):
        assert sizes == pytest.approx([100_000 * (1 + 4 / GROUP)] * 4, abs=1000)


# ---------------------------------------------------------------------- async


async def join_run(client: ParameterClient, specs: Sequence[ParameterSpec], value: float = 0.0) -> None:
    """Declare the model and upload the initial values, if this client is the uploader."""
    await client.declare(specs, SGD)
    if client.uploader == client.joined.rank:
        await client.send_initial({spec.name: torch.full(spec.shape, value) for spec in specs})
    await client.get(0)


def play(address: str, num_trainers: int, steps: int, seed: int) -> list[list[list[int]]]:
    """Train with trainers that are slow at random. Return for each trainer and step how many steps of each it has.

    Each trainer has elements of its own in every block and counts in them.
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


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("bound", "delay"),
    [(2, 0), pytest.param(2, 3, marks=pytest.mark.extended)],
)
def test_max_staleness_is_never_exceeded_and_is_reached(own_cluster: StartCluster, bound: int, delay: int) -> None:
    settings = {"mode": "ssp", "max_staleness": bound, "max_delay": delay, "min_block_size": 10}
    played = play(own_cluster(trainers=3, **settings).address, 3, 40, seed=bound)
    leads = [step - min(held) for trainer in played for step, held in enumerate(trainer)]
    if delay:
        assert bound < max(leads) <= bound + delay  # a step may begin so much ahead of the get that it starts on
    else:
        assert max(leads) == bound
    assert sum(lead > 0 for lead in leads) > 4  # it is not accidentally synchronous


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("delay", "mode"), [(1, "sync"), (3, "async")])
@pytest.mark.extended
def test_max_delay_is_never_exceeded_and_is_reached(own_cluster: StartCluster, mode: str, delay: int) -> None:
    cluster = own_cluster(mode=mode, max_delay=delay, min_block_size=10)
    played = play(cluster.address, 2, 30, seed=delay)
    for rank, trainer in enumerate(played):
        own = [held[rank] for held in trainer]
        assert max(step - count for step, count in enumerate(own)) == delay
        assert all(new >= old for old, new in pairwise(own))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("delay", [0, 2])
@pytest.mark.extended
def test_a_step_that_could_not_begin_or_is_refused_holds_no_trainer_up(
    own_cluster: StartCluster, delay: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    def train(session: Session) -> float:
        weight, optimizer = wrap_weight(session, 100)
        step_with(optimizer, weight)
        if delay == 0:  # else the script would have to be started again
            with monkeypatch.context() as patch:
                patch.setattr(Bucket, "fill", interrupt)
                with pytest.raises(KeyboardInterrupt):
                    step_with(optimizer, weight, value=2.0)
            optimizer.synchronize()  # finishes it
        with pytest.raises(NonFiniteGradient):  # noqa: PT012 - with a delay a later step raises it
            for gradient in (math.nan, 10.0, 20.0):
                step_with(optimizer, weight, value=gradient)
            optimizer.synchronize()
        for _ in range(4):
            step_with(optimizer, weight)
        optimizer.synchronize()
        return weight[0].item()

    cluster = own_cluster(pservers=1, trainers=1, max_delay=delay)
    assert run_all(cluster, train) == [-5.0 if delay else -7.0]


@pytest.mark.timeout(300)
@pytest.mark.asyncio
@pytest.mark.extended
async def test_a_trainer_may_leave_after_a_step_that_is_queued_everywhere(own_cluster: StartCluster) -> None:
    cluster = own_cluster(pservers=1, trainers=1, mode="async")
    async with ParameterClient(cluster.address, rank=0, world_size=1) as client:
        await join_run(client, [ParameterSpec("w", (4,))])
        await client.send(1, {"w": torch.ones(4)}, NUMBERS)
    assert cluster.status().state == "finished"
