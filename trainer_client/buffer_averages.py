"""Buffers that become their mean over all trainers now and then: the statistics of batch norm, as a rule.

In between each trainer's own forward passes change them. They travel as parameters do that the optimizer does not step:
pushed are values, in every so many rounds, and the mean of a round's is what there is then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ps_protocol.errors import BadModel
from ps_protocol.vocabulary import PARAMETER_DTYPES, Round

from .tensors import WIRE_DTYPES


class BufferAverages:
    """Of one trainer. Nothing here blocks."""

    def __init__(self, buffers: Mapping[str, Tensor], interval: int) -> None:
        """`buffers` are those of the model, by name; `interval` is in rounds."""
        self._buffers = buffers
        self._interval = interval
        self._landed: Round = 0
        # What is pulled in any round lands here, and not in what a forward pass has just changed.
        self.means = {name: buffer.detach().clone() for name, buffer in buffers.items()}

    def is_due(self, round_: Round) -> bool:
        """Whether this round averages them."""
        return round_ % self._interval == 0

    def values_for(self, round_: Round) -> dict[str, Tensor]:
        """What is pushed in this round, by name: flat copies, or nothing."""
        if not self.is_due(round_):
            return {}
        return {name: buffer.detach().reshape(-1).clone() for name, buffer in self._buffers.items()}

    def begin(self, version: Round) -> None:
        """The run begins, or goes on, with the means as they are now."""
        self._landed = version
        self._take()

    def landed(self, version: Round, was_skipped: Callable[[Round], bool]) -> None:
        """This version is in the means; a round that was skipped has made none."""
        newest_due = version // self._interval * self._interval
        if newest_due > self._landed and not was_skipped(newest_due):
            self._take()
        self._landed = version

    def _take(self) -> None:
        with torch.no_grad():
            for name, buffer in self._buffers.items():
                buffer.copy_(self.means[name])


def choose_averaged(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of a model's other tensors that can be averaged: its float buffers, and no parameter. Raises BadModel."""
    chosen = {
        name: tensor
        for name, tensor in stored.items()
        if not isinstance(tensor, torch.nn.Parameter) and WIRE_DTYPES.get(tensor.dtype) in PARAMETER_DTYPES
    }
    if not chosen:
        raise BadModel("average_buffers: RemoteOptimizer(…, model=model) has no model, or that has no float buffers")
    return chosen
