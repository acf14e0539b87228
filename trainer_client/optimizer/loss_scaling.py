"""Loss scaling by `torch.amp.GradScaler`, which leaves the scale and an overflow to the optimizer's `step`."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor
from torch.optim import Optimizer

from ps_protocol.errors import BadModel


def check_scaling(optimizer: Optimizer, policy: str | None, *, is_overlapped: bool) -> None:
    """Raise BadModel if a GradScaler has called `step`, and an overflow could not skip the step on all trainers.

    `policy`: that of the run for NaN and infinity; None if each trainer skips its own steps.
    """
    if getattr(optimizer, "found_inf", None) is None:
        return
    if is_overlapped:
        raise BadModel(
            "with overlap=True, gradients are sent before a GradScaler unscales them. Use bfloat16, which needs no "
            "GradScaler, or overlap=False"
        )
    if policy not in (None, "skip_round"):
        raise BadModel(
            "a GradScaler skips steps whose gradients overflow, and the other trainers must skip them, too. Set "
            "GRADPOST_NONFINITE=skip_round, or use bfloat16, which needs no GradScaler",
            expected="skip_round",
            actual=policy,
        )


def unscale_gradients(optimizer: Optimizer, parameters: Collection[Tensor]) -> bool:
    """Divide the gradients by the scale of a GradScaler; return False, and clear them, if they have overflowed.

    torch sets `found_inf` and `grad_scale` of the optimizer during `step`. `grad_scale` is None if the script has
    called `unscale_`.
    """
    found_inf: Tensor | None = getattr(optimizer, "found_inf", None)
    scale: Tensor | None = getattr(optimizer, "grad_scale", None)
    is_finite = found_inf is None or not bool(found_inf.item())
    for parameter in parameters:
        if not is_finite:
            parameter.grad = None
        elif scale is not None and parameter.grad is not None:
            inverse = scale.double().reciprocal().float()  # as torch's `unscale_`
            parameter.grad.mul_(inverse.to(parameter.grad.device, non_blocking=True))
    return is_finite
