"""Gradients as they are sent: one-dimensional, from where they lie if that is possible."""

from __future__ import annotations

import torch
from torch import Tensor

from ps_protocol.errors import BadModel


class Flattening:
    """Of one model's gradients. Those that do not lie in order (`channels_last`) are copied to memory that is kept."""

    def __init__(self) -> None:
        self._memory: dict[str, Tensor] = {}

    def flat(self, name: str, gradient: Tensor) -> Tensor:
        """All elements in order: shares the gradient's memory, or what the last one of this name was copied to.

        So it counts for as long as the gradient does. Raises BadModel if that is sparse.
        """
        if gradient.is_sparse:
            raise BadModel(f"the gradient of {name!r} is sparse; only dense gradients can be pushed")
        gradient = gradient.detach()
        if gradient.is_contiguous():
            return gradient.view(-1)
        memory = self._memory.get(name)
        if memory is None or _kind(memory) != _kind(gradient):
            memory = self._memory[name] = torch.empty(gradient.shape, dtype=gradient.dtype, device=gradient.device)
        memory.copy_(gradient)
        return memory.view(-1)


def _kind(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device
