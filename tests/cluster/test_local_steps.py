"""Local SGD and DiLoCo: what arrives on the pservers is what the trainers' own optimizers did."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from ps_protocol.errors import BadModel
from trainer_client import RemoteOptimizer, Session
from trainer_client.testing import LocalCluster

from .conftest import StartCluster
from .training import run_all, step_with, wrap_weight

pytestmark = pytest.mark.cluster
STEPS = 6


@pytest.fixture(scope="module")
def cluster(shared_cluster: StartCluster) -> LocalCluster:
    return shared_cluster(min_block_size=4)


def set_gradient(weight: nn.Parameter, rank: int, step: int) -> None:
    weight.grad = torch.randn(20, generator=torch.Generator().manual_seed(100 * step + rank))


def make_inner(weight: nn.Parameter) -> torch.optim.Optimizer:
    return torch.optim.Adam([("weight", weight)], lr=0.1)


def oracle(local_steps: int, outer: Callable[[nn.Parameter], torch.optim.Optimizer]) -> Tensor:
    """Train in one process: every trainer's own copy, and one outer optimizer on the mean of the differences."""
    center = nn.Parameter(torch.zeros(20))
    outer_optimizer = outer(center)
    copies = [nn.Parameter(torch.zeros(20)) for _ in range(2)]
    inner = [make_inner(copy) for copy in copies]
    for step in range(1, STEPS + 1):
        for rank in range(2):
            set_gradient(copies[rank], rank, step)
            inner[rank].step()
        if step % local_steps == 0:
            differences = [center.detach() - copy.detach() for copy in copies]
            center.grad = (differences[0] + differences[1]) * 0.5
            outer_optimizer.step()
            with torch.no_grad():
                for copy in copies:
                    copy.copy_(center)
    return center.detach()


def train(session: Session, **arguments: object) -> Tensor:
    weight = nn.Parameter(torch.zeros(20))
    outer = arguments.pop("outer", None)
    if callable(outer):
        arguments["outer"] = outer(weight)
    optimizer = RemoteOptimizer(make_inner(weight), session=session, **arguments)
    for step in range(1, STEPS + 1):
        set_gradient(weight, session.rank, step)
        optimizer.step()
    assert optimizer.round == STEPS // session.client.settings.local_steps
    return weight.detach().clone()


def test_local_sgd_averages_parameters(cluster: LocalCluster) -> None:
    expected = oracle(3, lambda p: torch.optim.SGD([p], lr=1.0, fused=True))
    for actual in run_all(cluster, partial(train, local_steps=3)):
        assert torch.equal(actual, expected)


def test_diloco_with_an_outer_optimizer_and_by_settings(cluster: LocalCluster) -> None:
    def make_outer(weight: nn.Parameter) -> torch.optim.Optimizer:
        return torch.optim.SGD([weight], lr=0.7, momentum=0.9, nesterov=True, fused=True)

    expected = oracle(2, make_outer)
    for arguments in ({"outer": make_outer}, {"outer_lr": 0.7, "outer_momentum": 0.9, "outer_nesterov": True}):
        for actual in run_all(cluster, partial(train, local_steps=2, **arguments)):
            assert torch.equal(actual, expected)


@pytest.mark.parametrize("mode", ["async", "ssp"])
@pytest.mark.extended
def test_where_nothing_is_averaged_each_trainer_moves_its_share(own_cluster: StartCluster, mode: str) -> None:
    """All pull towards 1; if each moved the parameters by its whole difference, they would end far beyond."""

    def work(session: Session) -> float:
        weight, optimizer = wrap_weight(session, 20, lr=0.4, local_steps=4)
        for _ in range(40):
            step_with(optimizer, weight, value=weight[0].item() - 1)
        return weight[0].item()

    for value in run_all(own_cluster(trainers=4, mode=mode, min_block_size=4), work):
        assert value == pytest.approx(1, abs=0.1)


def test_what_does_not_go_together_is_refused(cluster: LocalCluster, own_cluster: StartCluster) -> None:
    def without_local_steps(session: Session) -> None:
        weight, other = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
        for arguments, said in (
            ({"outer": torch.optim.SGD([weight], lr=1.0)}, "has work only with local_steps"),
            ({"outer_momentum": 0.9}, "has work only with local_steps"),
            (
                {"local_steps": 2, "outer": torch.optim.SGD([other], lr=1.0)},
                "must have the parameters of the inner one",
            ),
        ):
            with pytest.raises(BadModel, match=said):
                RemoteOptimizer(make_inner(weight), session=session, **arguments)

    def with_delay(session: Session) -> None:
        with pytest.raises(BadModel, match="local_steps with max_delay"):
            wrap_weight(session, 2, local_steps=2)

    run_all(cluster, without_local_steps)
    run_all(own_cluster(pservers=1, trainers=1, max_delay=1), with_delay)
