"""Communication beside the computation: gradients leave during backward, and pulls end during the next forward pass.

Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training" (arXiv:2006.15704). Peng et
al. 2019, "A Generic Communication Scheduler for Distributed DNN Training Acceleration" (SOSP).
https://docs.pytorch.org/docs/stable/generated/torch.Tensor.register_post_accumulate_grad_hook.html
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
    """Hooks that send the gradients of each step. They run on the threads that run backward."""

    def __init__(
        self,
        session: Session,
        parameters: Mapping[str, Tensor],
        send: Callable[[str, Tensor], None],
        accumulate_steps: int,
        waits: ForwardWaits | None,
    ) -> None:
        """Call `send` with the name and the gradient of each complete parameter, from one thread at a time."""
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
        """Add a hook to each parameter that has gradients, and later to those that were frozen."""
        for name, parameter in self._parameters.items():
            if parameter.requires_grad and name not in self._watched:
                hook = partial(self._accumulated, name)
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                self._watched.add(name)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Keep the gradients of the backward passes in the block; passes after it add to them."""
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

    def discard_passes(self) -> None:
        """Forget the passes until now. If gradients have left, `check` raises."""
        if not self._left:
            self._num_passes.clear()

    @property
    def left(self) -> Collection[str]:
        """The names of the parameters whose gradients of this step have left."""
        return self._left.keys()

    def check(self) -> None:
        """Raise BadInput (`gradient_changed`) if a gradient has changed after it left."""
        for name, (gradient, version) in self._left.items():
            if self._parameters[name].grad is not gradient or gradient._version != version:
                raise BadInput(
                    f"the gradient of {name!r} was changed after it had left. What is to be done to gradients before "
                    "the step, such as clipping or a GradScaler's unscale_, needs overlap=False; "
                    "max_grad_norm clips what is aggregated, with overlap, too",
                    code="gradient_changed",
                )

    def begin(self) -> None:
        """Begin the next step, without gradients."""
        self._num_passes.clear()
        self._left.clear()
        self.watch()


class ForwardWaits:
    """Hooks of a model's modules that wait for parameters before each forward pass.

    Without gradients, modules wait for all parameters, because nothing would show which ones they use. A script that
    uses a parameter before it calls the module is not noticed either.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, Tensor],
        wait: Callable[[Collection[str]], None],
        wait_for_all: Callable[[], None],
    ) -> None:
        """Add the hooks. `wait` waits for the new values of parameters by name, and is cheap if they are there.

        `wait_for_all` waits for all parameters, before the script saves them.
        """
        self._names = parameters.keys()
        self._wait = wait
        self._waited_for: set[str] = set()
        names = {id(parameter): name for name, parameter in parameters.items()}
        for module, used in _computing_modules(model):
            own = [names[id(parameter)] for parameter in used if id(parameter) in names]
            hook = partial(self._before, own)
            hook = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
            module.register_forward_pre_hook(hook, prepend=True)
        model.register_state_dict_pre_hook(lambda *_: wait_for_all())  # type: ignore[no-untyped-call]

    def _before(self, names: Collection[str], module: nn.Module, arguments: Any) -> None:
        if getattr(module, "_is_replica", False):
            raise BadModel(
                "nn.DataParallel copies parameters to its replicas before they have their new values: use "
                "overlap_pulls=False, or a process for each device"
            )
        if not torch.is_grad_enabled():
            names = self._names
        self._wait(names)
        self._waited_for.update(names)

    def check(self, name: str) -> None:
        """Raise BadModel if a parameter that has a gradient now is one whose new value was not waited for."""
        if name not in self._waited_for:
            raise BadModel(
                f"the script computes with {name!r}, but does not call the module that it belongs to, which would wait "
                "for it: this model needs overlap_pulls=False"
            )

    def begin(self) -> None:
        """Begin the next step, without waits."""
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
