"""What may be done about staleness: smaller steps, or a first-order correction of the gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ps_protocol.optimizers import HyperParameters

from .layout import BlockPlace


def divide_rates(numbers: Sequence[HyperParameters], staleness: int) -> list[HyperParameters]:
    """The numbers with every rate divided by the staleness, which counts as 1 at least.

    Zhang, Gupta, Lian, Liu: Staleness-aware async-SGD for distributed deep learning (IJCAI 2016), eq. 6.
    """
    return [{**group, "lr": group["lr"] / max(1, staleness)} for group in numbers]  # type: ignore[operator]


def compensate_gradients(
    gradients: Sequence[Tensor], values: Tensor, place: BlockPlace, pulled: Sequence[Tensor | None], strength: float
) -> list[Tensor]:
    """DC-ASGD: `g + λ·g⊙g⊙(w - w_pulled)`, the gradient as it would roughly be on today's values.

    `gradients` and `values` have shape (num_elements,) and are only read; `pulled` are flat float32 copies of the
    whole shard, of which `place` is this block's. Returns new float32 tensors.

    Zheng et al.: Asynchronous stochastic gradient descent with delay compensation (ICML 2017), eq. 10.
    """
    compensated = []
    for gradient, shard in zip(gradients, pulled, strict=True):
        assert shard is not None
        total = gradient.to(torch.float32, copy=True)
        drift = values - shard[place.begin : place.end]
        compensated.append(total.addcmul_(total.square(), drift, value=strength))
    return compensated
