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

from .model_tensors import stored_tensors
from .tensors import WIRE_DTYPES


class BufferAverages:
    """Of one trainer. Nothing here blocks."""

    def __init__(self, find: Callable[[], Mapping[str, Tensor]], interval: int) -> None:
        """`find` gives the model's buffers by name as they are now; `interval` is in rounds."""
        self._find = find
        self._interval = interval
        self._landed: Round = 0
        # What is pulled in any round lands here, and not in what a forward pass has just changed.
        self.means = {name: buffer.detach().clone() for name, buffer in find().items()}

    def _buffers(self) -> Mapping[str, Tensor]:
        """Modules may have new tensors by now. Raises BadModel if those are of another kind."""
        buffers = self._find()
        for name, mean in self.means.items():
            buffer = buffers.get(name)
            if buffer is None or (buffer.shape, buffer.dtype) != (mean.shape, mean.dtype):
                raise BadModel(
                    f"buffer {name!r} has become another one; all trainers agreed on it when the run began",
                    expected=f"{mean.dtype} {list(mean.shape)}",
                    actual=None if buffer is None else f"{buffer.dtype} {list(buffer.shape)}",
                )
        return buffers

    def is_due(self, round_: Round) -> bool:
        """Whether this round averages them."""
        return round_ % self._interval == 0

    def values_for(self, round_: Round) -> dict[str, Tensor]:
        """What is pushed in this round, by name: flat copies, or nothing.

        One that has become NaN or infinite counts as it was at first, or in the last round of this kind: it would spoil
        all others, and stay so. Raises BadModel.
        """
        if not self.is_due(round_):
            return {}
        buffers, values = self._buffers(), {}
        for name, mean in self.means.items():
            is_finite = bool(torch.isfinite(buffers[name]).all())
            values[name] = (buffers[name] if is_finite else mean).detach().reshape(-1).clone()
        return values

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
        buffers = self._buffers()
        with torch.no_grad():
            for name, mean in self.means.items():
                buffers[name].copy_(mean)


def choose_averaged(model: torch.nn.Module | None, trained: dict[str, Tensor]) -> dict[str, Tensor]:
    """What of a model can be averaged, besides what is trained: its float buffers. Raises BadModel."""
    chosen = {
        name: tensor
        for name, tensor in stored_tensors(model, trained).items()
        if not isinstance(tensor, torch.nn.Parameter) and WIRE_DTYPES.get(tensor.dtype) in PARAMETER_DTYPES
    }
    if not chosen:
        raise BadModel("average_buffers: RemoteOptimizer(…, model=model) has no model, or that has no float buffers")
    return chosen
