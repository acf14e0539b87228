"""Torch tensors and the wire: dtype names, flat views, bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from ps_protocol.errors import BadModel

WIRE_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL",
}  # fmt: skip
TORCH_DTYPES = {name: dtype for dtype, name in WIRE_DTYPES.items()}


def wire_dtype(name: str, tensor: Tensor) -> str:
    """Return safetensors' name of a tensor's dtype. Raises BadModel if it has none."""
    try:
        return WIRE_DTYPES[tensor.dtype]
    except KeyError:
        raise BadModel(f"{name!r} is {tensor.dtype}, which the protocol does not carry") from None


def writable_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor as bytes; shares it and keeps it alive."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def has_wire_layout(tensor: Tensor) -> bool:
    """Return True if pulled bytes may be written to the tensor's memory: contiguous, in host memory."""
    return tensor.device.type == "cpu" and tensor.is_contiguous()


class Flattening:
    """Flat gradients of one model. Those that are not contiguous (`channels_last`) are copied to kept memory."""

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
