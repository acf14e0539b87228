"""Mixed precision: what `torch.amp.GradScaler` leaves to an optimizer that says `_step_supports_amp_scaling`.

Otherwise it would skip `step()` where a gradient overflows, on one trainer and not on the others, which would be in
different rounds from then on. https://docs.pytorch.org/docs/stable/amp.html#gradient-scaling
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.optim import Optimizer


def unscale_gradients(optimizer: Optimizer, parameters: Iterable[Tensor]) -> bool:
    """Divide the gradients, in place, by the scale that a GradScaler has left; returns whether they have overflowed.

    Then they are left as they are. Without a GradScaler nothing happens.
    """
    found_inf: Tensor | None = getattr(optimizer, "found_inf", None)
    if found_inf is not None and bool(found_inf.item()):
        return True
    scale: Tensor | None = getattr(optimizer, "grad_scale", None)
    if scale is not None:  # not if the script has called `unscale_`
        inverse = scale.double().reciprocal().float()
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        for gradient in gradients:
            gradient.mul_(inverse.to(gradient.device, non_blocking=True))
    return False
