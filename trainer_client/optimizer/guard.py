"""The guard of values, shapes and identities that a script must not change beside the optimizer's steps.

Version counters show each write that autograd can see. Writes through `.data` do not count there, so 16 elements of
each parameter are compared as well. A write through `.data` that changes none of them stays unnoticed.
https://docs.pytorch.org/docs/stable/notes/autograd.html#in-place-correctness-checks
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.optim import Optimizer

from ps_protocol.errors import BadModel

from ..engines.engine import StepEngine
from ..engines.model_tensors import TrainedModel
from ..session.session import Session
from ..transport.tensors import check_form, writable_bytes

SAMPLED = 16  # elements of a parameter
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # compared as such: NaN equals itself


class ParameterWatch:
    """The state in which the optimizer left parameters. Nothing here blocks, or passes over all values."""

    def __init__(self, parameters: Mapping[str, Tensor], *, has_samples: bool = True) -> None:
        """`has_samples`: no thread of ours writes to the parameters between two calls of `note`."""
        self._parameters = parameters
        self._has_samples = has_samples
        self._versions: dict[str, int] = {}
        self._memory: list[int] = []
        self._views: dict[tuple[torch.device, torch.dtype], dict[str, Tensor]] = {}  # by what can be compared at once
        self._kept: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        self.note()

    def note(self, names: Iterable[str] | None = None) -> None:
        """Remember the parameters, or some of them, as they are now."""
        if names is not None:
            self._versions.update({name: self._parameters[name]._version for name in names})
            return
        self._versions = {name: parameter._version for name, parameter in self._parameters.items()}
        if not self._has_samples:
            return
        if self._memory != (memory := self._find_memory()):
            self._memory, self._views = memory, {}
            for name, parameter in self._parameters.items():
                if parameter.is_contiguous() and parameter.numel():  # else a sample is a copy of all elements
                    sample = _sample(parameter)
                    self._views.setdefault((sample.device, sample.dtype), {})[name] = sample
        self._kept = {kind: torch.cat([*views.values()]) for kind, views in self._views.items()}

    def _find_memory(self) -> list[int]:
        return list(map(Tensor.data_ptr, self._parameters.values()))

    def check(self, names: Iterable[str] | None = None) -> None:
        """Raise BadModel if a parameter, or one of these, has been written to since `note`."""
        if changed := self.find_changed(names):
            raise BadModel(
                f"the script has changed {len(changed)} parameters since the last step, such as {min(changed)!r}, and "
                "the next pull would overwrite that. Write parameters before the first step, or on all trainers within "
                "`with optimizer.write_parameters():`"
            )

    def find_changed(self, names: Iterable[str] | None = None) -> set[str]:
        """Return the parameters, or those of these, that have been written to since `note`."""
        checked = self._parameters if names is None else names
        changed = {name for name in checked if self._parameters[name]._version != self._versions[name]}
        if names is not None or not self._has_samples:
            return changed
        has_moved = self._find_memory() != self._memory
        for kind, views in self._views.items():
            kept = self._kept[kind]
            if has_moved or not torch.equal(torch.cat([*views.values()]), kept):
                pieces = zip(views, torch.split(kept, [len(view) for view in views.values()]), strict=True)
                changed.update(name for name, piece in pieces if not self._is_same(name, piece))
        return changed

    def _is_same(self, name: str, kept: Tensor) -> bool:
        """Return whether the elements are as they were kept, wherever the parameter is by now."""
        sample = _sample(self._parameters[name]).to(kept.device)
        return sample.dtype != kept.dtype or torch.equal(sample, kept)  # another dtype is refused elsewhere


def _sample(parameter: Tensor) -> Tensor:
    """Return the bits of evenly spaced elements, at most twice `SAMPLED`: a view, if the parameter is contiguous."""
    flat = parameter.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLED)].view(BITS[flat.element_size()])


def digest_values(parameters: Mapping[str, Tensor]) -> dict[str, int]:
    """Return a digest of all values of each parameter. Passes over all of them, and copies them from a device."""
    return {
        name: xxhash.xxh3_64_intdigest(writable_bytes(parameter.detach().cpu().contiguous()))
        for name, parameter in parameters.items()
    }


class ScriptGuard:
    """The parameters and groups of a script as they were when the run began, or after the last step."""

    def __init__(self, optimizer: Optimizer, model: TrainedModel, engine: StepEngine, session: Session) -> None:
        """Note the state at the start. There is no `watch` with local steps, which write to the parameters."""
        client, settings = session.client, session.client.settings
        has_samples = not settings.overlap_pulls
        self.watch = None if settings.local_steps else ParameterWatch(model.parameters, has_samples=has_samples)
        self.has_read_position = False
        self._is_noted = True  # False while the engine writes, and after an interrupt of that
        self._engine = engine
        self._optimizer = optimizer
        self._module = model.module
        self._parameters = model.parameters
        self._log = client.log
        self._is_async = client.joined.consistency.is_async
        self._types = {name: (parameter.shape, parameter.dtype) for name, parameter in model.parameters.items()}
        self._forms = self._read_forms()
        self._members = _identities(optimizer)
        self._in_module = self._find_module_parameters()
        self._values_at_start: dict[str, int] | None = digest_values(self._parameters)  # None after the first step

    @property
    def has_stepped(self) -> bool:
        """True once this script has called `step()`."""
        return self._values_at_start is None

    def note(self) -> None:
        """Note the values of the parameters, which the script must not change from now on."""
        if self.watch is not None:
            self.watch.note()
        self._is_noted = True

    def check(self) -> None:
        """Adopt the values that were loaded before the first step. Raises BadModel for other changes by the script."""
        if _identities(self._optimizer) != self._members:
            raise BadModel(
                "parameters were replaced, added to or removed from param_groups after the optimizer was wrapped; the "
                "slice plan is made once, when the run starts. Save a checkpoint, and start a new run"
            )
        if self._forms != (forms := self._read_forms()):
            for name, parameter in self._parameters.items():
                check_form(name, parameter, *self._types[name])
            self._engine.follow_parameters()
            self._forms = forms
        if self._values_at_start is None:
            self._check_values()
        else:
            self._begin_steps(self._values_at_start)

    def _check_values(self) -> None:
        """Raise BadModel for changes by the script, and expect those of the engine until `note`."""
        if self.watch is not None and self._is_noted:
            self.watch.check()
        self._is_noted = False

    def _begin_steps(self, values_at_start: dict[str, int]) -> None:
        if replaced := self._in_module - self._find_module_parameters():
            raise BadModel(
                f"parameter {min(replaced)!r} was replaced in the model after the optimizer was wrapped, and the run "
                "would train one that the model no longer has. Load without assign=True, or change the model before "
                "RemoteOptimizer(…)"
            )
        if changed := _find_rewritten(self._parameters, values_at_start):
            self._engine.replace_values(changed)
        self._values_at_start = None
        if all(parameter.grad is None for parameter in self._parameters.values()):
            self._log.warning(
                "no parameter has a gradient in the first step. Call loss.backward() before step(), and give the "
                "optimizer the parameters of the model that computes the loss"
            )
        if self._engine.progress.begun > 0 and not self.has_read_position:
            self._log.warning(
                f"the run is at round {self._engine.progress.begun}, but the script has not read optimizer.round, so "
                "it may repeat batches. Iterate over optimizer.epochs(loader, …), or begin the loop and its schedules "
                "at optimizer.round"
            )

    def _find_module_parameters(self) -> set[str]:
        """Return the names of the trained parameters that the model has."""
        present = set(map(id, () if self._module is None else self._module.parameters()))
        return {name for name, parameter in self._parameters.items() if id(parameter) in present}

    def _read_forms(self) -> list[tuple[Any, ...]]:
        # The shape itself takes longer to read than all of these.
        return [(each.data_ptr(), each.numel(), each.stride()) for each in self._parameters.values()]

    @torch.no_grad()
    def synchronize(self) -> None:
        """Wait for the steps on their way. Raises BadModel for changes that their parameters would overwrite."""
        if self._engine.progress.begun != self._engine.progress.version:
            self._check_values()
        was_noted, is_written = self._is_noted, True
        try:
            is_written = self._engine.synchronize()
        finally:
            if is_written or not was_noted:
                self.note()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Begin the next step from the values of parameters that are written within the block, or were before.

        With local steps a write is a part of them.
        """
        if self._is_async and self.has_stepped and self.watch is not None:
            raise BadModel(
                "asynchronous modes have no round in which all trainers could write parameters; write them before the "
                "first step"
            )
        self.synchronize()
        if self.watch is None:
            yield
            return
        changed, before = self.watch.find_changed(), digest_values(self._parameters)
        yield
        changed.update(_find_rewritten(self._parameters, before))
        if changed:
            self._engine.replace_values(changed)
        self.note()


def _find_rewritten(parameters: Mapping[str, Tensor], before: dict[str, int]) -> list[str]:
    return [name for name, digest in digest_values(parameters).items() if digest != before[name]]


def _identities(optimizer: Optimizer) -> list[list[int]]:
    return [list(map(id, group["params"])) for group in optimizer.param_groups]
