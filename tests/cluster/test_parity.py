"""Training on a cluster gives what torch.optim gives in one process that rounds alike."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import cycle, product

import pytest
import torch
from torch import Tensor, nn

from ps_protocol.errors import NonFiniteGradient
from ps_protocol.vocabulary import PLACEMENTS
from ps_protocol.wire_types import GROUP
from trainer_client import RemoteOptimizer, Session
from trainer_client.testing import LocalCluster

from ..soaking import parametrize_sampled
from .conftest import StartCluster
from .training import (
    OPTIMIZERS,
    Parameters,
    assert_identical,
    run_all,
    train_locally,
    train_remotely,
    values,
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

TOPK = 0.05


@pytest.fixture(scope="module")
def pair(shared_cluster: StartCluster) -> LocalCluster:
    return shared_cluster()


def train_with_troubles(
    session: Session, push: str, troubles: list[bool], is_left_out: bool = False
) -> dict[str, Tensor]:
    """Take steps in some of which trainer 1 has a NaN; under `reject` it corrects that."""
    parameters = {name: nn.Parameter(torch.ones(5000)) for name in ("a", "b")}
    local = torch.optim.SGD(parameters.items(), lr=1.0)
    options = {"push_type": push, "topk": TOPK, "slice_parameters": False, "bucket_bytes": 4096}
    optimizer = RemoteOptimizer(local, session=session, **options)
    for step, has_trouble in enumerate(troubles):
        generator = torch.Generator().manual_seed(100 * step + session.rank)
        for parameter in parameters.values():
            parameter.grad = torch.randn(5000, generator=generator)
        if is_left_out and has_trouble:
            continue
        if has_trouble and session.rank == 1:
            good = parameter.grad[7].item()
            parameter.grad[7] = float("nan")
            try:
                optimizer.step()
            except NonFiniteGradient:
                parameter.grad[7] = good
                optimizer.step()
        else:
            optimizer.step()
    return values(parameters)


@pytest.mark.extended
@pytest.mark.parametrize(("push", "policy"), [("topk", "reject"), ("int8", "skip_round")])
def test_a_push_that_is_not_applied_leaves_no_trace(own_cluster: StartCluster, push: str, policy: str) -> None:
    troubles = [False, True, False, True, True, False]
    troubled = partial(train_with_troubles, push=push, troubles=troubles)
    if policy == "reject":  # the gradient is corrected
        untroubled = partial(train_with_troubles, push=push, troubles=[False] * 6)
    else:
        untroubled = partial(train_with_troubles, push=push, troubles=troubles, is_left_out=True)
    one, other = run_all(own_cluster(nonfinite=policy), troubled)
    assert_identical(one, other)
    assert_identical(one, run_all(own_cluster(nonfinite="reject"), untroubled)[0])


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
