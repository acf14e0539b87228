"""Slots in `state_dict`: a checkpoint of a cluster goes on in one process with the same bits, and the reverse."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainer_client import RemoteOptimizer, Session
from trainer_client.testing import LocalCluster

from .conftest import Carrier
from .parity_model import OPTIMIZERS, assert_identical, change_rates, make_optimizer, make_parameters, run_trainers
from .parity_model import set_gradients as set_own_gradients

pytestmark = [pytest.mark.cluster]

BEFORE, AFTER = 5, 4
SMALL = {"bucket_bytes": 20_000, "min_block_size": 1000}  # several frames, and parameters that are cut
Parameters = dict[str, nn.Parameter]


@pytest.fixture(scope="module")
def cluster(carrier: Carrier) -> Iterator[LocalCluster]:
    with LocalCluster(pservers=2, trainers=2, **carrier, on_trainer_loss="fail") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def other_cluster(carrier: Carrier) -> Iterator[LocalCluster]:
    with LocalCluster(pservers=3, trainers=1, **carrier, on_trainer_loss="fail") as cluster:
        yield cluster


def set_mean_gradients(parameters: Parameters, step: int) -> None:
    """As the pservers have them: added up in the order of ranks, and divided once."""
    set_own_gradients(parameters, step, 0)
    first = {name: parameter.grad for name, parameter in parameters.items()}
    set_own_gradients(parameters, step, 1)
    for name, parameter in parameters.items():
        mine, theirs = first[name], parameter.grad
        parameter.grad = None if mine is None or theirs is None else (mine + theirs) * 0.5


def take_steps(
    optimizer: torch.optim.Optimizer,
    parameters: Parameters,
    steps: range,
    set_gradients: Callable[[Parameters, int], None],
) -> None:
    for step in steps:
        set_gradients(parameters, step)
        optimizer.step()
        change_rates(optimizer, step)


def values(parameters: Parameters) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}


def save(parameters: Parameters, optimizer: torch.optim.Optimizer) -> bytes:
    file = io.BytesIO()
    torch.save({"model": values(parameters), "optimizer": optimizer.state_dict()}, file)
    return file.getvalue()


def load(checkpoint: bytes, parameters: Parameters) -> dict[str, Any]:
    """The optimizer's part; the parameters take the rest."""
    read = torch.load(io.BytesIO(checkpoint), weights_only=True)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(read["model"][name])
    state: dict[str, Any] = read["optimizer"]
    return state


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_one_process_goes_on_with_what_a_cluster_saved(cluster: LocalCluster, kind: str) -> None:
    def train(session: Session) -> tuple[bytes, dict[str, Tensor]]:
        parameters = make_parameters(seed=session.rank)
        optimizer = RemoteOptimizer(make_optimizer(kind, parameters, local=False), session=session)
        gradients = partial(set_own_gradients, contributor=session.rank)
        take_steps(optimizer, parameters, range(BEFORE), gradients)
        checkpoint = save(parameters, optimizer) if session.rank == 0 else b""  # nobody else takes part in that
        take_steps(optimizer, parameters, range(BEFORE, BEFORE + AFTER), gradients)
        return checkpoint, values(parameters)

    (checkpoint, expected), _ = run_trainers(cluster.address, [train, train], **SMALL)
    parameters = make_parameters()
    optimizer = make_optimizer(kind, parameters, local=True)
    oracle = make_optimizer(kind, oracle_parameters := make_parameters(), local=True)
    take_steps(oracle, oracle_parameters, range(BEFORE), set_mean_gradients)
    state = load(checkpoint, parameters)
    assert_same_state(state, oracle.state_dict())
    kernels = [
        {key: group[key] for key in ("fused", "foreach")} for group in optimizer.param_groups if "fused" in group
    ]
    optimizer.load_state_dict(state)
    for group, kernel in zip(optimizer.param_groups, kernels, strict=False):
        group.update(kernel)  # torch takes over those of the checkpoint, which choose another rounding
    take_steps(optimizer, parameters, range(BEFORE, BEFORE + AFTER), set_mean_gradients)
    assert_identical(values(parameters), expected)


def assert_same_state(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    """Indices, slots, dtypes, shapes and bits."""
    assert actual["state"].keys() == expected["state"].keys()
    for index, slots in expected["state"].items():
        found = actual["state"][index]
        assert found.keys() == slots.keys()
        for name, slot in slots.items():
            assert found[name].dtype == slot.dtype, name
            assert torch.equal(found[name], slot), (index, name)
    for group, theirs in zip(actual["param_groups"], expected["param_groups"], strict=True):
        assert group["params"] == theirs["params"]
        assert group["lr"] == theirs["lr"]


@pytest.mark.parametrize("early", [False, True], ids=["after wrapping", "before wrapping"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_cluster_goes_on_with_what_one_process_saved(other_cluster: LocalCluster, kind: str, early: bool) -> None:
    oracle_parameters = make_parameters()
    oracle = make_optimizer(kind, oracle_parameters, local=True)
    take_steps(oracle, oracle_parameters, range(BEFORE), set_own_gradients)
    checkpoint = save(oracle_parameters, oracle)
    take_steps(oracle, oracle_parameters, range(BEFORE, BEFORE + AFTER), set_own_gradients)

    def train(session: Session) -> tuple[dict[str, Tensor], dict[str, Any]]:
        parameters = make_parameters(seed=7)
        state = load(checkpoint, parameters)
        local = make_optimizer(kind, parameters, local=False)
        if early:
            local.load_state_dict(state)
        optimizer = RemoteOptimizer(local, session=session)
        if not early:
            optimizer.load_state_dict(state)
        assert optimizer.param_groups is local.param_groups
        assert_same_state(optimizer.state_dict(), torch.load(io.BytesIO(checkpoint), weights_only=True)["optimizer"])
        take_steps(optimizer, parameters, range(BEFORE, BEFORE + AFTER), set_own_gradients)
        return values(parameters), optimizer.state_dict()

    [(actual, state)] = run_trainers(other_cluster.address, [train], **SMALL)
    assert_identical(actual, values(oracle_parameters))
    assert_same_state(state, oracle.state_dict())
