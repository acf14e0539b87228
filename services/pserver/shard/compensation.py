"""Two methods that compensate for the staleness of a gradient in the asynchronous modes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ps_protocol.optimizers import HyperParameters


def divide_rates(hyper_parameters: Sequence[HyperParameters], staleness: int) -> list[HyperParameters]:
    """Return the groups' hyperparameters with every learning rate divided by the staleness, or by 1 if it is 0.

    Zhang, Gupta, Lian, Liu: Staleness-aware async-SGD for distributed deep learning (IJCAI 2016), eq. 6.
    """
    return [{**group, "lr": group["lr"] / max(1, staleness)} for group in hyper_parameters]  # type: ignore[operator]


def compensate_gradient(gradient: Tensor, values: Tensor, pulled: Tensor, strength: float) -> Tensor:
    """Return the DC-ASGD gradient `g + λ·g⊙g⊙(w - w_pulled)`, an estimate of the gradient on the current values.

    All tensors are of one block, of shape (num_elements,), and are only read. The result is a new float32 tensor.

    Zheng et al.: Asynchronous stochastic gradient descent with delay compensation (ICML 2017), eq. 10.
    """
    total = gradient.to(torch.float32, copy=True)
    return total.addcmul_(total.square(), values - pulled, value=strength)
