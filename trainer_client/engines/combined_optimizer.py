"""`CombinedOptimizer`: several optimizers of a script as one, which steps those that have gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

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
        self._owners = owners

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step each optimizer that has a gradient. There is no `closure`."""
        for optimizer in self.members.values():
            if any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
                step_without_hooks(optimizer)

    def owner(self, parameter: Any) -> str:
        """Return the name of a parameter's optimizer."""
        return self._owners[id(parameter)]


def step_without_hooks(wrapped: Optimizer) -> None:
    """Step a wrapped optimizer whose hooks, and torch's global ones, run with the step of the RemoteOptimizer."""
    step = type(wrapped).step
    getattr(step, "__wrapped__", step)(wrapped)  # torch wraps the method of each class once, to run the hooks
