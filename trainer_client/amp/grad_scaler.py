"""`GradScaler`: `torch.amp.GradScaler` whose scale is the same on all trainers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ps_protocol.errors import BadModel
from ps_protocol.grad_scalers import ScalerState, as_float32

if TYPE_CHECKING:
    from ..remote_optimizer import RemoteOptimizer


class GradScaler(torch.amp.GradScaler):
    """A `torch.amp.GradScaler` for one RemoteOptimizer, which goes by what the round said instead of by own gradients.

        scaler = GradScaler(optimizer)

    It is used like torch's: `scale`, `unscale_` if gradients are to be looked at or clipped, `step`, `update`. Where a
    round was skipped for any trainer's gradients, `update()` lets the scale back off on all of them, and else it grows
    on all of them together: at each step all trainers have the same scale. The scale and the growth tracker are the
    lowest rank's, so that a trainer which was started again, or a run that is resumed, goes on with the run's; what
    `load_state_dict` brings counts in a run that has just begun. The factors are the script's, the same everywhere.

    With `max_delay` = k the outcome of a round counts k steps later, so that a scale that is too large may be halved
    k + 1 times. With `overlap` gradients are unscaled before they leave. In asynchronous modes and with local steps
    there are no rounds in common: there it is torch's own, and each trainer has its own scale.

    With `overlap_pulls`, what needs the new scale (`scale`, `get_scale`, `state_dict`) waits for the newest step.

    Args:
        optimizer: whose gradients are scaled; it has one GradScaler.
        device: where losses are, as torch's: "cuda" or "cpu".
        settings: torch's: `init_scale`, `growth_factor`, `backoff_factor`, `growth_interval`, `enabled`.

    Raises:
        BadModel: where rounds are shared, and `nonfinite` is not `skip_round`.

    """

    def __init__(self, optimizer: RemoteOptimizer, device: str = "cuda", **settings: Any) -> None:
        super().__init__(device, **settings)
        self._remote = optimizer
        self._agreement = optimizer.session.client.scale_agreement
        self._is_shared = self.is_enabled() and optimizer.shares_rounds
        self._inverse: float | None = None  # of the scale of this step, while gradients are to be divided by it
        if self.is_enabled():
            self._check_run()
            self._begin_with(ScalerState(0, super().get_scale(), 0))
            optimizer.attach_scaler(self.unscale_early)

    def _check_run(self) -> None:
        policy = self._remote.session.client.nonfinite
        if self._is_shared and policy != "skip_round":
            raise BadModel(
                "a step that one trainer's GradScaler skips has to be skipped by all: set nonfinite to skip_round "
                "(GRADPOST_NONFINITE), or use bfloat16, which needs no GradScaler",
                expected="skip_round",
                actual=policy,
            )
        if self._remote.overlaps and not self._is_shared:
            raise BadModel(
                "with overlap=True what has overflowed has left before a GradScaler finds it, and without rounds "
                "nobody else skips it: use bfloat16, which needs no GradScaler, or overlap=False"
            )

    def _begin_with(self, state: ScalerState) -> None:
        # Of torch's, which multiplies by a float32, whatever number the script has given.
        self._initial = self._own = replace(state, scale=as_float32(state.scale))
        self._is_due = True  # whether there is an outcome that the scale has yet to follow from
        self._num_returns = -1  # how often the run had gone back when the scale last did

    def scale(self, outputs: Any) -> Any:
        """As torch's, with the scale of the run."""
        self._catch_up()
        if self._remote.overlaps and self.is_enabled():
            self._inverse = 1 / self._own.scale
        return super().scale(outputs)

    def unscale_(self, optimizer: Optimizer) -> None:
        """As torch's; with `overlap` gradients that have left are unscaled already, and must not be changed."""
        self._check(optimizer)
        if self._remote.overlaps:
            self._unscale_rest()
        else:
            super().unscale_(optimizer)

    def unscale_early(self, gradient: Tensor) -> None:
        """Divide a gradient, in place, by the scale of this step, unless all have been."""
        if self._inverse is not None:
            gradient.mul_(self._inverse)

    def _unscale_rest(self) -> None:
        for gradient in self._remote.gradients_here():
            self.unscale_early(gradient)
        self._inverse = None

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step like `RemoteOptimizer.step`, with unscaled gradients; nobody steps if they are not finite somewhere.

        Takes no closure, whose gradients would come after those that are unscaled; nor does torch's.
        """
        self._check(optimizer)
        if self.is_enabled() and (args or kwargs):
            raise BadModel("a GradScaler's step takes no closure: call backward before it")
        if not self._is_shared:
            return super().step(optimizer, *args, **kwargs)
        with self._agreement.pushing(self._own):
            if not self._remote.overlaps:
                return super().step(optimizer)
            self._unscale_rest()
            return self._remote.step()  # the pservers, or the ring, find what is not finite

    def _check(self, optimizer: Optimizer) -> None:
        if optimizer is not self._remote:
            raise BadModel("this GradScaler belongs to another optimizer; local ones have torch.amp.GradScaler")

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Go on with the scale that follows from the round; or with this one, which all trainers have to set."""
        if not self._is_shared:
            super().update(new_scale)
        elif new_scale is None:
            super().update(self._own.scale)  # ends torch's iteration; what follows is found when it is needed
            self._is_due = True
        else:
            super().update(new_scale)
            self._own = ScalerState(self._remote.outcome_round, super().get_scale(), self._own.growth_tracker)
            self._agreement.set_by_script(self._own.after)
            self._is_due = False

    def _catch_up(self) -> None:
        if not self._is_shared or (not self._is_due and self._num_returns == self._agreement.num_returns):
            return
        self._remote.wait_for_outcome()
        round_ = self._remote.outcome_round
        if self._num_returns != self._agreement.num_returns:
            self._own = replace(self._initial, after=round_)
        factors = {
            "growth_factor": self.get_growth_factor(),
            "backoff_factor": self.get_backoff_factor(),
            "growth_interval": self.get_growth_interval(),
        }
        self._own = self._agreement.state_after(round_, self._own, **factors)  # type: ignore[arg-type]
        self._num_returns, self._is_due = self._agreement.num_returns, False
        super().load_state_dict({"scale": self._own.scale, "_growth_tracker": self._own.growth_tracker, **factors})

    def get_scale(self) -> float:
        """As torch's: the scale of the next step."""
        self._catch_up()
        return super().get_scale()

    def state_dict(self) -> dict[str, Any]:
        """As torch's."""
        self._catch_up()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's; in a run that has taken steps with a GradScaler, the run's state counts instead."""
        super().load_state_dict(state_dict)
        if self.is_enabled():
            self._begin_with(ScalerState(0, state_dict["scale"], int(state_dict["_growth_tracker"])))
