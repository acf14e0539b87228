"""What may be done about staleness: smaller steps, or a first-order correction of the gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ps_protocol.optimizers import HyperParameters


def divide_rates(numbers: Sequence[HyperParameters], staleness: int) -> list[HyperParameters]:
    """Return the groups' numbers with every rate divided by the staleness, which counts as 1 at least.

    Zhang, Gupta, Lian, Liu: Staleness-aware async-SGD for distributed deep learning (IJCAI 2016), eq. 6.
    """
    return [{**group, "lr": group["lr"] / max(1, staleness)} for group in numbers if "lr" in group]  # type: ignore[operator]


def compensate_gradient(gradient: Tensor, values: Tensor, pulled: Tensor, strength: float) -> Tensor:
    """DC-ASGD: `g + λ·g⊙g⊙(w - w_pulled)`, the gradient as it would roughly be on today's values.

    All tensors are of one block, of shape (num_elements,), and are only read. Returns a new float32 tensor.

    Zheng et al.: Asynchronous stochastic gradient descent with delay compensation (ICML 2017), eq. 10.
    """
    total = gradient.to(torch.float32, copy=True)
    return total.addcmul_(total.square(), values - pulled, value=strength)
