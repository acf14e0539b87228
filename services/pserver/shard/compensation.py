"""Two methods that compensate for the staleness of a gradient in the asynchronous modes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ps_protocol.optimizers import HyperParameters
from ps_protocol.vocabulary import Rank

from .shard import Shard


def divide_rates(hyper_parameters: Sequence[HyperParameters], staleness: int) -> list[HyperParameters]:
    """Return the groups' hyperparameters with every learning rate divided by the staleness, or by 1 if it is 0.

    Zhang, Gupta, Lian, Liu: Staleness-aware async-SGD for distributed deep learning (IJCAI 2016), eq. 6.
    """
    return [{**group, "lr": group["lr"] / max(1, staleness)} for group in hyper_parameters if "lr" in group]  # type: ignore[operator]


def compensate_gradient(gradient: Tensor, values: Tensor, pulled: Tensor, strength: float) -> Tensor:
    """Return the DC-ASGD gradient `g + λ·g⊙g⊙(w - w_pulled)`, an estimate of the gradient on the current values.

    All tensors are of one block, of shape (num_elements,), and are only read. The result is a new float32 tensor.

    Zheng et al.: Asynchronous stochastic gradient descent with delay compensation (ICML 2017), eq. 10.
    """
    total = gradient.to(torch.float32, copy=True)
    return total.addcmul_(total.square(), values - pulled, value=strength)


def compensate_all(shard: Shard, gradients: dict[str, Tensor], pulled: Tensor, strength: float) -> None:
    """Compensate all these gradients as DC-ASGD does. `pulled` has the pulled values of their blocks, in this order."""
    sizes = [len(gradient) for gradient in gradients.values()]
    for (name, gradient), values in zip(gradients.items(), torch.split(pulled, sizes), strict=True):
        if not shard.layout.place[name].is_mean:
            gradients[name] = compensate_gradient(gradient, shard.block(name), values, strength)


def step_stale(
    shard: Shard,
    gradients: Mapping[str, Tensor],
    hyper_parameters: list[HyperParameters],
    counter: Rank | None,
    pulled: Sequence[int] | None,
) -> None:
    """Step blocks, with rates divided by the staleness of each one where the pulled versions are given."""
    if pulled is None:
        shard.apply_blocks(gradients, hyper_parameters, counter=counter)
        return
    groups: dict[int, dict[str, Tensor]] = {}
    for (name, gradient), version in zip(gradients.items(), pulled, strict=True):
        groups.setdefault(shard.versions[name] - version, {})[name] = gradient
    for staleness, group in groups.items():
        shard.apply_blocks(group, divide_rates(hyper_parameters, staleness), counter=counter)
