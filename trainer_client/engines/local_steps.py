"""Local steps: the trainer's own optimizer steps H times, and the difference is the gradient of an outer optimizer.

With an outer SGD of rate 1 that is local SGD (Stich, ICLR 2019): parameters are averaged every H steps. With Nesterov
momentum it is DiLoCo (Douillard et al., 2023). The pushed gradient is the earlier parameters minus the current ones.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from ps_protocol.errors import BadModel

from .combined_optimizer import is_of_torch, step_without_hooks


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
