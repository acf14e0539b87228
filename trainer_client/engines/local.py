"""The engine of `strategy="local"`: steps the script's own optimizer, to debug a script without a cluster.

Settings that only change when values travel (`overlap`, `overlap_pulls`, `max_delay`, wire types) have no effect.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from ps_protocol.encodings import is_finite
from ps_protocol.errors import NonFiniteGradient
from ps_protocol.norms import clip_coefficient

from ..session.session import Session
from .engine import StepGradients, StepProgress, note_own_round
from .local_steps import LocalSteps, step_with_gradients
from .model_tensors import TrainedModel


class LocalEngine:
    """A run of one trainer in its own process."""

    def __init__(self, session: Session, model: TrainedModel, optimizer: Optimizer, local: LocalSteps | None) -> None:
        """`optimizer` steps with each contribution; with local steps it is the outer optimizer."""
        self.progress = StepProgress()
        self._client = session.client
        self._parameters = model.parameters
        self._optimizer = optimizer
        self._local = local
        self.replace_values(())

    def follow_parameters(self) -> None:
        """Implement `StepEngine.follow_parameters`."""

    def replace_values(self, names: Collection[str]) -> None:
        """Implement `StepEngine.replace_values`."""
        if self._local is not None:
            self._local.begin_count()

    def add_gradient(self, name: str, gradient: Tensor) -> None:
        """Implement `StepEngine.add_gradient`. `step` gets all gradients."""

    def discard_gradients(self) -> None:
        """Implement `StepEngine.discard_gradients`."""

    def synchronize(self) -> bool:
        """Implement `StepEngine.synchronize`."""
        return False

    def step(self, contribution: StepGradients) -> None:
        """Implement `StepEngine.step`."""
        client, round_ = self._client, self.progress.begun + 1
        is_skipped = False
        if client.run.nonfinite != "allow":
            culprit = next((name for name, g in contribution.gradients.items() if not is_finite(g)), None)
            if culprit is not None and client.run.nonfinite == "reject":
                raise NonFiniteGradient(f"NaN or infinity in the gradient of {culprit!r} in round {round_}")
            is_skipped = client.run.nonfinite == "skip_round" and (culprit is not None or not contribution.is_finite)
        grad_norm = None if is_skipped else self._apply(contribution.gradients)
        self.progress.begun = self.progress.version = round_
        note_own_round(client, round_, grad_norm, is_skipped=is_skipped)

    @torch.no_grad()
    def _apply(self, gradients: Mapping[str, Tensor]) -> float | None:
        """Step with the gradients, which are clipped; return their norm before that if there is a `max_grad_norm`."""
        norm, max_norm = None, self._client.run.max_grad_norm
        if max_norm is not None:
            norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients.values()))
            coefficient = clip_coefficient(norm, max_norm)
            gradients = {name: gradient * coefficient for name, gradient in gradients.items()}
        if self._local is not None:  # the outer optimizer steps from the values before the local steps
            for name, value in self._local.starting_values.items():
                self._parameters[name].copy_(value)
        shaped = {name: gradient.view(self._parameters[name].shape) for name, gradient in gradients.items()}
        step_with_gradients(self._optimizer, self._parameters, shaped)
        self.replace_values(())
        return norm
