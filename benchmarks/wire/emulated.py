"""Models with real parameters whose computation is a sleep, as the processor is free while a GPU works.

All layers with a matrix take the same time, others take none. The gradients are constant.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from ps_protocol.vocabulary import ParameterSpec

GRADIENT = 1.0


class Layer(nn.Module):
    """Some parameters, and the seconds of the forward and the backward pass."""

    def __init__(self, shapes: Sequence[Sequence[int]], forward_seconds: float, backward_seconds: float) -> None:
        super().__init__()
        self.tensors = nn.ParameterList([nn.Parameter(torch.zeros(*shape)) for shape in shapes])
        self._gradients = [torch.full(tuple(shape), GRADIENT) for shape in shapes]
        self._forward_seconds, self._backward_seconds = forward_seconds, backward_seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self._forward_seconds)
        result: Tensor = _Wait.apply(x, self._backward_seconds, self._gradients, *self.tensors)
        return result


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float, gradients: Sequence[Tensor], *parameters: Tensor) -> Tensor:
        ctx.seconds, ctx.gradients = seconds, gradients
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        time.sleep(ctx.seconds)
        # Autograd does not copy views; a GPU writes gradients without the processor, too.
        return gradient, None, None, *(one.view_as(one) for one in ctx.gradients)


def make_model(parameters: Sequence[ParameterSpec], forward_seconds: float, backward_seconds: float) -> nn.Sequential:
    """Make a model whose layers are consecutive parameters with the same prefix. The seconds are those of a pass."""
    layers = [list(its) for _, its in groupby(parameters, key=lambda spec: spec.name.rpartition(".")[0])]
    shapes = [[spec.shape for spec in layer] for layer in layers]
    is_waiting = [any(len(shape) > 1 for shape in its) for its in shapes]
    forward, backward = forward_seconds / sum(is_waiting), backward_seconds / sum(is_waiting)
    return nn.Sequential(
        *(Layer(its, forward * waits, backward * waits) for its, waits in zip(shapes, is_waiting, strict=True))
    )
