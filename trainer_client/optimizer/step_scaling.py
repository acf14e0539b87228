"""The loss scaling of a step, with `gradpost.GradScaler` or with torch's."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.optim import Optimizer

from ps_protocol.errors import BadModel, NonFiniteGradient
from ps_protocol.optimizers import HyperParameters

from ..engines.engine import StepProgress
from ..session.session import Session
from .divided_work import DividedWork
from .overlap import Overlap


class StepScaling:
    """The loss scaling of a RemoteOptimizer: by a GradScaler, by torch's GradScaler, or none."""

    def __init__(
        self,
        session: Session,
        optimizer: Optimizer,
        work: DividedWork,
        progress: StepProgress,
        overlap: Overlap | None,
    ) -> None:
        self.progress = progress
        self.overlap = overlap
        self.is_shared = not work.is_async and work.local is None
        self._parameters = work.model.parameters
        self._session = session
        self._optimizer = optimizer  # torch's GradScaler gives it `found_inf` and `grad_scale`
        self._describe: Callable[[], HyperParameters] | None = None
        self._has_warned = False

    def attach(self, describe: Callable[[], HyperParameters], unscale: Callable[[Tensor], None]) -> None:
        """Attach a GradScaler: `unscale` every gradient before it is added early, and push its state in each round.

        Raises BadModel for a second GradScaler.
        """
        if self._describe is not None:
            raise BadModel("a RemoteOptimizer must not have a second GradScaler")
        self._describe = describe
        if self.overlap is not None:
            self.overlap.unscale = unscale

    def describe(self) -> list[HyperParameters]:
        """Return the state that is pushed with the hyperparameters, if there is one."""
        return [] if self._describe is None or not self.is_shared else [self._describe()]

    def unscale(self) -> bool:
        """Unscale the gradients; return False, and clear them, if they have overflowed.

        Without a GradScaler nothing happens. Raises NonFiniteGradient for an overflow that the other trainers would
        not skip.
        """
        parameters = self._parameters.values()
        found_inf: Tensor | None = getattr(self._optimizer, "found_inf", None)
        scale: Tensor | None = getattr(self._optimizer, "grad_scale", None)  # None: the script has called `unscale_`
        if found_inf is not None:
            self._warn_of_torch()
        if found_inf is None or not bool(found_inf.item()):
            if scale is not None:
                inverse = scale.double().reciprocal().float()
                for gradient in [parameter.grad for parameter in parameters if parameter.grad is not None]:
                    gradient.mul_(inverse.to(gradient.device, non_blocking=True))
            return True
        client = self._session.client
        if client.run.nonfinite != "skip_round" and self.is_shared:
            text = f"trainer {client.joined.rank}'s gradients overflowed, but with nonfinite={client.run.nonfinite}"
            raise NonFiniteGradient(f"{text} other trainers do not skip the round. Set GRADPOST_NONFINITE=skip_round")
        for parameter in parameters:
            parameter.grad = None
        return False

    def _warn_of_torch(self) -> None:
        """Warn once that torch's GradScaler ignores the gradients of the other trainers."""
        session = self._session
        is_alone = self._describe is None and self.is_shared and session.world_size > 1
        if is_alone and not self._has_warned:
            self._has_warned = True
            session.client.log.warning(
                "torch's GradScaler backs off alone when this trainer's gradients overflow, and scales drift apart; "
                "with gradpost.GradScaler(optimizer) all trainers have the same scale"
            )
