"""Pulls behind the next forward pass: each module waits for its own parameters when it is about to compute.

https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html#torch.nn.Module.register_forward_pre_hook
Peng et al. 2019, "A Generic Communication Scheduler for Distributed DNN Training Acceleration" (SOSP); Jayarajan et al.
2019, "Priority-based Parameter Propagation for Distributed DNN Training" (MLSys).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ps_protocol.errors import BadModel


class ForwardWaits:
    """Hooks of a model, and which parameters they have waited for since the last step.

    Where there will be no gradients, modules wait for everything: nothing would tell what they have computed with.
    Nothing tells either who computes with a parameter before its module is called, and calls that afterwards.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, Tensor],
        land: Callable[[Collection[str]], None],
        land_all: Callable[[], None],
    ) -> None:
        """`land` waits until parameters have their new values, by name; it is cheap if they have.

        `land_all` does so outside of a forward pass, before somebody saves them.
        """
        self._names = parameters.keys()
        self._land = land
        self._waited_for: set[str] = set()
        names = {id(parameter): name for name, parameter in parameters.items()}
        for module, used in _computing_modules(model):
            own = [names[id(parameter)] for parameter in used if id(parameter) in names]
            hook = partial(self._before, own)
            hook = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
            module.register_forward_pre_hook(hook, prepend=True)
        model.register_state_dict_pre_hook(lambda *_: land_all())  # type: ignore[no-untyped-call]

    def _before(self, names: Collection[str], module: nn.Module, arguments: Any) -> None:
        if getattr(module, "_is_replica", False):
            raise BadModel(
                "nn.DataParallel copies parameters to its replicas before they have their new values: use "
                "overlap_pulls=False, or a process for each device"
            )
        if not torch.is_grad_enabled():
            names = self._names
        self._land(names)
        self._waited_for.update(names)

    def check(self, name: str) -> None:
        """Raise BadModel if a parameter that has a gradient now is one that nobody has waited for."""
        if name not in self._waited_for:
            raise BadModel(
                f"somebody computes with {name!r}, but does not call the module that it belongs to, which would wait "
                "for it: this model needs overlap_pulls=False"
            )

    def begin(self) -> None:
        """The next step's parameters are to come."""
        self._waited_for.clear()


def _computing_modules(module: nn.Module) -> Iterator[tuple[nn.Module, list[Tensor]]]:
    """Modules and the parameters that they compute with: their own, those of lists, or all that is in them.

    Attention does not call its projection, and what is compiled would have the hooks of its modules compiled, too.
    """
    is_compiled = isinstance(module, torch._dynamo.OptimizedModule) or module._compiled_call_impl is not None
    if is_compiled or isinstance(module, nn.MultiheadAttention):
        yield module, list(module.parameters())
        return
    lists = [child for child in module.children() if isinstance(child, nn.ParameterList | nn.ParameterDict)]
    yield module, [*module.parameters(recurse=False), *(p for its in lists for p in its.parameters())]
    for child in module.children():
        if child not in lists:
            yield from _computing_modules(child)
