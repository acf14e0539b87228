"""A model whose computation is a sleep, as the processor is free while a GPU works.

All matrices take the same time, other parameters none. The gradients are constant.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from .work import Work

MIN_MATRIX = 2049  # elements: the norms of ResNet-50 have up to 2,048


class Layer(nn.Module):
    """A parameter with a constant gradient, and the seconds of the forward and the backward pass."""

    def __init__(self, gradient: Tensor, forward_seconds: float, backward_seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros_like(gradient))
        self._gradient = gradient
        self._forward_seconds, self._backward_seconds = forward_seconds, backward_seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self._forward_seconds)
        result: Tensor = _Wait.apply(x, self._backward_seconds, self._gradient, self.weight)
        return result


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float, gradient: Tensor, weight: Tensor) -> Tensor:
        ctx.seconds, ctx.gradient = seconds, gradient
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        time.sleep(ctx.seconds)
        # Autograd does not copy views; a GPU writes gradients without the processor, too.
        return gradient, None, None, ctx.gradient.view_as(ctx.gradient)


def make_model(work: Work, rank: int) -> nn.Sequential:
    """Make a model with a layer for each tensor of the work."""
    gradients = work.make_gradients(rank)
    waits = [len(gradient) >= MIN_MATRIX for gradient in gradients]
    forward, backward = work.forward_seconds / sum(waits), work.backward_seconds / sum(waits)
    layers = [
        Layer(gradient, forward * is_waiting, backward * is_waiting)
        for gradient, is_waiting in zip(gradients, waits, strict=True)
    ]
    return nn.Sequential(*layers)


def compute(model: nn.Module) -> None:
    """Take a forward and a backward pass."""
    model(torch.zeros(1, requires_grad=True)).sum().backward()
