"""Communication beside the computation: gradients are sent during backward, and pulls end during the next forward pass.

Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training" (arXiv:2006.15704). Peng et
al. 2019, "A Generic Communication Scheduler for Distributed DNN Training Acceleration" (SOSP).
https://docs.pytorch.org/docs/stable/generated/torch.Tensor.register_post_accumulate_grad_hook.html
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ps_protocol.errors import BadInput, BadModel, GradpostError

from ..engines.model_tensors import TrainedModel
from ..engines.pserver import PserverEngine
from ..session.session import Session
from ..transport.tensors import Flattening
from .choice import DividedWork, StartedEngine
from .guard import ParameterWatch


class Overlap:
    """Hooks that add the gradients of each step to an engine. They run on the threads that run backward."""

    def __init__(
        self,
        session: Session,
        parameters: Mapping[str, Tensor],
        engine: PserverEngine,
        flattening: Flattening,
        waits: ForwardWaits | None,
    ) -> None:
        """Add a hook to each parameter. `waits`: pulls of the step before may still be on their way."""
        self._waits = waits
        self._session = session
        self._parameters = parameters
        self._engine = engine
        self._flattening = flattening
        self._watched: set[str] = set()
        self._added: dict[str, tuple[Tensor, int]] = {}  # gradients, and their versions when they were added
        self._is_accumulating = False
        self._lock = threading.Lock()  # one gradient is added at a time
        self._watch_parameters()

    def _watch_parameters(self) -> None:
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
            if (added := self._added.get(name)) is not None:
                if added[0] is gradient:
                    raise BadInput(
                        f"another backward pass reached {name!r}, whose gradient was sent before. Run all "
                        "passes but the last in `with optimizer.accumulate():`; for checkpointed activations set "
                        "use_reentrant=False, or overlap=False",
                        code="gradient_changed",
                    )
                self._engine.discard_gradients()  # of an interrupted pass, which the script has dropped
                self._added.clear()
            self._add(name, gradient)
            self._added[name] = gradient, gradient._version

    def _add(self, name: str, gradient: Tensor) -> None:
        if self._waits is not None:
            self._waits.wait()  # a push implies that the round before was pulled
        if self._waits is None or not self._waits.is_rolled_back:
            self._engine.add_gradient(name, self._flattening.flat(name, gradient))

    def finish_pull(self) -> bool:
        """Wait for the newest step's parameters; return True if the run went back, which makes the gradients void."""
        if self._waits is None or not self._waits.finish():
            return False
        self._begin()
        return True

    def finish_passes(self) -> None:
        """Begin the next step. Raises BadInput (`gradient_changed`) if a gradient has changed after it was added."""
        try:
            self._check_added()
        except GradpostError:
            self._engine.discard_gradients()
            raise
        finally:
            self._begin()

    def _check_added(self) -> None:
        for name, (gradient, version) in self._added.items():
            if self._parameters[name].grad is not gradient or gradient._version != version:
                raise BadInput(
                    f"the gradient of {name!r} was changed after it was sent. Set overlap=False to change "
                    "gradients before the step, such as by clipping or unscale_; max_grad_norm clips the "
                    "aggregated gradient with overlap, too",
                    code="gradient_changed",
                )

    def _begin(self) -> None:
        self._added.clear()
        self._watch_parameters()
        if self._waits is not None:
            self._waits.begin_step()


def attach_overlap(
    session: Session,
    work: DividedWork,
    started: StartedEngine,
    watch: ParameterWatch | None,
    finish: Callable[[], object],
) -> Overlap | None:
    """Return the hooks that the settings ask for, if any. `finish` waits for all parameters before they are saved.

    Without pservers, and among the processes of a host, gradients leave in `step`.
    """
    settings, model, waits = session.client.settings, work.model, None
    if started.pserver is None or session.host is not None or not settings.overlap:
        return None
    if settings.overlap_pulls:
        assert watch is not None  # else the combination is refused
        waits = ForwardWaits(session, model, started.pserver, watch, finish)
        session.finish = finish
    return Overlap(session, model.parameters, started.pserver, work.flattening, waits)


class ForwardWaits:
    """Hooks of a model's modules that wait for parameters before each forward pass.

    Without gradients, modules wait for all parameters, because nothing would show which ones they use. A script that
    uses a parameter before it calls the module is not noticed either.
    """

    def __init__(
        self,
        session: Session,
        model: TrainedModel,
        engine: PserverEngine,
        watch: ParameterWatch,
        finish: Callable[[], object],
    ) -> None:
        """Add the hooks. `finish` waits for all parameters, before the script saves them."""
        assert model.module is not None
        self.is_rolled_back = False  # the run has gone back since this step's forward pass began
        self._session = session
        self._engine = engine
        self._watch = watch
        self._names = model.pulled.keys()
        self._trained = model.parameters.keys()  # the other names are of buffers
        self._waited_for: set[str] = set()
        names = {id(parameter): name for name, parameter in model.pulled.items()}
        for module, used in _computing_modules(model.module):
            own = [names[id(parameter)] for parameter in used if id(parameter) in names]
            hook = torch.compiler.disable(partial(self._before, own))  # type: ignore[no-untyped-call]
            module.register_forward_pre_hook(ModuleHook(hook, finish), prepend=True)
        save = ModuleHook(lambda *_: finish(), finish)
        model.module.register_state_dict_pre_hook(save)  # type: ignore[no-untyped-call]

    def _before(self, names: Collection[str], module: nn.Module, arguments: Any) -> None:
        if getattr(module, "_is_replica", False):
            raise BadModel(
                "nn.DataParallel copies parameters to its replicas before they have their new values: use "
                "overlap_pulls=False, or a process for each device"
            )
        if not torch.is_grad_enabled():
            names = self._names
        self.wait(names)
        self._waited_for.update(names)

    def wait(self, names: Collection[str] | None = None) -> None:
        """Wait for the newest step's values of these parameters, or of all. Cheap if they are there."""
        pending = self._engine.pending & set(self._names if names is None else names)
        if not pending or not self._session.is_open:
            return
        trained = pending & self._trained
        self._watch.check(trained)
        self.is_rolled_back = self._engine.wait_for_parameters(pending) or self.is_rolled_back
        self._watch.note(self._trained if self.is_rolled_back else trained)

    def finish(self) -> bool:
        """Wait for the rest of the newest step; return True if the run has gone back since the last call."""
        self.wait()
        is_rolled_back, self.is_rolled_back = self.is_rolled_back, False
        return is_rolled_back

    def check(self, name: str) -> None:
        """Raise BadModel if a gradient was computed with a parameter whose new value no module waited for."""
        if name not in self._waited_for:
            raise BadModel(
                f"the script computes with {name!r}, but does not call the module that it belongs to, which would wait "
                "for it: set overlap_pulls=False for this model"
            )

    def begin_step(self) -> None:
        """Begin the next step, without waits."""
        self._waited_for.clear()


class ModuleHook:
    """A hook of a module. A copy or pickle of the module begins after the newest pull, and has an idle hook."""

    def __init__(
        self, call: Callable[..., object] = lambda *_: None, finish: Callable[[], object] = lambda: None
    ) -> None:
        self._call, self._finish = call, finish

    def __call__(self, *arguments: Any) -> None:
        """Call the function of the hook."""
        self._call(*arguments)

    def __reduce__(self) -> tuple[type[ModuleHook], tuple[()]]:
        """Return an idle hook, after the newest parameters have been written."""
        self._finish()
        return ModuleHook, ()


def _computing_modules(module: nn.Module) -> Iterator[tuple[nn.Module, list[Tensor]]]:
    """Yield modules and the parameters that they compute with: their own, those of lists, or all that is in them.

    Attention does not call its projection, and what is compiled would have the hooks of its modules compiled, too.
    """
    is_compiled = isinstance(module, torch._dynamo.OptimizedModule) or module._compiled_call_impl is not None
    if is_compiled or isinstance(module, nn.MultiheadAttention):
        yield module, list(module.parameters())
        return
    lists = [child for child in module.children() if isinstance(child, nn.ParameterList | nn.ParameterDict)]
    yield module, [*module.parameters(recurse=False), *(p for child in lists for p in child.parameters())]
    for child in module.children():
        if child not in lists:
            yield from _computing_modules(child)
