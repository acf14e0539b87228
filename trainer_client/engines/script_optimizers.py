"""The script's own optimizers: several as one, and their steps in the trainer, of which local steps push the change.

With local steps the trainer's own optimizer steps H times, and the difference is the gradient of an outer optimizer.
With an outer SGD of rate 1 that is local SGD (Stich, ICLR 2019): parameters are averaged every H steps. With Nesterov
momentum it is DiLoCo (Douillard et al., 2023). The pushed gradient is the earlier parameters minus the current ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ps_protocol.errors import BadModel


class CombinedOptimizer(Optimizer):
    """The groups of several optimizers, in their order. The groups are shared, so that schedulers work on them."""

    def __init__(self, members: Mapping[str, Optimizer]) -> None:
        """`members` are the optimizers by name. Raises BadModel if two have the same parameter."""
        owners: dict[int, str] = {}
        for name, optimizer in members.items():
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                if (other := owners.setdefault(id(parameter), name)) != name:
                    raise BadModel(f"optimizers {other!r} and {name!r} have the same parameter; each needs its own")
        self.members = dict(members)
        self._owners = owners
        super().__init__([{"params": group["params"]} for group in self.param_groups], {})

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all members, as they are now."""
        return [group for optimizer in self.members.values() for group in optimizer.param_groups]

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        """Replace the groups of the members by as many; torch's constructor sets none."""
        rest = iter(groups)
        for optimizer in self.members.values() if groups else ():
            optimizer.param_groups = list(islice(rest, len(optimizer.param_groups)))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Do nothing: the members have the groups."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.param_groups = state["param_groups"]

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step each optimizer that has a gradient. There is no `closure`."""
        for optimizer in self.members.values():
            if any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
                step_without_hooks(optimizer)

    def owner(self, parameter: Any) -> str:
        """Return the name of a parameter's optimizer."""
        return self._owners[id(parameter)]


def members_of(optimizer: Optimizer) -> dict[str, Optimizer]:
    """Return several optimizers by name; an optimizer alone has an empty name."""
    return optimizer.members if isinstance(optimizer, CombinedOptimizer) else {"": optimizer}


def is_of_torch(optimizer: Optimizer) -> bool:
    """Return True if the class of an optimizer, or of all its members, is one of torch.optim itself."""
    kinds = map(type, members_of(optimizer).values())
    return all(kind is getattr(torch.optim, kind.__name__, None) for kind in kinds)


def step_without_hooks(wrapped: Optimizer) -> None:
    """Step a wrapped optimizer whose hooks, and torch's global ones, run with the step of the RemoteOptimizer."""
    step = type(wrapped).step
    getattr(step, "__wrapped__", step)(wrapped)  # torch wraps the method of each class once, to run the hooks


def step_with_gradients(wrapped: Optimizer, parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> None:
    """Step with these gradients, of the parameters' shapes, in place of the script's own, which are restored.

    A parameter without a gradient is skipped. An optimizer that is not of torch may keep `parameter.grad` as state,
    and gets copies: the memory of these gradients is used again.
    """
    if not is_of_torch(wrapped):
        gradients = {name: gradient.clone() for name, gradient in gradients.items()}
    own = {name: parameter.grad for name, parameter in parameters.items()}
    try:
        for name, parameter in parameters.items():
            parameter.grad = gradients.get(name)
        step_without_hooks(wrapped)
    finally:
        for name, parameter in parameters.items():
            parameter.grad = own[name]


# ---------------------------------------------------------------- local steps


class LocalSteps:
    """The steps between two pushes. Keeps two copies of the parameters; the inner optimizer's slots are its own."""

    def __init__(self, inner: Optimizer, parameters: Mapping[str, Tensor], num_steps: int) -> None:
        self._inner = inner
        self._parameters = parameters
        self._num_steps = num_steps
        self.num_pending = 0  # steps that no push carries yet
        self._anchors: dict[str, Tensor] = {}
        self._outer: dict[str, Tensor] = {}  # memory of what is pushed

    def begin_count(self) -> None:
        """Begin to count steps: the parameters have the values of the pservers now."""
        self.num_pending = 0
        for name, parameter in self._parameters.items():
            if name in self._anchors:
                self._anchors[name].copy_(parameter.detach())
            else:
                self._anchors[name] = parameter.detach().clone()

    @property
    def starting_values(self) -> dict[str, Tensor]:
        """The parameters before the local steps: those of the pservers, or at first those of the script."""
        return self._anchors or dict(self._parameters)

    def step(self) -> bool:
        """Step once in this process; return True if it is time to push."""
        step_without_hooks(self._inner)
        self.num_pending += 1
        return self.num_pending >= self._num_steps

    def outer_gradients(self) -> dict[str, Tensor]:
        """Return the earlier parameters minus the current ones, by name, (numel,); valid until the next call."""
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                if name not in self._outer:
                    self._outer[name] = torch.empty_like(self._anchors[name], memory_format=torch.contiguous_format)
                torch.sub(self._anchors[name], parameter, out=self._outer[name])
        return {name: outer.view(-1) for name, outer in self._outer.items()}


def check_outer(inner: Optimizer, outer: Optimizer) -> None:
    """Raise BadModel unless both optimizers have the same parameters."""
    ours, theirs = ({id(p) for group in o.param_groups for p in group["params"]} for o in (inner, outer))
    if ours != theirs:
        raise BadModel(
            "the outer optimizer must have the parameters of the inner one",
            expected=f"{len(ours)} parameters",
            actual=f"{len(theirs)}, of which {len(ours & theirs)} are the same",
        )
