"""Checks before each step of a `RemoteOptimizer`: changes by the script that the run would lose or not notice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from operator import eq
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from ps_protocol.errors import BadModel
from ps_protocol.vocabulary import Round

from ..engines.engine import StepEngine
from ..engines.model_tensors import TrainedModel, frozen_parameters
from ..session.session import Session
from ..transport.tensors import check_form
from .parameter_watch import Digests, ModelPlaces, ParameterWatch, digest_values, find_rewritten

FIRST_STEPS = 3  # without any gradient there is a warning

_Form: TypeAlias = tuple[torch.Size, torch.dtype, tuple[int, ...], torch.device, int]


class ScriptGuard:
    """The parameters, groups and modules of a script as they were when the run began, or after the last step."""

    def __init__(self, optimizer: Optimizer, model: TrainedModel, engine: StepEngine, session: Session) -> None:
        """Note the state at the start. There is no `watch` with local steps, which write to the parameters."""
        client, settings = session.client, session.client.settings
        has_samples = not settings.overlap_pulls
        self.watch = None if settings.local_steps else ParameterWatch(model.parameters, has_samples=has_samples)
        self._engine = engine
        self._is_noted = True  # False while the engine writes, and after an interrupt of that
        self.has_read_position = False
        self._num_without = 0  # first steps without a gradient; FIRST_STEPS after the first step with one
        self._optimizer = optimizer
        self._model = model.module
        self._parameters = model.parameters
        self._log = client.log
        self._is_async = client.joined.consistency.is_async
        self._forms = self._read_forms()
        self._members = _identities(optimizer.param_groups)
        owners = model.averages.owners
        self._places = None if model.module is None else ModelPlaces(model.module, model.parameters, owners)
        self._values_at_start: Digests | None = digest_values(self._parameters)  # None after the first step
        self._frozen_at_start = digest_values(frozen_parameters(model.module, self._parameters))

    @property
    def has_stepped(self) -> bool:
        """True once this script has called `step()`."""
        return self._values_at_start is None

    @contextmanager
    def noting_rollback(self) -> Iterator[None]:
        """Note the values of the parameters if the run goes back within the block."""
        num_rollbacks = self._engine.progress.num_rollbacks
        yield
        if self._engine.progress.num_rollbacks != num_rollbacks:
            self.note()

    def note(self) -> None:
        """Note the values of the parameters, which the script must not change from now on."""
        if self.watch is not None:
            self.watch.note()
        self._is_noted = True

    def _check_values(self) -> None:
        """Raise BadModel for changes by the script, and expect those of the engine until `note`."""
        if self.watch is not None and self._is_noted:
            self.watch.check()
        self._is_noted = False

    def check(self, wrapped: Optimizer, *, follows_schedule: bool) -> None:
        """Adopt the values that were loaded before the first step. Raises BadModel for other changes by the script."""
        if _identities(self._optimizer.param_groups) != self._members:
            raise BadModel(
                "parameters were replaced, added to or removed from param_groups after the optimizer was wrapped; the "
                "slice plan is made once, when the run starts. Save a checkpoint, and start a new run"
            )
        if self._places is not None:
            self._places.check()
        self._warn_of_absent_gradients()
        self._follow_memory()
        if self._values_at_start is None:
            self._check_values()
            return
        changed, self._values_at_start = find_rewritten(self._parameters, self._values_at_start), None
        if changed:
            self._engine.replace_values(changed)
        self._warn_of_frozen()
        if self._engine.progress.begun > 0:
            self._warn_of_position(self._engine.progress.begun, wrapped, follows_schedule=follows_schedule)

    def _follow_memory(self) -> None:
        """Let the engine follow parameters that the script has moved. Raises BadModel for another shape or dtype."""
        if all(map(eq, map(_read_form, self._parameters.values()), self._forms.values())):
            return
        for name, parameter in self._parameters.items():
            shape, dtype, *_ = self._forms[name]
            check_form(name, parameter, shape, dtype)
        self._engine.follow_parameters()
        self._forms = self._read_forms()

    def _read_forms(self) -> dict[str, _Form]:
        return {name: _read_form(parameter) for name, parameter in self._parameters.items()}

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
        if self._is_async and self._values_at_start is None and self.watch is not None:
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
        changed.update(find_rewritten(self._parameters, before))
        if changed:
            self._engine.replace_values(changed)
        self.note()

    def _warn_of_position(self, round_: Round, wrapped: Optimizer, *, follows_schedule: bool) -> None:
        """Warn if the script does not continue at the run's round."""
        if not self.has_read_position:
            self._log.warning(
                f"the run is at round {round_}, but the script has not read optimizer.round, so it may repeat batches. "
                "Iterate over optimizer.epochs(loader, …), or begin the loop and its schedules at optimizer.round"
            )
        groups: list[dict[str, Any]] = self._optimizer.param_groups
        has_schedule = any(hasattr(stepped.step, "_wrapped_by_lr_sched") for stepped in (self._optimizer, wrapped))
        is_at_start = all(group["lr"] == group.get("initial_lr") for group in groups)
        if has_schedule and is_at_start and not follows_schedule:
            self._log.warning(
                f"the run is at round {round_}, and the learning rates are those with which this script's "
                "schedule begins: give it to optimizer.epochs(loader, …, schedule=…), or step it once for each round "
                "of optimizer.round before the loop"
            )

    def _warn_of_absent_gradients(self) -> None:
        if self._num_without == FIRST_STEPS:
            return
        self._num_without += 1
        if any(parameter.grad is not None for parameter in self._parameters.values()):
            self._num_without = FIRST_STEPS
        elif self._num_without == FIRST_STEPS:
            self._log.warning(
                f"no parameter had a gradient in the first {FIRST_STEPS} steps. Call loss.backward() before step(), "
                "and give the optimizer the parameters of the model that computes the loss"
            )

    def _warn_of_frozen(self) -> None:
        frozen = frozen_parameters(self._model, self._parameters)
        known = {name: parameter for name, parameter in frozen.items() if name in self._frozen_at_start}
        if changed := find_rewritten(known, self._frozen_at_start):
            self._log.warning(
                f"the script has changed {len(changed)} frozen parameters since the optimizer was wrapped, such "
                f"as {min(changed)!r}: exports, and trainers that do not load the same, have the earlier values. "
                "Load the model before RemoteOptimizer(…)"
            )


def _read_form(parameter: Tensor) -> _Form:
    return parameter.shape, parameter.dtype, parameter.stride(), parameter.device, parameter.data_ptr()


def _identities(groups: list[dict[str, Any]]) -> list[list[int]]:
    return [list(map(id, group["params"])) for group in groups]
