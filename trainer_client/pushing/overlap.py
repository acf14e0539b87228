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

from torch import Tensor

from ps_protocol.errors import BadInput

from ..pulling.forward_waits import ForwardWaits
from ..session import Session


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
