"""`CombinedOptimizer`: several optimizers of a script as one, which steps those that have gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

import torch
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
