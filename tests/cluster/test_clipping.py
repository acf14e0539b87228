"""Clipping by the global norm of the aggregated gradient: as one process does with `clip_grad_norm_`."""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ps_protocol.errors import BadModel
from ps_protocol.norms import agree
from ps_protocol.optimizers import HyperParameters, check_optimizer
from ps_protocol.vocabulary import ParameterSpec
from trainer_client import ParameterClient, RemoteOptimizer, Session
from trainer_client.flat_buckets import FlatBucket
from trainer_client.testing import LocalCluster

from ..raising import raises_code
from .conftest import Carrier
from .faulty_run import FaultyRun, expected_result
from .parity_model import assert_identical, run_trainers

pytestmark = [pytest.mark.cluster, pytest.mark.clip]

STEPS = 20
MAX_NORM = 0.5
BUCKETS = {"bucket_bytes": 2000}
SMALL = {**BUCKETS, "min_block_size": 100}

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "AdamW": partial(torch.optim.AdamW, lr=0.01),
}


with torch.random.fork_rng():
    torch.manual_seed(0)
    MODEL = nn.Sequential(nn.Linear(20, 60), nn.Tanh(), nn.Linear(60, 20))


@pytest.fixture(scope="module")
def ring() -> Iterator[LocalCluster]:
    with LocalCluster(pservers=0, trainers=2, strategy="ring") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def cluster(carrier: Carrier) -> Iterator[LocalCluster]:
    with LocalCluster(pservers=3, trainers=2, **carrier, on_trainer_loss="fail") as cluster:
        yield cluster


def make_model() -> nn.Module:
    """The same weights at each call, in any thread."""
    return copy.deepcopy(MODEL)


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    inputs = torch.randn(8, 20, generator=generator)
    scale = (1e-3, 1.0, 30.0)[step % 3]  # steps that are not clipped, and such that are
    loss: Tensor = scale * (model(inputs) - inputs.flip(1)).square().mean()
    return loss


def train(session: Session, *, kind: str = "AdamW", **arguments: Any) -> tuple[dict[str, Tensor], list[float]]:
    model = make_model()
    optimizer = RemoteOptimizer(OPTIMIZERS[kind](model.named_parameters()), model=model, session=session, **arguments)
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step, session.rank).backward()
        optimizer.step()
        assert optimizer.grad_norm is not None
        norms.append(optimizer.grad_norm)
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}, norms


def train_locally(kind: str) -> tuple[dict[str, Tensor], list[float]]:
    model = make_model()
    optimizer = OPTIMIZERS[kind](model.named_parameters())
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        (sum(loss_of(model, step, rank) for rank in range(2)) / 2).backward()  # type: ignore[union-attr]
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, norms


def check_parity(address: str, kind: str, *, overlap: bool, **arguments: Any) -> None:
    work = partial(train, kind=kind, overlap=overlap, max_grad_norm=MAX_NORM)
    (one, norms), (other, same_norms) = run_trainers(address, [work, work], **arguments)
    expected, expected_norms = train_locally(kind)
    assert_identical(one, other)
    assert norms == same_norms
    torch.testing.assert_close(torch.tensor(norms), torch.tensor(expected_norms))
    for name, tensor in expected.items():
        torch.testing.assert_close(one[name], tensor, rtol=1e-4, atol=1e-5)
    assert min(norms) < MAX_NORM < max(norms)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_whole_gradient_is_clipped_as_in_one_process(cluster: LocalCluster, kind: str, overlap: bool) -> None:
    check_parity(cluster.address, kind, overlap=overlap, **SMALL)


@pytest.mark.ring
@pytest.mark.parametrize("overlap", [False, True])
def test_a_ring_clips_the_same(ring: LocalCluster, overlap: bool) -> None:
    check_parity(ring.address, "momentum", overlap=overlap, **BUCKETS)


@pytest.mark.ring
def test_all_of_a_ring_clip_by_one_number(ring: LocalCluster) -> None:
    """Machines may add squares up in another order, and parameters that differ in a bit never meet again."""

    def work(session: Session, error: float) -> tuple[dict[str, Tensor], list[float]]:
        def add_up(self: FlatBucket) -> Tensor:
            return sum_of_squares(self) * (1 + error)

        sum_of_squares = FlatBucket.sum_of_squares
        model = make_model()
        optimizer = RemoteOptimizer(
            OPTIMIZERS["momentum"](model.named_parameters()), session=session, max_grad_norm=MAX_NORM
        )
        norms = []
        for bucket in optimizer._steps._buckets:  # type: ignore[union-attr]
            bucket.sum_of_squares = partial(add_up, bucket)  # type: ignore[method-assign]
        for step in range(6):
            optimizer.zero_grad()
            loss_of(model, step, session.rank).backward()
            optimizer.step()
            assert optimizer.grad_norm is not None
            norms.append(optimizer.grad_norm)
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}, norms

    (one, norms), (other, same) = run_trainers(ring.address, [partial(work, error=e) for e in (0.0, 1e-3)], **BUCKETS)
    assert_identical(one, other)
    assert norms == same


def skip_one(session: Session) -> list[float]:
    weight = nn.Parameter(torch.zeros(4))
    sgd = torch.optim.SGD([("weight", weight)], lr=1.0)
    optimizer = RemoteOptimizer(sgd, session=session, max_grad_norm=1.0, nonfinite="skip_round")
    norms = []
    for step in range(3):
        weight.grad = torch.full((4,), math.nan if (session.rank, step) == (1, 1) else 3.0)
        optimizer.step()
        assert optimizer.grad_norm is not None
        norms.append(optimizer.grad_norm)
    assert weight.tolist() == pytest.approx([-1.0] * 4, rel=1e-6)  # two steps of norm 1
    return norms


@pytest.mark.ring
def test_a_skipped_round_has_no_norm(ring: LocalCluster, cluster: LocalCluster) -> None:
    for one in (ring, cluster):
        for norms in run_trainers(one.address, [skip_one, skip_one]):
            assert norms == [6.0, pytest.approx(math.nan, nan_ok=True), 6.0]


def test_a_limit_that_is_never_reached_changes_no_bit(cluster: LocalCluster) -> None:
    def unclipped(session: Session) -> dict[str, Tensor]:
        model = make_model()
        optimizer = RemoteOptimizer(OPTIMIZERS["AdamW"](model.named_parameters()), session=session)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, step, session.rank).backward()
            optimizer.step()
        assert optimizer.grad_norm is None
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    work = partial(train, max_grad_norm=1e9)
    clipped, _ = run_trainers(cluster.address, [work, work], **SMALL)[0]
    assert_identical(clipped, run_trainers(cluster.address, [unclipped, unclipped], **SMALL)[0])


def test_a_trainer_may_clip_its_own_gradient(cluster: LocalCluster) -> None:
    """Before it is pushed: what the script does to `grad` is honoured."""

    def work(session: Session) -> dict[str, Tensor]:
        model = make_model()
        optimizer = RemoteOptimizer(OPTIMIZERS["momentum"](model.named_parameters()), session=session)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, step, session.rank).backward()
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    model = make_model()
    optimizer = OPTIMIZERS["momentum"](model.named_parameters())
    for step in range(STEPS):
        gradients = []
        for rank in range(2):
            optimizer.zero_grad()
            loss_of(model, step, rank).backward()
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            gradients.append([parameter.grad for parameter in model.parameters()])
        for parameter, one, other in zip(model.parameters(), *gradients, strict=True):
            assert one is not None
            assert other is not None
            parameter.grad = (one + other) * 0.5
        optimizer.step()
    for actual in run_trainers(cluster.address, [work, work], **SMALL):
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(actual[name], parameter.detach(), rtol=1e-4, atol=1e-5)


def test_with_overlap_the_script_cannot(carrier: Carrier) -> None:
    def work(session: Session) -> None:
        model = make_model()
        optimizer = RemoteOptimizer(OPTIMIZERS["AdamW"](model.named_parameters()), session=session, overlap=True)
        (1000 * loss_of(model, 2, 0)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        with raises_code("gradient_changed", match="max_grad_norm"):
            optimizer.step()

    with LocalCluster(pservers=1, trainers=1, **carrier, on_trainer_loss="fail") as cluster:
        run_trainers(cluster.address, [work])


def test_only_one_gradient_of_all_can_be_clipped(carrier: Carrier) -> None:
    def work(session: Session) -> None:
        with pytest.raises(BadModel, match="max_grad_norm belongs to the synchronous mode"):
            RemoteOptimizer(OPTIMIZERS["AdamW"](make_model().parameters()), session=session, max_grad_norm=1.0)

    with LocalCluster(pservers=1, trainers=1, **carrier, mode="async", on_trainer_loss="fail") as cluster:
        run_trainers(cluster.address, [work])


@pytest.mark.extended
def test_delayed_steps_are_clipped_too(carrier: Carrier) -> None:
    with LocalCluster(pservers=2, trainers=2, **carrier, max_delay=1, on_trainer_loss="fail") as cluster:
        work = partial(_push_given_gradients, max_grad_norm=MAX_NORM)
        one, other = run_trainers(cluster.address, [work, work], **SMALL)
    assert_identical(one, other)
    model = make_model()
    optimizer = OPTIMIZERS["AdamW"](model.named_parameters())
    for step in range(STEPS):
        for parameter in model.parameters():
            parameter.grad = (_gradient(parameter, step, 0) + _gradient(parameter, step, 1)) / 2
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(one[name], parameter.detach(), rtol=1e-4, atol=1e-5)


def _gradient(parameter: Tensor, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(parameter.numel() + 100 * step + rank)
    return 0.02 * (step % 3) * torch.randn(parameter.shape, generator=generator)


def _push_given_gradients(session: Session, **arguments: Any) -> dict[str, Tensor]:
    model = make_model()
    optimizer = RemoteOptimizer(OPTIMIZERS["AdamW"](model.named_parameters()), session=session, **arguments)
    for step in range(STEPS):
        for parameter in model.parameters():
            parameter.grad = _gradient(parameter, step, session.rank)
        optimizer.step()
    optimizer.synchronize()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def test_who_comes_later_ends_a_round_that_only_some_pservers_have_stepped(carrier: Carrier) -> None:
    numbers: list[HyperParameters] = [{"lr": 1.0, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0}]
    spec, optimizer = ParameterSpec("w", (2, 8)), check_optimizer("SGD", [{"nesterov": False, "maximize": False}])

    async def join() -> ParameterClient:
        client = ParameterClient(cluster.address, rank=0, world_size=1, max_grad_norm=1.0)
        await client.join()
        await client.declare([spec], optimizer)
        return client

    async def die_in_the_middle() -> None:
        client = await join()
        await client.send_initial({"w": torch.zeros(2, 8)})
        await client.get(0)
        await client.send(1, {"w": torch.full((2, 8), 3.0)}, numbers)
        told = [await pserver.norm(1, with_batch_barrier=True) for pserver in client.pservers]
        agreed = agree([norm for norm in told if norm is not None])
        assert agreed is not None
        await client.pservers[0].norm(1, norm=agreed[0])
        await client.leave("failed", "it dies before it has told the other one")

    async def go_on() -> Tensor:
        client = await join()
        assert client.start == 2
        values = await client.get(1)
        await client.leave()
        return values["w"]

    with LocalCluster(pservers=2, trainers=1, **carrier, min_block_size=8, on_trainer_loss="wait") as cluster:
        asyncio.run(die_in_the_middle())
        w = asyncio.run(asyncio.wait_for(go_on(), 20))
    torch.testing.assert_close(w, torch.full((2, 8), -0.25))  # norm 12, clipped to 1


@pytest.mark.extended
@pytest.mark.timeout(180)
def test_processes_may_die_while_a_norm_is_agreed_on(carrier: Carrier) -> None:
    """A limit that is never reached leaves every bit as it is; all of the agreement takes place."""
    with FaultyRun(100, **carrier, environment={"GRADPOST_MAX_GRAD_NORM": "1e9"}) as run:
        run.wait_for_round(10)
        run.kill(run.cluster.pservers[1])
        run.cluster.start_pserver(1)
        run.wait_for_round(30)
        run.kill(run.cluster.trainers[1])
        run.start_trainer(1)
        run.wait_for_round(50)
        run.kill(run.cluster.pservers[0])
        run.cluster.start_pserver(0)
        assert run.results() == [expected_result(100)] * 2
