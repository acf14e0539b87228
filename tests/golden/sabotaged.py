"""Runs a service or the script with other arithmetic: golden runs have to notice if it is broken.

Breaks what `GOLDEN_SABOTAGE` names and then runs the module that `GOLDEN_PROGRAM` names.
"""

from __future__ import annotations

import os
import runpy
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from ps_protocol import encodings
from ps_protocol.encodings import Part, Rows
from services.pserver.shard import optimizer
from services.pserver.shard.aggregation import Aggregator
from services.pserver.shard.optimizer import Operands, OptimizerBlocks
from trainer_client.client.error_feedback import Remainder

_aggregate = Aggregator.aggregate


def change_nothing() -> None:
    """The control."""


def take_exact_roots() -> None:
    """Take the square roots of sparse steps as IEEE 754 rounds them, and not by MKL, whose bits depend on the CPU."""
    Tensor.sqrt_ = lambda self: self.copy_(torch.from_numpy(np.sqrt(self.numpy())))  # type: ignore[method-assign]


def change_rounding() -> None:
    """Divide by the number of trainers instead of multiplying by its inverse."""

    def scale(self: Aggregator, begin: int, end: int, scale: float) -> None:
        self._gradient[begin:end].div_(round(1 / scale))

    Aggregator._scale = scale  # type: ignore[method-assign]


def swap_ranks() -> None:
    """Add contributions in the reverse order."""

    def aggregate(
        self: Aggregator,
        contributions: Sequence[Mapping[str, Part]],
        rows: Sequence[Mapping[str, Rows]],
        **options: bool,
    ) -> tuple[Tensor, tuple[str, ...]]:
        return _aggregate(self, contributions[::-1], rows[::-1], **options)

    Aggregator.aggregate = aggregate  # type: ignore[method-assign]


def skip_feedback() -> None:
    """Forget what a push of fewer bytes has left out."""

    def resolve(self: Remainder, *, is_applied: bool) -> None:
        self.reset()

    Remainder.resolve = resolve  # type: ignore[method-assign]


def count_one_step_more() -> None:
    """Correct the moments of Adam as if each block had been stepped once more."""
    scalars = Operands.scalars
    Operands.scalars = lambda self, value: scalars(self, value + 1)  # type: ignore[method-assign]


def forget_moments() -> None:
    """Begin each step without the second moments."""
    find_slot = OptimizerBlocks._slot

    def slot(self: OptimizerBlocks, name: str) -> Tensor:
        found = find_slot(self, name)
        return found.zero_() if name == "exp_avg_sq" else found

    OptimizerBlocks._slot = slot  # type: ignore[method-assign]


def couple_decay() -> None:
    """Add the weight decay to the gradient, as Adam does."""
    split = optimizer._split_betas
    optimizer._split_betas = lambda options: {**split(options), "decoupled_weight_decay": False}


def truncate() -> None:
    """Round quantised values towards zero."""
    Tensor.round_ = Tensor.trunc_  # type: ignore[method-assign, assignment]


def scale_in_half() -> None:
    """Round the values of quantised deltas and gradients to bfloat16."""
    dequantise = encodings.dequantise
    encodings.dequantise = lambda integers, scales: dequantise(integers, scales).bfloat16().float()


if __name__ == "__main__":
    globals()[os.environ["GOLDEN_SABOTAGE"]]()
    runpy.run_module(os.environ["GOLDEN_PROGRAM"], run_name="__main__", alter_sys=True)
