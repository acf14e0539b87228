"""Reading a torch.optim optimizer: its class, flags and numbers, as the protocol carries them."""

from __future__ import annotations

from typing import Any

import torch

from ps_protocol.errors import BadInput, BadModel
from ps_protocol.optimizers import RULES, HyperParameters, OptimizerSpec, check_optimizer


def describe_optimizer(optimizer: torch.optim.Optimizer) -> OptimizerSpec:
    """The spec of an optimizer; raises BadInput (`unsupported_optimizer`) with the reason.

    A subclass of an allowed class is refused: its rule may be another one. `foreach`, `fused` and `capturable` choose
    an implementation, which is the pserver's business; they are ignored.
    """
    cls = type(optimizer)
    if cls is not getattr(torch.optim, cls.__name__, None):
        raise BadInput(
            f"{cls.__module__}.{cls.__qualname__} cannot run on a pserver: it is not a class of torch.optim",
            code="unsupported_optimizer", expected=", ".join(RULES), actual=cls.__qualname__,
        )  # fmt: skip
    rule = RULES.get(cls.__name__)
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise BadInput(
            "differentiable=True cannot work across a network",
            code="unsupported_optimizer", actual="differentiable=True",
        )  # fmt: skip
    flags = () if rule is None else rule.flags
    return check_optimizer(
        cls.__name__, [{flag: bool(group[flag]) for flag in flags} for group in optimizer.param_groups]
    )


def describe_local_optimizer(optimizer: torch.optim.Optimizer) -> OptimizerSpec:
    """The name of an optimizer that steps in the trainer itself: any but one that evaluates the model several times.

    Raises BadInput.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise BadInput(
            "LBFGS evaluates a closure several times a step, each on other gradients", code="unsupported_optimizer"
        )
    return OptimizerSpec(type(optimizer).__name__, tuple({} for _ in optimizer.param_groups))


def read_hyper_parameters(spec: OptimizerSpec, optimizer: torch.optim.Optimizer) -> list[HyperParameters]:
    """The current numbers of every group, as plain floats; tensors (lr) are read.

    Raises BadModel if a group's flag is not what it was when the run began.
    """
    for index, (group, flags) in enumerate(zip(optimizer.param_groups, spec.group_flags, strict=True)):
        for flag, value in flags.items():
            if bool(group[flag]) != value:
                raise BadModel(
                    f"{flag} of parameter group {index} was changed; numbers may change in a run, flags may not",
                    expected=value,
                    actual=bool(group[flag]),
                )
    names = RULES[spec.name].numbers
    # torch's Adagrad fills its slot when it is made, from its own argument, whatever a group says.
    fixed = {name: optimizer.defaults[name] for name in names if name == "initial_accumulator_value"}
    return [{name: _plain({**group, **fixed}[name]) for name in names} for group in optimizer.param_groups]


def _plain(value: Any) -> float | list[float]:
    return [float(v) for v in value] if isinstance(value, tuple | list) else float(value)
