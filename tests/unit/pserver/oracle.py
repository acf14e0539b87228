"""The oracle: `torch.optim` in one process on whole parameters; and a few shards to compare with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ps_protocol.optimizers import RULES, OptimizerSpec, StepState, check_hyper_parameters, check_optimizer
from ps_protocol.plan import SlicePlan
from ps_protocol.vocabulary import ParameterSpec
from services.pserver.shard.shard import Shard

Options = dict[str, Any]

FUSED = ("SGD", "Adam", "AdamW", "Adagrad")
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_ADAM = {"lr": 0.01, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
DEFAULTS: dict[str, Options] = {
    "SGD": {"lr": 0.1, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0},
    "Adam": _ADAM,
    "AdamW": {**_ADAM, "weight_decay": 0.01, "decoupled_weight_decay": True},
    "Adagrad": {"lr": 0.01, "lr_decay": 0.0, "weight_decay": 0.0, "initial_accumulator_value": 0.0, "eps": 1e-10},
    "RMSprop": {"lr": 0.01, "alpha": 0.99, "eps": 1e-8, "weight_decay": 0.0, "momentum": 0.0},
    "Adadelta": {"lr": 1.0, "rho": 0.9, "eps": 1e-6, "weight_decay": 0.0},
    "Adamax": _ADAM,
    "NAdam": {**_ADAM, "momentum_decay": 4e-3},
    "RAdam": _ADAM,
    "SparseAdam": _ADAM,
}


def make_options(name: str, **options: Any) -> Options:
    """Numbers and flags of one parameter group."""
    return {**dict.fromkeys(RULES[name].flags, False), **DEFAULTS[name], **options}


def make_spec(name: str, groups: Sequence[Options]) -> OptimizerSpec:
    return check_optimizer(name, [{flag: group[flag] for flag in RULES[name].flags} for group in groups])


def make_numbers(spec: OptimizerSpec, groups: Sequence[Options]) -> list[dict[str, Any]]:
    rules = [RULES[spec.rule(index)] for index in range(len(groups))]
    return check_hyper_parameters(
        spec, [{key: group[key] for key in rule.numbers} for rule, group in zip(rules, groups, strict=True)]
    )


class TorchOracle:
    """`torch.optim` on float32 masters, with the implementation that the pserver uses.

    Each parameter has an optimizer of its own, with the options of its real group: fused SGD with momentum refuses a
    group in which one parameter has had its first gradient and another has not, and fused kernels sparse gradients.
    """

    def __init__(
        self,
        spec: OptimizerSpec,
        parameters: Sequence[ParameterSpec],
        groups: Sequence[Options],
        initial: Mapping[str, Tensor],
    ) -> None:
        self.parameters = {p.name: initial[p.name].clone().requires_grad_() for p in parameters}
        self._group_of = {p.name: p.group for p in parameters}
        self._optimizers = {
            p.name: _make_optimizer(spec.rule(p.group), self.parameters[p.name], groups[p.group], is_sparse=p.is_sparse)
            for p in parameters
        }

    def step(self, gradients: Mapping[str, Tensor], groups: Sequence[Options]) -> None:
        for name, optimizer in self._optimizers.items():
            optimizer.param_groups[0].update(groups[self._group_of[name]])
            self.parameters[name].grad = gradients.get(name)
            optimizer.step()

    def state(self, name: str) -> dict[str, Any]:
        return {k: v for k, v in self._optimizers[name].state.get(self.parameters[name], {}).items() if v is not None}


def _make_optimizer(rule: str, parameter: Tensor, options: Options, *, is_sparse: bool) -> torch.optim.Optimizer:
    implementation: Options = {"fused": True} if rule in FUSED and not is_sparse else {"foreach": False}
    if rule == "Adagrad":  # torch takes this one from its constructor, not from the groups
        implementation["initial_accumulator_value"] = options["initial_accumulator_value"]
    return getattr(torch.optim, rule)(
        [{"params": [parameter], **options}], **({} if rule == "SparseAdam" else implementation)
    )


class Shards:
    """All shards of a plan in one process."""

    def __init__(self, plan: SlicePlan, initial: Mapping[str, Tensor]) -> None:
        self.plan = plan
        self.shards = [Shard(plan, index) for index in range(plan.num_pservers)]
        for block in plan.blocks:
            source = initial[block.parameter].flatten()[block.begin : block.end]
            values = source.to(DTYPES[plan.parameter[block.parameter].dtype])
            self.shards[block.pserver].set_initial({block.name: values}, {})
        assert all(shard.is_initialised for shard in self.shards)

    def step(self, contributions: Sequence[Mapping[str, Tensor]], groups: Sequence[Options]) -> None:
        """`contributions` map parameters to gradients."""
        assert self.plan.optimizer is not None
        numbers = make_numbers(self.plan.optimizer, groups)
        for index, shard in enumerate(self.shards):
            pushed = [
                {
                    b.name: gradients[b.parameter].flatten()[b.begin : b.end]
                    for b in self.plan.shards[index]
                    if b.parameter in gradients
                }
                for gradients in contributions
            ]
            gradient, present = shard.aggregator.aggregate(pushed)
            shard.apply(gradient, present, numbers)

    def values(self, parameter: str, slot: str | None = None) -> Tensor:
        """The values, or a slot, of a whole parameter."""
        parts = []
        for block in self.plan.blocks:
            if block.parameter == parameter:
                shard = self.shards[block.pserver]
                place = shard.layout.place[block.name]
                flat = shard.values if slot is None else shard.optimizer.state.slots[slot]
                parts.append(flat[place.begin : place.end])
        return torch.cat(parts).view(self.plan.parameter[parameter].shape)

    def step_state(self, parameter: str) -> StepState:
        [state] = {
            self.shards[block.pserver].optimizer.state.steps[block.name]
            for block in self.plan.blocks
            if block.parameter == parameter
        }  # the cuts do not matter
        return state


def assert_same_bits(actual: Tensor, expected: Tensor, what: str) -> None:
    assert actual.shape == expected.shape, what
    differ = (actual.detach().view(torch.int32) != expected.detach().view(torch.int32)).flatten().nonzero().flatten()
    assert not len(differ), f"{what}: {len(differ)} of {expected.numel()} elements differ, at {differ[:8].tolist()}"


def assert_equal(shards: Shards, oracle: TorchOracle, when: str) -> None:
    """Parameters, slots and step counts, bit for bit, and no other slots."""
    expected = {key for name in oracle.parameters for key in oracle.state(name)} - {"step", "mu_product"}
    assert {key for shard in shards.shards for key in shard.optimizer.state.slots} <= expected, when
    for name, parameter in oracle.parameters.items():
        assert_same_bits(shards.values(name), parameter, f"{name} {when}")
        state = shards.step_state(name)
        for key, value in oracle.state(name).items():
            if key in ("step", "mu_product"):
                assert getattr(state, "steps" if key == "step" else key) == float(value), f"{name} {when}"
            elif state.steps or state.has_momentum:  # Adagrad's are there before the first step
                assert_same_bits(shards.values(name, key), value, f"{key} of {name} {when}")


def average(contributions: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the promised mean, computed in numpy: summed in float32 in this order, multiplied by 1/n once."""
    result: dict[str, np.ndarray] = {}
    for gradients in contributions:
        for name, gradient in gradients.items():
            part = gradient.to(torch.float32).numpy()
            result[name] = result[name] + part if name in result else part.copy()
    if len(contributions) > 1:
        result = {name: total * np.float32(1 / len(contributions)) for name, total in result.items()}
    return {name: torch.from_numpy(np.asarray(total, dtype=np.float32)) for name, total in result.items()}


@contextmanager
def num_threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
