"""Transfer of the tensors of process 0 to the other processes of its host, packed into few large ones."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ps_protocol.errors import BadModel

from ..collectives import Collectives

PART_BYTES = 32 * 1024 * 1024
ALIGNMENT_BYTES = 16  # of a tensor in it, for any dtype


class Values:
    """Tensors of any dtype and device, whose shapes and dtypes stay, and a packed copy of them on `device`."""

    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        self._tensors = tensors
        self._forms = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        groups: list[list[str]] = [[]]
        size = 0
        for name, tensor in tensors.items():
            if groups[-1] and size + tensor.nbytes > PART_BYTES:
                groups.append([])
                size = 0
            groups[-1].append(name)
            size += _aligned(tensor.nbytes)
        self._parts: list[tuple[Tensor, dict[str, Tensor]]] = []  # bytes, and views of them by name
        for group in groups:
            flat = torch.zeros(sum(_aligned(tensors[name].nbytes) for name in group), dtype=torch.uint8, device=device)
            views, offset = {}, 0
            for name in group:
                shape, dtype = self._forms[name]
                views[name] = flat[offset : offset + tensors[name].nbytes].view(dtype).view(shape)
                offset += _aligned(tensors[name].nbytes)
            self._parts.append((flat, views))

    def check(self) -> None:
        """Raise BadModel if a tensor has another shape or dtype."""
        for name, tensor in self._tensors.items():
            if (tensor.shape, tensor.dtype) != self._forms[name]:
                shape, dtype = self._forms[name]
                raise BadModel(
                    f"parameter {name!r} has become another one; all agreed on it when the run began",
                    expected=f"{dtype} {list(shape)}",
                    actual=f"{tensor.dtype} {list(tensor.shape)}",
                )

    @torch.no_grad()
    def send(self, collectives: Collectives) -> None:
        """Begin to send the current tensors. Called by process 0."""
        for flat, views in self._parts:
            for name, view in views.items():
                view.copy_(self._tensors[name])
            collectives.broadcast(flat)

    def receive(self, collectives: Collectives) -> None:
        """Begin to receive the tensors; `write_back` follows the end. Called by the other processes."""
        for flat, _ in self._parts:
            collectives.broadcast(flat)

    @torch.no_grad()
    def write_back(self) -> None:
        """Copy the received values to the tensors."""
        for _, views in self._parts:
            for name, view in views.items():
                self._tensors[name].copy_(view)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
