"""`CombinedOptimizer`: several optimizers of a script as one, which steps those that have gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
        groups = [group for optimizer in members.values() for group in optimizer.param_groups]
        super().__init__([{"params": group["params"]} for group in groups], {})
        self.param_groups = groups
        self._known_groups = list(groups)
        self._owners = owners

    def follow_groups(self) -> None:
        """Share the groups that the script has replaced, here or in the list of a member."""
        places = [(its.param_groups, index) for its in self.members.values() for index in range(len(its.param_groups))]
        for number, (group, known, (groups, index)) in enumerate(
            zip(self.param_groups, self._known_groups, places, strict=False)  # another number is refused elsewhere
        ):
            if group is known:
                self.param_groups[number] = groups[index]
            else:
                groups[index] = group
        self._known_groups = list(self.param_groups)

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
