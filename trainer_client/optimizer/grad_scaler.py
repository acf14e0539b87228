"""`GradScaler`: `torch.amp.GradScaler` whose scale is the same on all trainers."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ps_protocol.errors import BadModel
from ps_protocol.optimizers import HyperParameters
from ps_protocol.vocabulary import Round

from .overlap import Overlap
from .remote_optimizer import RemoteOptimizer


@dataclass(frozen=True, slots=True)
class ScalerState:
    """The state of a GradScaler after a round. Its fields are SCALER_NUMBERS."""

    after: Round  # the newest round whose outcome is in it
    scale: float  # a float32
    growth_tracker: int  # rounds that were applied since the scale changed

    def next(
        self, *, is_skipped: bool, growth_factor: float, backoff_factor: float, growth_interval: int
    ) -> ScalerState:
        """Return the state after another round, as `torch.amp.GradScaler` computes it.

        >>> ScalerState(0, 8.0, 1).next(is_skipped=False, growth_factor=2.0, backoff_factor=0.5, growth_interval=2)
        ScalerState(after=1, scale=16.0, growth_tracker=0)
        """
        if is_skipped:
            return ScalerState(self.after + 1, as_float32(self.scale * backoff_factor), 0)
        if self.growth_tracker + 1 != growth_interval:
            return ScalerState(self.after + 1, self.scale, self.growth_tracker + 1)
        grown = as_float32(self.scale * growth_factor)
        return ScalerState(self.after + 1, grown if math.isfinite(grown) else self.scale, 0)


def as_float32(number: float) -> float:
    """Return the nearest float32; infinity if the number is too large."""
    return torch.tensor(number, dtype=torch.float32).item()


class GradScaler(torch.amp.GradScaler):
    """A `torch.amp.GradScaler` for one RemoteOptimizer, whose scale follows from the outcomes of rounds.

        scaler = GradScaler(optimizer)

    It is used like torch's: `scale`, `unscale_` if the script reads or clips gradients, `step`, `update`. If a round
    was skipped for any trainer's gradients, the scale backs off on all trainers, else it grows on all of them: at each
    step all trainers have the same scale, if they begin with the same settings. A restarted trainer, and a run that is
    resumed or rolled back, continue with the state that the lowest rank had in that round; a loaded state counts only
    in a run that has just begun.

    With `max_delay` = k the outcome of a round counts k steps later, so a scale that is too large may be halved k + 1
    times. With `overlap` gradients are unscaled before they are sent. With `overlap_pulls`, calls that need the new
    scale (`scale`, `get_scale`, `state_dict`) wait for the newest step. Asynchronous modes and local steps have no
    rounds in common: each trainer has its own scale there, as with torch's.

    Args:
        optimizer: the optimizer whose gradients are scaled; it has one GradScaler.
        device: the device of losses, as in torch: "cuda" or "cpu".
        settings: as in torch: `init_scale`, `growth_factor`, `backoff_factor`, `growth_interval`, `enabled`.

    Raises:
        BadModel: if `optimizer` is none, or where rounds are shared and `nonfinite` is not `skip_round`.

    """

    def __init__(self, optimizer: RemoteOptimizer, device: str = "cuda", **settings: Any) -> None:
        if not hasattr(optimizer, "session"):
            raise BadModel(
                f"the first argument of gradpost.GradScaler is the RemoteOptimizer, not a {type(optimizer).__name__}. "
                "Call GradScaler(optimizer, device)"
            )
        super().__init__(device, **settings)
        self._remote = optimizer
        self._client = optimizer.session.client
        self._is_shared = self.is_enabled() and optimizer.scaling.is_shared
        self._inverse: float | None = None  # 1 / scale of this step, until all gradients are unscaled
        self._overlap: Overlap | None = None
        if self.is_enabled():
            self._check_run()
            self._begin_with(ScalerState(0, super().get_scale(), 0))
            self._progress, self._overlap = optimizer.scaling.progress, optimizer.scaling.overlap
            optimizer.scaling.attach(self._describe, self._unscale)

    def _check_run(self) -> None:
        policy = self._client.run.nonfinite
        if self._is_shared and policy != "skip_round":
            raise BadModel(
                "all trainers must skip a step that the GradScaler of one trainer skips. Set "
                "GRADPOST_NONFINITE=skip_round, or use bfloat16, which needs no GradScaler",
                expected="skip_round",
                actual=policy,
            )
        if self._client.settings.overlap and not self._is_shared:
            raise BadModel(
                "with overlap=True, gradients are sent before a GradScaler detects overflow, and in asynchronous "
                "modes other trainers do not skip them. Use bfloat16 or overlap=False"
            )

    def _begin_with(self, state: ScalerState) -> None:
        # Of torch's, which multiplies by a float32, whatever number the script has given.
        self._initial = self._state = replace(state, scale=as_float32(state.scale))
        self._is_due = True  # whether there is an outcome that the scale has yet to follow from
        self._num_rollbacks: int | None = None  # the rollbacks when the state was last advanced

    def _describe(self) -> HyperParameters:
        return asdict(self._state)

    def scale(self, outputs: Any) -> Any:
        """Scale a loss as torch.amp.GradScaler does, with the scale of the run."""
        self._catch_up()
        if self._overlap is not None:
            self._inverse = 1 / self._state.scale
        return super().scale(outputs)

    def unscale_(self, optimizer: Optimizer) -> None:
        """Unscale the gradients as torch.amp.GradScaler does.

        With `overlap`, gradients already sent are already unscaled; the script must not change them.
        """
        self._check(optimizer)
        if self._overlap is None:
            super().unscale_(optimizer)
        else:
            self._unscale_rest(self._overlap)

    def _unscale(self, gradient: Tensor) -> None:
        """Divide a gradient in place by the scale of this step. Do nothing once all are unscaled."""
        if self._inverse is not None:
            gradient.mul_(self._inverse)

    def _unscale_rest(self, overlap: Overlap) -> None:
        for gradient in overlap.unsent_gradients():
            self._unscale(gradient)
        self._inverse = None

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step as `RemoteOptimizer.step` does, with unscaled gradients; one trainer's overflow skips the step on all.

        Takes no closure, as torch's does not: its gradients would come after the unscaling.
        """
        self._check(optimizer)
        if self.is_enabled() and (args or kwargs):
            raise BadModel("a GradScaler's step takes no closure. Call backward() before it")
        if not self._is_shared:
            return super().step(optimizer, *args, **kwargs)
        if self._overlap is None:
            return super().step(optimizer)
        self._unscale_rest(self._overlap)
        return self._remote.step()  # the pservers, or the ring, find what is not finite

    def _check(self, optimizer: Optimizer) -> None:
        if optimizer is not self._remote:
            raise BadModel(
                "this GradScaler belongs to another optimizer. Use torch.amp.GradScaler for a local optimizer"
            )

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Set the scale that follows from the round; or `new_scale`, which must be the same on all trainers."""
        if not self._is_shared:
            super().update(new_scale)
        elif new_scale is None:
            super().update(self._state.scale)  # ends torch's iteration; what follows is found when it is needed
            self._is_due = True
        else:
            self._catch_up()  # with the outcome that an update() before this one counts
            super().update(new_scale)
            self._state = ScalerState(self._outcome_round, super().get_scale(), self._state.growth_tracker)
            self._is_due = False

    @property
    def _outcome_round(self) -> Round:
        """The newest round whose outcome counts for the next step: `max_delay` rounds before the newest one."""
        return max(self._progress.begun - self._client.joined.consistency.max_delay, 0)

    def _catch_up(self) -> None:
        if not self._is_shared or (not self._is_due and self._num_rollbacks == self._progress.num_rollbacks):
            return
        if self._overlap is not None:
            self._overlap.wait()
        round_, outcomes = self._outcome_round, self._client.results.outcomes
        if self._num_rollbacks != self._progress.num_rollbacks:  # also before the first step
            pushed: dict[str, Any] = outcomes.scaler or {**asdict(self._initial), "after": round_}
            self._state = ScalerState(**pushed)
        factors: dict[str, Any] = {
            "growth_factor": self.get_growth_factor(),
            "backoff_factor": self.get_backoff_factor(),
            "growth_interval": self.get_growth_interval(),
        }
        while self._state.after < round_:
            self._state = self._state.next(is_skipped=self._state.after + 1 in outcomes.skipped, **factors)
        self._num_rollbacks, self._is_due = self._progress.num_rollbacks, False
        super().load_state_dict({"scale": self._state.scale, "_growth_tracker": self._state.growth_tracker, **factors})

    def get_scale(self) -> float:
        """Return the scale of the next step."""
        self._catch_up()
        return super().get_scale()

    def state_dict(self) -> dict[str, Any]:
        """Return the state as torch.amp.GradScaler does."""
        self._catch_up()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state. If the run has taken steps with a GradScaler, the run's state is used instead."""
        super().load_state_dict(state_dict)
        if self.is_enabled():
            self._begin_with(ScalerState(0, state_dict["scale"], int(state_dict["_growth_tracker"])))
