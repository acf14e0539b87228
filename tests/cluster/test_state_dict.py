"""Optimizer state in `state_dict`: a cluster's checkpoint continues in one process bit by bit, and the reverse."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradpost import RemoteOptimizer, Session
from ps_protocol.errors import BadInput, BadModel
from trainer_client.testing import LocalCluster

from ..soaking import parametrize_sampled
from .conftest import StartCluster
from .training import (
    OPTIMIZERS,
    Parameters,
    assert_identical,
    average,
    change_rates,
    make_optimizer,
    make_parameters,
    run_all,
    seeded,
    set_gradients,
    values,
)

pytestmark = [pytest.mark.cluster]
BEFORE, AFTER = 5, 4
SMALL = {"bucket_bytes": 20_000}  # several frames
CUT = {"min_block_size": 4}
every_kind = parametrize_sampled("kind", OPTIMIZERS, ["AdamW"])


@pytest.fixture(scope="module")
def cluster(shared_cluster: StartCluster) -> LocalCluster:
    return shared_cluster(on_trainer_loss="fail", **CUT)


@pytest.fixture(scope="module")
def other_cluster(shared_cluster: StartCluster) -> LocalCluster:
    return shared_cluster(pservers=3, trainers=1, on_trainer_loss="fail", **CUT)


def set_mean_gradients(parameters: Parameters, step: int) -> None:
    gradients = []
    for rank in range(2):
        set_gradients(parameters, step, rank)
        gradients.append([parameter.grad for parameter in parameters.values()])
    for parameter, mean in zip(parameters.values(), average(gradients), strict=True):
        parameter.grad = mean


def take_steps(
    optimizer: torch.optim.Optimizer, parameters: Parameters, steps: range, set_them: Callable[[Parameters, int], None]
) -> None:
    for step in steps:
        set_them(parameters, step)
        optimizer.step()
        change_rates(optimizer, step)


def save(parameters: Parameters, optimizer: torch.optim.Optimizer) -> bytes:
    file = io.BytesIO()
    torch.save({"model": values(parameters), "optimizer": optimizer.state_dict()}, file)
    return file.getvalue()


def load(checkpoint: bytes, parameters: Parameters) -> dict[str, Any]:
    """Load the parameters and return the optimizer's state."""
    read = torch.load(io.BytesIO(checkpoint), weights_only=True)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(read["model"][name])
    state: dict[str, Any] = read["optimizer"]
    return state


@every_kind
def test_one_process_goes_on_with_what_a_cluster_saved(cluster: LocalCluster, kind: str) -> None:
    def train(session: Session) -> tuple[bytes, dict[str, Tensor]]:
        parameters = make_parameters(seed=session.rank)
        optimizer = RemoteOptimizer(make_optimizer(kind, parameters, local=False), session=session)
        gradients = partial(set_gradients, contributor=session.rank)
        take_steps(optimizer, parameters, range(BEFORE), gradients)
        checkpoint = save(parameters, optimizer) if session.rank == 0 else b""  # no other takes part in that
        take_steps(optimizer, parameters, range(BEFORE, BEFORE + AFTER), gradients)
        return checkpoint, values(parameters)

    (checkpoint, expected), _ = run_all(cluster, train, **SMALL)
    parameters = make_parameters()
    optimizer = make_optimizer(kind, parameters, local=True)
    oracle = make_optimizer(kind, oracle_parameters := make_parameters(), local=True)
    take_steps(oracle, oracle_parameters, range(BEFORE), set_mean_gradients)
    state = load(checkpoint, parameters)
    assert_same_state(state, oracle.state_dict())
    kernel = {key: optimizer.defaults[key] for key in ("fused", "foreach") if key in optimizer.defaults}
    optimizer.load_state_dict(state)
    for group in optimizer.param_groups:
        group.update(kernel)  # torch takes over that of the checkpoint, which rounds in another way
    take_steps(optimizer, parameters, range(BEFORE, BEFORE + AFTER), set_mean_gradients)
    assert_identical(values(parameters), expected)


def assert_same_state(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare indices, slots, dtypes, shapes and bits."""
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


def saved_locally(kind: str) -> tuple[bytes, dict[str, Tensor], dict[str, Any]]:
    """Return a checkpoint of one process, and its parameters and its optimizer's state some steps later."""
    parameters = make_parameters()
    optimizer = make_optimizer(kind, parameters, local=True)
    take_steps(optimizer, parameters, range(BEFORE), set_gradients)
    checkpoint = save(parameters, optimizer)
    take_steps(optimizer, parameters, range(BEFORE, BEFORE + AFTER), set_gradients)
    return checkpoint, values(parameters), optimizer.state_dict()


@pytest.mark.parametrize("early", [False, True], ids=["after wrapping", "before wrapping"])
@every_kind
def test_a_cluster_goes_on_with_what_one_process_saved(other_cluster: LocalCluster, kind: str, early: bool) -> None:
    checkpoint, expected, expected_state = saved_locally(kind)

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
        take_steps(optimizer, parameters, range(BEFORE, BEFORE + AFTER), set_gradients)
        return values(parameters), optimizer.state_dict()

    [(actual, state)] = run_all(other_cluster, train, **SMALL)
    assert_identical(actual, expected)
    assert_same_state(state, expected_state)


def _set(state: dict[str, Any], slot: str, value: object) -> None:
    state["state"][0][slot] = value


BREAKS: dict[str, Callable[[dict[str, Any]], object]] = {
    "another shape": lambda it: _set(it, "exp_avg", it["state"][0]["exp_avg"].reshape(-1)),
    "an unknown slot": lambda it: _set(it, "exp_inf", it["state"][0]["exp_avg"]),
    "a slot is missing": lambda it: it["state"][0].pop("max_exp_avg_sq"),
    "no steps": lambda it: it["state"][0].pop("step"),
    "half a step": lambda it: _set(it, "step", torch.tensor(0.5)),
    "not even a number of steps": lambda it: _set(it, "step", torch.tensor(math.nan)),
    "text": lambda it: _set(it, "exp_avg", "0.5"),
    "one parameter more": lambda it: it["state"].update({9: it["state"][0]}),
    "one parameter less": lambda it: it["param_groups"][0]["params"].pop(0),
    "another flag": lambda it: it["param_groups"][0].update(amsgrad=False),
    "another optimizer": lambda it: it["param_groups"][0].pop("betas"),
    "a rate that is not a number": lambda it: it["param_groups"][0].update(lr=math.nan),
    "nothing": lambda it: it.clear(),
}


def test_what_does_not_fit_changes_nothing(other_cluster: LocalCluster) -> None:
    checkpoint, expected, _ = saved_locally("Adam-amsgrad")

    def train(session: Session) -> dict[str, Tensor]:
        parameters = make_parameters(seed=3)
        good = load(checkpoint, parameters)
        local = make_optimizer("Adam-amsgrad", parameters, local=False)
        optimizer = RemoteOptimizer(local, session=session)
        for change in BREAKS.values():
            state = torch.load(io.BytesIO(checkpoint), weights_only=True)["optimizer"]
            change(state)
            with pytest.raises(BadInput):
                optimizer.load_state_dict(state)
        optimizer.load_state_dict(good)
        take_steps(optimizer, parameters, range(BEFORE, BEFORE + AFTER), set_gradients)
        return values(parameters)

    [actual] = run_all(other_cluster, train, **SMALL)
    assert_identical(actual, expected)


@pytest.mark.parametrize("order", ["model state", "state model"])
def test_masters_of_16_bit_parameters_go_on_with_the_same_bits(other_cluster: LocalCluster, order: str) -> None:
    """Steps are smaller than half of what bfloat16 can tell apart."""

    def train(session: Session, steps: range, saved: dict[str, Any]) -> dict[str, Any]:
        weight = nn.Parameter(torch.zeros(3000, dtype=torch.bfloat16))
        optimizer = RemoteOptimizer(torch.optim.AdamW([("weight", weight)], lr=3e-4), session=session)
        for part in order.split():
            if part == "model":
                weight.data.copy_(saved["model"])
            elif "optimizer" in saved:
                optimizer.load_state_dict(saved["optimizer"])
        for step in steps:
            weight.grad = torch.full_like(weight, 1.0 + step)
            optimizer.step()
        return {"model": weight.detach(), "optimizer": optimizer.state_dict()}

    def run(steps: range, saved: dict[str, Any]) -> dict[str, Any]:
        [checkpoint] = run_all(other_cluster, lambda session: train(session, steps, saved), **SMALL)
        return checkpoint

    start = {"model": torch.linspace(1, 2, 3000).bfloat16()}
    whole, half = run(range(8), start), run(range(4), start)
    resumed = run(range(4, 8), half)
    assert_same_state(resumed["optimizer"], whole["optimizer"])
    assert torch.equal(resumed["model"], whole["model"])
    assert whole["optimizer"]["state"][0]["master"].dtype == torch.float32


# ---------------------------------------------------------------------- writes to parameters


STEPS = 6


def make_model(seed: int) -> nn.Module:
    return seeded(nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4)), seed, 0.4)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.named_parameters(), lr=0.1, momentum=0.9, fused=True)


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, rank: int = 0) -> None:
    inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * number + rank))
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()


def make_checkpoint() -> dict[str, Any]:
    model = make_model(seed=7)
    optimizer = momentum(model)
    for number in range(3):
        take_step(model, optimizer, 100 + number)
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


CHECKPOINT = make_checkpoint()


def resume(session: Session, *, is_early: bool, **arguments: Any) -> dict[str, Tensor]:
    model = make_model(seed=session.rank)
    if is_early:
        model.load_state_dict(CHECKPOINT["model"])
    optimizer = RemoteOptimizer(momentum(model), model=model, session=session, **arguments)
    if not is_early:
        model.load_state_dict(CHECKPOINT["model"])
    optimizer.load_state_dict(copy.deepcopy(CHECKPOINT["optimizer"]))  # which is used in place
    for number in range(STEPS):
        take_step(model, optimizer, number, session.rank)
    optimizer.synchronize()
    return values(model)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"overlap": True, "overlap_pulls": True},
        {"bucket_bytes": 100},  # in a ring
    ],
    ids=lambda it: " ".join(it) or "plain",
)
def test_what_is_loaded_after_the_wrap_is_where_the_run_begins(
    cluster: LocalCluster, ring: LocalCluster, arguments: dict[str, Any]
) -> None:
    cluster = ring if "bucket_bytes" in arguments else cluster
    late, early = (run_all(cluster, partial(resume, is_early=is_early, **arguments)) for is_early in (False, True))
    for mine, theirs in zip(late, early, strict=True):
        assert_identical(mine, theirs)


def test_the_lowest_rank_alone_may_load(cluster: LocalCluster, ring: LocalCluster) -> None:
    def train(session: Session) -> dict[str, Tensor]:
        model = make_model(seed=session.rank)
        optimizer = RemoteOptimizer(momentum(model), session=session)
        if session.rank == 0:
            model.load_state_dict(CHECKPOINT["model"])
        optimizer.step()  # without any gradient
        return values(model)

    for found in run_all(cluster, train) + run_all(ring, train):
        assert_identical(found, CHECKPOINT["model"])


def in_place(model: nn.Module) -> None:
    with torch.no_grad():
        model[0].weight.mul_(0.5)


def other_memory(model: nn.Module) -> None:
    model[2].weight.data = torch.ones(4, 9)


@pytest.mark.parametrize("write", [in_place, other_memory])
def test_later_writes_are_refused_until_they_are_on_purpose(
    other_cluster: LocalCluster, write: Callable[[nn.Module], None]
) -> None:
    def train(session: Session) -> dict[str, Tensor]:
        model = make_model(seed=1)
        optimizer = RemoteOptimizer(momentum(model), session=session)
        take_step(model, optimizer, 0)
        take_step(model, optimizer, 1)
        write(model)
        for _ in range(2):
            with pytest.raises(BadModel, match=r"with optimizer\.write_parameters"):
                take_step(model, optimizer, 2)
        with optimizer.write_parameters():
            pass  # it is on purpose after all
        take_step(model, optimizer, 2)
        return values(model)

    expected = make_model(seed=1)
    optimizer = momentum(expected)
    take_step(expected, optimizer, 0)
    take_step(expected, optimizer, 1)
    write(expected)
    take_step(expected, optimizer, 2)
    [actual] = run_all(other_cluster, train)
    assert_identical(actual, values(expected))


@pytest.mark.parametrize(("dtype", "wire"), [(torch.bfloat16, {}), (torch.float32, {"pull_type": "bfloat16"})])
def test_elements_that_are_not_written_keep_their_masters(
    other_cluster: LocalCluster, dtype: torch.dtype, wire: dict[str, str]
) -> None:
    """Steps are smaller than half of what bfloat16 can tell apart."""

    def train(session: Session) -> Tensor:
        weight = nn.Parameter(torch.linspace(1, 2, 8, dtype=dtype))
        optimizer = RemoteOptimizer(torch.optim.SGD([("weight", weight)], lr=1e-3), session=session, **wire)
        for number in range(8):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
            with optimizer.write_parameters(), torch.no_grad():
                weight[0] = 2 + number
        return weight.detach().float()

    [found] = run_all(other_cluster, train)
    expected = torch.linspace(1, 2, 8, dtype=dtype).float() - 8e-3
    assert found.tolist() == [9.0, *expected.bfloat16().float()[1:].tolist()]
