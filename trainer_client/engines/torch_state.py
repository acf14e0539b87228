"""An optimizer's slots as `torch.optim` has them in a `state_dict`, and as pservers have them; pure.

torch   {0: {"step": tensor(3.), "exp_avg": …}, …}           by index, in the parameter's shape
here    {"w": ParameterState(StepState(3), {"exp_avg": …})}   by name, flat float32 host tensors
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from ps_protocol.errors import BadModel
from ps_protocol.optimizers import (
    FRESH,
    MASTER,
    MAX_STEPS,
    RULES,
    SLOTS,
    OptimizerSpec,
    StepState,
    check_hyper_parameters,
    slots_under,
)

from .script_optimizers import members_of

Groups = Sequence[Mapping[str, Any]]

MOMENTUM = "momentum_buffer"


class ParameterState(NamedTuple):
    """The optimizer state of one parameter."""

    state: StepState
    slots: Mapping[str, Tensor]  # of shape (numel,), float32, in host memory


ParameterStates = Mapping[str, ParameterState]  # by parameter name


def needed_slots(
    optimizer: str, group: Mapping[str, Any], state: StepState, dtype: torch.dtype = torch.float32
) -> tuple[str, ...]:
    """Return the slots that torch keeps for a parameter of this group, and the master of a 16-bit parameter.

    A parameter that was never stepped has neither; SGD's state does not show whether a parameter was stepped.
    """
    if state == FRESH and optimizer != "SGD":
        return ()
    master = () if dtype == torch.float32 else (MASTER,)
    if optimizer == "SGD":
        return (MOMENTUM, *master) if state.has_momentum else master
    return (*slots_under(optimizer, dict(group)), *master)


def full_groups(optimizer: Optimizer) -> Groups:
    """Return the groups; torch's Adagrad fills its sums with its own argument, whatever a group says."""
    own = "initial_accumulator_value"
    return [
        {**group, own: member.defaults[own]} if own in member.defaults else group
        for member in members_of(optimizer).values()
        for group in member.param_groups
    ]


# ---------------------------------------------------------------------- to torch


def write_state(
    spec: OptimizerSpec, groups: Groups, names: Mapping[int, str], states: ParameterStates
) -> dict[Tensor, Any]:
    """Return the state of each parameter that has one, as torch's optimizer keeps it; `names` are by id.

    `groups` contain the value that Adagrad fills a new sum with, which is its own argument.
    Slots are float32 whatever the parameter is: `load_state_dict` rounds them. They share memory with `states`.
    """
    state: dict[Tensor, Any] = {}
    for index, group in enumerate(groups):
        for parameter in group["params"]:
            rule, (steps, held) = spec.rule(index), states.get(names[id(parameter)], ParameterState(FRESH, {}))
            slots = {slot: held[slot] for slot in needed_slots(rule, group, steps, parameter.dtype) if slot in held}
            if rule == "Adagrad" and steps == FRESH:  # torch fills its sums before the first step
                start = float(group["initial_accumulator_value"])
                slots = {"sum": torch.full((parameter.numel(),), start, dtype=torch.float32, device="cpu")}
            if slots or steps != FRESH:
                state[parameter] = _write(rule, ParameterState(steps, slots), parameter.shape)
    return state


def _write(optimizer: str, found: ParameterState, shape: torch.Size) -> dict[str, Any]:
    slots = {name: slot.reshape(shape) for name, slot in found.slots.items()}
    if optimizer == "SGD":
        return slots
    counts: dict[str, Any] = {"step": found.state.steps if optimizer == "SparseAdam" else _scalar(found.state.steps)}
    if optimizer == "NAdam":
        counts["mu_product"] = _scalar(found.state.mu_product)
    return counts | slots


def _scalar(value: float) -> Tensor:
    """Return a number as a tensor like those that torch keeps as step counts."""
    wide = torch.get_default_dtype() == torch.float64
    return torch.tensor(float(value), dtype=torch.float64 if wide else torch.float32, device="cpu")


# ---------------------------------------------------------------------- from torch


def read_state(
    spec: OptimizerSpec, groups: Groups, names: Mapping[int, str], state_dict: Mapping[str, Any]
) -> ParameterStates:
    """Return the state in a `state_dict` of an optimizer with these groups; it may share memory with it.

    Raises BadInput for a `state_dict` that does not fit.
    """
    match state_dict:
        case {"state": dict(state), "param_groups": [*saved]}:
            pass
        case _:
            raise BadModel("the state_dict of an optimizer must be a dict with state and param_groups")
    _check_groups(spec, groups, saved)
    rest = dict(state)
    states: dict[str, ParameterState] = {}
    for index, (group, saved_group) in enumerate(zip(groups, saved, strict=True)):
        for parameter, key in zip(group["params"], saved_group["params"], strict=True):
            entry = rest.pop(key, None)
            if entry:
                name = names[id(parameter)]
                found = _read(spec.rule(index), {**group, **saved_group, **_fixed(group)}, name, parameter, entry)
                if found is not None:
                    states[name] = found
    if rest:
        raise BadModel(
            "the loaded state_dict has state of parameters that the optimizer does not have",
            actual=f"{list(rest)!s:.80}",
        )
    return states


def _fixed(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that an optimizer does not load from another's groups."""
    return {key: group[key] for key in ("initial_accumulator_value",) if key in group}


def _check_groups(spec: OptimizerSpec, groups: Groups, saved: list[Any]) -> None:
    sizes, saved_sizes = ([len(group.get("params", ())) for group in listed] for listed in (groups, saved))
    if sizes != saved_sizes:
        raise BadModel(
            "the loaded state_dict must have the parameter groups of the optimizer",
            expected=f"groups of {sizes} parameters", actual=f"{saved_sizes!s:.80}",
        )  # fmt: skip
    for index, (group, flags) in enumerate(zip(saved, spec.group_flags, strict=True)):
        if missing := [name for name in RULES[spec.rule(index)].numbers if name not in group]:
            raise BadModel(
                f"the loaded state_dict is not of {spec.rule(index)}: param_groups[{index}] lacks {', '.join(missing)}"
            )
        for flag, value in flags.items():
            if bool(group.get(flag, value)) != value:
                raise BadModel(
                    f"{flag} in param_groups[{index}] of the loaded state_dict must be that of the run, where it "
                    "is fixed",
                    expected=value, actual=group[flag],
                )  # fmt: skip
    try:
        numbers = [
            {name: plain_number(group[name]) for name in RULES[spec.rule(index)].numbers}
            for index, group in enumerate(saved)
        ]
    except (TypeError, ValueError) as error:
        raise BadModel(f"param_groups of the loaded state_dict must have numbers: {error}") from None
    check_hyper_parameters(spec, numbers)


def plain_number(value: Any) -> float | list[float]:
    """Return a hyperparameter as plain floats; a tensor is read."""
    return [float(v) for v in value] if isinstance(value, tuple | list) else float(value)


def _read(
    optimizer: str, group: Mapping[str, Any], name: str, parameter: Tensor, entry: Mapping[str, Any]
) -> ParameterState | None:
    """Return the state of one parameter; None if there is none. Raises BadModel."""
    try:
        entry = dict(entry)
        master = entry.pop(MASTER, None)
        found = _read_optimizer_state(optimizer, group, parameter, entry) if entry else None
        if parameter.dtype == torch.float32 or not isinstance(master, Tensor) or master.dtype != torch.float32:
            return found
        state, slots = found or ParameterState(FRESH, {})
        return ParameterState(state, {**slots, MASTER: _read_slot(MASTER, parameter, master)})
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise BadModel(f"the loaded state of {name!r} does not fit {optimizer}: {error!s:.200}") from None


def split_masters(
    states: ParameterStates, parameters: Mapping[str, Tensor]
) -> tuple[ParameterStates, dict[str, Tensor]]:
    """Return states without masters, and the masters, (numel,) float32, that the parameters were rounded from.

    A master is left out if its parameter was loaded from another checkpoint, or stepped by `torch.optim`, which does
    not change masters.
    """
    without, masters = dict(states), {}
    for name, (state, slots) in states.items():
        if MASTER in slots:
            rest = dict(slots)
            master, parameter = rest.pop(MASTER), parameters[name].detach()
            without[name] = ParameterState(state, rest)
            if torch.equal(master.to(parameter), parameter.reshape(-1)):
                masters[name] = master
    return without, masters


def _read_optimizer_state(
    optimizer: str, group: Mapping[str, Any], parameter: Tensor, entry: Mapping[str, Any]
) -> ParameterState | None:
    counts = {} if optimizer == "SGD" else {"step"} if optimizer != "NAdam" else {"step", "mu_product"}
    given = {key: value for key, value in entry.items() if value is not None}
    slots = {key: _read_slot(key, parameter, given[key]) for key in given.keys() - counts}
    if unknown := slots.keys() - set(SLOTS[optimizer]):
        raise ValueError(f"it has {min(map(str, unknown))!r}")
    if optimizer == "SGD":
        return ParameterState(StepState(has_momentum=True), slots) if slots else None
    if missing := {*counts, *needed_slots(optimizer, group, StepState(1))} - given.keys():
        raise ValueError(f"it lacks {', '.join(sorted(missing))}")
    steps, product = float(given["step"]), float(given.get("mu_product", 1.0))
    if not (0 <= steps <= MAX_STEPS and steps == int(steps) and abs(product) < float("inf")):
        raise ValueError(f"after {steps} steps, with mu_product {product}")
    if optimizer == "Adagrad" and steps == 0:
        # It would be filled again with the optimizer's own.
        if not bool((given["sum"] == float(group["initial_accumulator_value"])).all()):  # rounded to its dtype
            raise ValueError("before the first step, the sum must be initial_accumulator_value")
        return None
    return ParameterState(StepState(int(steps), mu_product=product), slots)


def _read_slot(slot: str, parameter: Tensor, value: Tensor) -> Tensor:
    is_dense = isinstance(value, Tensor) and value.is_floating_point() and value.layout == torch.strided
    if not is_dense or value.shape != parameter.shape:
        raise ValueError(f"{slot} must be a dense tensor of floats of shape {list(parameter.shape)}")
    return value.detach().to("cpu", torch.float32).reshape(-1)
