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

from .combined_optimizer import members_of

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


def own_state(spec: OptimizerSpec, optimizer: Optimizer, names: Mapping[int, str]) -> ParameterStates:
    """Return the state that an optimizer has from its steps or a checkpoint; `names` are by id.

    Raises BadModel for slots that no pserver could have.
    """
    return read_state(spec, full_groups(optimizer), names, optimizer.state_dict()) if optimizer.state else {}


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


def _write(optimizer: str, found: ParameterState, shape: torch.Size) -> dict[str, Tensor]:
    slots = {name: slot.reshape(shape) for name, slot in found.slots.items()}
    if optimizer == "SGD":
        return slots
    counts = {"step": _scalar(found.state.steps)}
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
    check_hyper_parameters(
        spec,
        [{name: _plain(name, i, group[name]) for name in RULES[spec.rule(i)].numbers} for i, group in enumerate(saved)],
    )


def _plain(name: str, index: int, value: Any) -> float | list[float]:
    try:
        return [float(v) for v in value] if isinstance(value, tuple | list) else float(value)
    except (TypeError, ValueError):
        raise BadModel(
            f"{name} in param_groups[{index}] of the loaded state_dict must be a number", actual=f"{value!r:.80}"
        ) from None


def _read(
    optimizer: str, group: Mapping[str, Any], name: str, parameter: Tensor, entry: Mapping[str, Any]
) -> ParameterState | None:
    """Return the state of one parameter; None if there is none."""
    if not isinstance(entry, Mapping):
        raise BadModel(f"the loaded state of {name!r} must be a dict", actual=type(entry).__name__)
    entry = dict(entry)
    master = entry.pop(MASTER, None)
    found = _read_optimizer_slots(optimizer, group, name, parameter, entry) if entry else None
    if parameter.dtype == torch.float32 or not isinstance(master, Tensor) or master.dtype != torch.float32:
        return found
    state, slots = found or ParameterState(FRESH, {})
    return ParameterState(state, {**slots, MASTER: _read_slot(name, MASTER, parameter, master)})


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


def _read_optimizer_slots(
    optimizer: str, group: Mapping[str, Any], name: str, parameter: Tensor, entry: Mapping[str, Any]
) -> ParameterState | None:
    counts = {} if optimizer == "SGD" else {"step"} if optimizer != "NAdam" else {"step", "mu_product"}
    given = {key: value for key, value in entry.items() if key not in counts and value is not None}
    if unknown := given.keys() - set(SLOTS[optimizer]):
        raise BadModel(f"the state of {name!r} has {min(map(str, unknown))!r}, which {optimizer} does not keep")
    slots = {key: _read_slot(name, key, parameter, value) for key, value in given.items()}
    if optimizer == "SGD":
        return ParameterState(StepState(has_momentum=True), slots) if slots else None
    state = StepState(_read_steps(name, entry), mu_product=_read_scalar(name, "mu_product", entry, default=1.0))
    if missing := [
        key for key in (*counts, *needed_slots(optimizer, group, state._replace(steps=1))) if entry.get(key) is None
    ]:
        raise BadModel(f"the state of {name!r} lacks {', '.join(sorted(missing))}")
    if optimizer == "Adagrad" and state.steps == 0:
        # It would be filled again with the optimizer's own.
        if not bool((slots["sum"] == float(group["initial_accumulator_value"])).all()):
            raise BadModel(f"before the first step, the sum of {name!r} must be initial_accumulator_value")
        return None
    return ParameterState(state, slots)


def _read_slot(name: str, slot: str, parameter: Tensor, value: Any) -> Tensor:
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.layout != torch.strided:
        raise BadModel(
            f"{slot} of {name!r} must be a dense tensor of floats", actual=f"{getattr(value, 'dtype', value)!s:.80}"
        )
    if value.shape != parameter.shape:
        raise BadModel(
            f"{slot} of {name!r} must have the parameter's shape",
            expected=list(parameter.shape),
            actual=list(value.shape),
        )
    return value.detach().to("cpu", torch.float32).reshape(-1)


def _read_steps(name: str, entry: Mapping[str, Any]) -> int:
    steps = _read_scalar(name, "step", entry, default=0.0)
    if not (0 <= steps <= MAX_STEPS and steps == int(steps)):
        raise BadModel(f"step of {name!r} must be a number of steps", actual=steps)
    return int(steps)


def _read_scalar(name: str, key: str, entry: Mapping[str, Any], default: float) -> float:
    value = entry.get(key, default)
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        raise BadModel(f"{key} of {name!r} must be a number", actual=f"{value!r:.80}") from None
    if not abs(number) < float("inf"):
        raise BadModel(f"{key} of {name!r} must be finite", actual=number)
    return number
