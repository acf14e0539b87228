"""Gradients that leave while backward still runs, each as soon as autograd has put it into `grad`; last layers first.

https://docs.pytorch.org/docs/stable/generated/torch.Tensor.register_post_accumulate_grad_hook.html
Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training" (arXiv:2006.15704).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ps_protocol.errors import BadInput, BadModel

from .session import Session


class Overlap:
    """Watches the gradients of one step after the other. Hooks run on the thread, or threads, that run backward."""

    def __init__(
        self,
        session: Session,
        parameters: Mapping[str, Tensor],
        send: Callable[[str, Tensor], None],
        accumulate_steps: int,
        waits: ForwardWaits | None,
    ) -> None:
        """`send` gets the name of a parameter and its gradient once it is complete; by one thread at a time."""
        self._waits = waits
        self._session = session
        self._parameters = parameters
        self._send = send
        self._accumulate_steps = accumulate_steps
        self._watched: set[str] = set()
        self._num_passes: Counter[str] = Counter()  # of this step that have come to a parameter
        self._left: dict[str, tuple[Tensor, int]] = {}  # gradients, and their versions when they left
        self._is_accumulating = False
        self._lock = threading.Lock()
        self.watch()

    def watch(self) -> None:
        """Watch every parameter that has gradients. One that was frozen gets its hook once it is not any more."""
        for name, parameter in self._parameters.items():
            if parameter.requires_grad and name not in self._watched:
                hook = partial(self._accumulated, name)
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                self._watched.add(name)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Gradients of the backward passes in the block stay here, and are added to by those after it."""
        before, self._is_accumulating = self._is_accumulating, True
        try:
            yield
        finally:
            self._is_accumulating = before

    def _accumulated(self, name: str, parameter: Tensor) -> None:
        if not self._session.is_open:
            return
        if self._waits is not None:
            self._waits.check(name)
        if self._is_accumulating:
            return
        gradient = parameter.grad
        assert gradient is not None
        with self._lock:
            if name in self._left:
                raise BadInput(
                    f"another backward pass came to {name!r}, whose gradient left after the first one. With several "
                    "passes in a step, give their number as accumulate_steps, or run all but the last in "
                    "`with optimizer.accumulate():`",
                    code="gradient_changed",
                )
            self._num_passes[name] += 1
            if self._num_passes[name] == self._accumulate_steps:
                self._send(name, gradient)
                self._left[name] = gradient, gradient._version

    def begin_again(self) -> None:
        """The gradients of the passes until now are no more; if some have left, `check` says so."""
        if not self._left:
            self._num_passes.clear()

    @property
    def left(self) -> Collection[str]:
        """Names of those parameters whose gradients of this step have left."""
        return self._left.keys()

    def check(self) -> None:
        """Raise BadInput (`gradient_changed`) if a gradient that has left is not what it was."""
        for name, (gradient, version) in self._left.items():
            if self._parameters[name].grad is not gradient or gradient._version != version:
                raise BadInput(
                    f"the gradient of {name!r} was changed after it had left. What is to be done to gradients before "
                    "the step, such as clipping or a GradScaler's unscale_, needs overlap=False; "
                    "max_grad_norm clips what is aggregated, with overlap, too",
                    code="gradient_changed",
                )

    def begin(self) -> None:
        """The next step's gradients are to come."""
        self._num_passes.clear()
        self._left.clear()
        self.watch()


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
