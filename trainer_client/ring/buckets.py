"""Flat float32 memory in which gradients travel round the ring, cut once and kept."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

BYTES = 4  # of an element, float32
PIECE = 1 << 20  # elements that are squared at once


class FlatBucket:
    """Several parameters' gradients, one behind the other, last layers first."""

    def __init__(self, sizes: Mapping[str, int], device: torch.device) -> None:
        """`sizes`: elements of each parameter."""
        self.flat = torch.zeros(sum(sizes.values()), device=device)  # (sum of sizes,) float32
        self.parts = dict(
            zip(sizes, torch.split(self.flat, list(sizes.values())), strict=True)
        )  # name -> (size,) float32
        self.filled: set[str] = set()  # those of whom it has the next gradient

    def put(self, name: str, gradient: Tensor) -> None:
        """Copy a flat gradient of any dtype into it."""
        self.parts[name].copy_(gradient)
        self.filled.add(name)

    def complete(self, gradients: Mapping[str, Tensor]) -> None:
        """Copy what is not in it yet; zeros for parameters without a gradient."""
        for name, part in self.parts.items():
            if name in self.filled:
                continue
            if name in gradients:
                part.copy_(gradients[name])
            else:
                part.zero_()

    def sum_of_squares(self) -> Tensor:
        """Of all elements: a float64 scalar, on their device."""
        pieces = (piece.double() for piece in torch.split(self.flat, PIECE))
        return torch.stack([torch.dot(piece, piece) for piece in pieces]).sum()

    def begin(self) -> None:
        """The next gradients are to come."""
        self.filled.clear()


def cut_buckets(parameters: Mapping[str, Tensor], bucket_bytes: int, device: torch.device) -> list[FlatBucket]:
    """Buckets for all parameters, about `bucket_bytes` each, in the order in which backward makes gradients.

    A parameter is never cut: one that is larger has a bucket of its own.

    >>> shapes = {"a": torch.empty(10), "b": torch.empty(2, 5), "c": torch.empty(10)}
    >>> [list(bucket.parts) for bucket in cut_buckets(shapes, 80, torch.device("cpu"))]
    [['c', 'b'], ['a']]
    """
    groups: list[dict[str, int]] = [{}]
    for name, parameter in reversed(list(parameters.items())):
        if groups[-1] and BYTES * (sum(groups[-1].values()) + parameter.numel()) > bucket_bytes:
            groups.append({})
        groups[-1][name] = parameter.numel()
    return [FlatBucket(group, device) for group in groups if group]
