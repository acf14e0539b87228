"""Training on a cluster gives what torch.optim gives in one process."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle, product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ps_protocol.vocabulary import PLACEMENTS
from trainer_client import RemoteOptimizer, Session
from trainer_client.testing import LocalCluster

from ..soaking import parametrize_sampled
from .conftest import Carrier, StartCluster
from .training import (
    LR,
    OPTIMIZERS,
    STEPS,
    Parameters,
    assert_identical,
    run_all,
    run_trainers,
    seeded,
    train_locally,
    train_remotely,
    values,
)
from .up_support import ROOT

pytestmark = pytest.mark.cluster
CUTS = (1, 100, 8192)  # min_block_size, in elements
MOST_IN_LR = 0.05  # difference to a step on the joined batch, in learning rates


@pytest.fixture(scope="module", params=[(1, 1), pytest.param((2, 2), marks=pytest.mark.soak), (3, 1)], ids=str)
def cluster(request: pytest.FixtureRequest, carrier: Carrier) -> Iterator[LocalCluster]:
    """Pservers and their torch threads; serves all runs of the matrix, one after another."""
    pservers, threads = request.param
    with LocalCluster(pservers=pservers, trainers=2, threads=threads, **carrier) as cluster:
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


def test_whole_parameters(cluster: LocalCluster) -> None:
    actual = run_all(cluster, partial(train_remotely, "SGD-momentum"), slice_parameters=False)
    assert_identical(actual[0], train_locally("SGD-momentum"))


def test_arrival_order_changes_no_bit(cluster: LocalCluster) -> None:
    def train_in_order(first: int) -> list[dict[str, Tensor]]:
        """One trainer's push always comes when the other's has been staged everywhere."""
        pushed = [threading.Event() for _ in range(STEPS)]
        second = 1 - first

        def work(session: Session, rank: int) -> dict[str, Tensor]:
            def before_step(step: int, parameters: Parameters) -> None:
                if rank == second:
                    pushed[step].wait(timeout=30)

            if rank == first:
                # The first one's step() blocks until the second has pushed, so the pull tells when it may.
                pull = session.client.pull

                async def pull_and_tell(round_: int, *args: object, **kwargs: object) -> None:
                    if round_:
                        pushed[round_ - 1].set()
                    await pull(round_, *args, **kwargs)

                session.client.pull = pull_and_tell
            return train_remotely("AdamW", session, contributor=rank, before_step=before_step)

        return run_trainers(cluster.address, [partial(work, rank=0), partial(work, rank=1)], min_block_size=100)

    one, other = train_in_order(0), train_in_order(1)
    assert_identical(one[0], one[1])
    assert_identical(one[0], other[0])


def make_net() -> nn.Sequential:
    return seeded(nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 5)))


def joined_batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(48, 20, generator=generator), torch.randint(0, 5, (48,), generator=generator)


def train_on_part(optimizer: torch.optim.Optimizer, net: nn.Module, rank: int, world_size: int) -> dict[str, Tensor]:
    for step in range(STEPS):
        inputs, labels = joined_batch(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(inputs[rank::world_size]), labels[rank::world_size]).backward()
        optimizer.step()
    return values(net)


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.soak), 3], ids=lambda n: f"{n} trainers")
def joined_cluster(request: pytest.FixtureRequest, carrier: Carrier) -> Iterator[LocalCluster]:
    with LocalCluster(pservers=2, trainers=request.param, **carrier) as cluster:
        yield cluster


@parametrize_sampled("name", OPTIMIZERS, ["AdamW"])
def test_averaged_parts_give_the_joined_batch(
    joined_cluster: LocalCluster, name: str, record_property: Callable[[str, object], None]
) -> None:
    cls, options = OPTIMIZERS[name]
    net = make_net()
    expected = train_on_part(cls(net.named_parameters(), lr=LR, **options), net, 0, 1)

    def work(session: Session) -> dict[str, Tensor]:
        net = make_net()
        optimizer = RemoteOptimizer(cls(net.named_parameters(), lr=LR, **options), session=session)
        return train_on_part(optimizer, net, session.rank, session.world_size)

    results = run_all(joined_cluster, work, min_block_size=50)
    worst = max((results[0][key] - value).abs().max().item() for key, value in expected.items()) / LR
    record_property("max_difference_in_lr", worst)
    print(f"{name}, {joined_cluster.num_trainers} trainers: at most {worst:.1e}·lr from the joined batch")
    assert worst <= MOST_IN_LR
    for other in results[1:]:
        assert_identical(other, results[0])


FRESH_TRAINER = """
import sys, torch
from safetensors.torch import save_file
from tests.cluster.training import train_remotely
from trainer_client import connect
torch.set_num_threads(1)
session = connect()
save_file(train_remotely(sys.argv[1], session), f"{sys.argv[2]}/{session.rank}.safetensors")
"""


@pytest.mark.extended
@parametrize_sampled("name", ["SGD-nesterov", "AdamW", "RMSprop", "NAdam"], ["NAdam"])  # each starts a cluster
def test_fresh_processes_give_the_bits_of_one_process(name: str, carrier: Carrier, tmp_path: Path) -> None:
    settings = {**carrier, "exit_when_done": True, "lease_seconds": 2, "min_block_size": 64}
    with LocalCluster(pservers=2, trainers=2, **settings) as cluster:
        command = [sys.executable, "-W", "error", "-c", FRESH_TRAINER, name, str(tmp_path)]
        codes = cluster.run_trainers(command, env={"PYTHONPATH": str(ROOT)})
        assert codes == [0, 0], "\n".join(cluster.output)
        assert [child.wait(20) for child in (*cluster.pservers, cluster.coordinator)] == [0, 0, 0]
    expected = train_locally(name)
    for rank in range(2):
        assert_identical(load_file(tmp_path / f"{rank}.safetensors"), expected)


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
