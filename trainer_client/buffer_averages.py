"""Averages of a model's float buffers, such as the statistics of batch norm, over all trainers.

They are parameters of the plan with the update rule MEAN: each step pushes their values instead of gradients. Pulls,
exports and checkpoints have the mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ps_protocol.errors import BadModel
from ps_protocol.vocabulary import PARAMETER_DTYPES, ParameterSpec

from .device_copies import is_away
from .model_tensors import stored_tensors
from .tensors import WIRE_DTYPES, wire_dtype


class BufferAverages:
    """The float buffers of a model's `state_dict()`, and their newest pulled means. Without a model there are none."""

    def __init__(self, model: nn.Module | None, trained: dict[str, Tensor]) -> None:
        """`trained` are the optimizer's parameters by name."""
        modules = () if model is None else model.modules()
        owners = {id(buffer): (module, key) for module in modules for key, buffer in module._buffers.items()}
        found = {
            name: tensor
            for name, tensor in stored_tensors(model, trained).items()
            if id(tensor) in owners and WIRE_DTYPES.get(tensor.dtype) in PARAMETER_DTYPES
        }
        self.owners = {name: owners[id(tensor)] for name, tensor in found.items()}
        self.means: Mapping[str, Tensor] = {  # host memory that pulls are written to
            name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
            for name, tensor in found.items()
        }

    def specs(self, group: int) -> list[ParameterSpec]:
        """Return the buffers as parameters of this group."""
        return [ParameterSpec(n, tuple(mean.shape), wire_dtype(n, mean), group) for n, mean in self.means.items()]

    def _buffers(self) -> list[Tensor]:
        """Return the buffers as they are now: a module may replace one by another tensor. Raises BadModel."""
        buffers = []
        for (name, mean), (module, key) in zip(self.means.items(), self.owners.values(), strict=True):
            buffer = module._buffers.get(key)
            if buffer is None or (buffer.shape, buffer.dtype) != (mean.shape, mean.dtype):
                raise BadModel(
                    f"buffer {name!r} has become another one; all trainers agreed on it when the run began",
                    expected=f"{mean.dtype} {list(mean.shape)}",
                    actual=None if buffer is None else f"{buffer.dtype} {list(buffer.shape)}",
                )
            buffers.append(buffer)
        return buffers

    def changed_values(self) -> dict[str, Tensor]:
        """Return flat host copies of the buffers that are no longer their mean, by name. Raises BadModel.

        One with NaN or infinity is left out: it would spoil the mean for all trainers.
        """
        copies = dict(zip(self.means, _copy_flat(self._buffers(), torch.device("cpu")), strict=True))
        are_finite = bool(torch.cat(list(copies.values())).isfinite().all()) if copies else True
        return {
            name: copy
            for name, copy in copies.items()
            if not torch.equal(copy, self.means[name].view(-1)) and (are_finite or bool(copy.isfinite().all()))
        }

    def write_back(self) -> None:
        """Copy the means to the buffers. Autograd does not notice, so a graph of an earlier pass stays valid."""
        if not self.means:
            return
        buffers, means = [buffer.data for buffer in self._buffers()], list(self.means.values())
        if is_away(buffers[0]):
            copies = _copy_flat(means, buffers[0].device)
            means = [copy.view(mean.shape) for copy, mean in zip(copies, means, strict=True)]
        torch._foreach_copy_(buffers, means)


def _copy_flat(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return flat copies on a device. Tensors of one dtype and device take a single transfer."""
    if not tensors:
        return []
    flat = torch.cat([tensor.detach().reshape(-1).to(tensors[0].device) for tensor in tensors]).to(device)
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [part.to(tensor.dtype) for part, tensor in zip(parts, tensors, strict=True)]
