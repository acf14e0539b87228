"""Optimizer state between torch and pservers: its conversion, its frames, and when a trainer pushes it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ps_protocol.errors import BadModel
from ps_protocol.optimizers import RULES, StepState
from ps_protocol.plan import make_plan
from ps_protocol.vocabulary import ParameterSpec
from trainer_client.client.pserver_group import DeclaredRun
from trainer_client.engines.state_transfer import Loading
from trainer_client.engines.torch_state import ParameterState, read_state, write_state
from trainer_client.optimizer.wrapped_optimizer import describe_optimizer

OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9}, "Adam": {"amsgrad": True}, "Adagrad": {"initial_accumulator_value": 0.5},
    "RMSprop": {"momentum": 0.9, "centered": True},
}  # fmt: skip


def stepped(name: str, dtype: torch.dtype = torch.float32) -> tuple[torch.optim.Optimizer, dict[int, str]]:
    """Return an optimizer after three steps, and the names of its parameters. The last one has had no gradient."""
    shapes: dict[str, tuple[int, ...]] = {"a": (3, 4), "b": (), "c": (5,)}
    parameters = {key: nn.Parameter(torch.ones(shape, dtype=dtype)) for key, shape in shapes.items()}
    optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(parameters.values(), lr=0.1, **OPTIONS.get(name, {}))
    for step in range(3):
        for key in "ab":
            parameters[key].grad = torch.full_like(parameters[key], 0.5 + step)
        optimizer.step()
    return optimizer, {id(parameter): key for key, parameter in parameters.items()}


@pytest.mark.parametrize("name", RULES)
def test_optimizer_state_is_written_as_torch_reads_it(name: str) -> None:
    optimizer, names = stepped(name)
    spec = describe_optimizer(optimizer)
    slots = read_state(spec, optimizer.param_groups, names, optimizer.state_dict())
    assert slots.keys() == {"a", "b"}
    assert all(slot.dim() == 1 for one in slots.values() for slot in one.slots.values())
    written = write_state(spec, optimizer.param_groups, names, slots)
    assert {id(parameter) for parameter in written} == {id(parameter) for parameter in optimizer.state}
    for parameter, state in optimizer.state.items():
        assert written[parameter].keys() == state.keys()
        for key, value in state.items():
            assert (written[parameter][key].dtype, written[parameter][key].shape) == (value.dtype, value.shape)
            assert torch.equal(written[parameter][key], value)


def test_slots_of_half_precision_are_float32() -> None:
    optimizer, names = stepped("AdamW", torch.bfloat16)
    slots = read_state(describe_optimizer(optimizer), optimizer.param_groups, names, optimizer.state_dict())
    assert {slot.dtype for one in slots.values() for slot in one.slots.values()} == {torch.float32}


def test_a_sum_before_the_first_step_is_refused() -> None:
    optimizer, names = stepped("Adagrad")
    last = optimizer.param_groups[0]["params"][2]
    optimizer.state[last] = {"step": torch.tensor(0.0), "sum": torch.full((5,), 0.25)}
    with pytest.raises(BadModel, match=r"state of 'c' .* before the first step, the sum must"):
        read_state(describe_optimizer(optimizer), optimizer.param_groups, names, optimizer.state_dict())


PLAN = make_plan([ParameterSpec("a", (300,)), ParameterSpec("b", (40_000,)), ParameterSpec("c", (7,))], 2)
SLOTS = {
    name: ParameterState(StepState(steps=3), {slot: torch.rand(PLAN.parameter[name].num_elements) for slot in "xy"})
    for name in ("a", "b")
}


def test_loaded_state_is_pushed_with_the_first_step_until_that_is_pulled() -> None:
    client = SimpleNamespace(
        uploader=0, run=DeclaredRun(PLAN), settings=SimpleNamespace(chosen_bucket_bytes=1000),
        joined=SimpleNamespace(rank=0, consistency=SimpleNamespace(is_async=False)),
    )  # fmt: skip
    one = Loading(client, {})  # type: ignore[arg-type]
    one.load_states(SLOTS.keys(), SLOTS, 0)
    frames = one.frames_for(1)
    assert frames
    assert one.frames_for(2) is None
    one.note_rollback(0)
    assert one.frames_for(1) is frames
    one.note_pulled(1)
    assert not one.states
    assert one.frames_for(2) is None
