"""Quantisation to eight bits an element and one float32 scale for each group, as both ends of the wire compute it.

Trainers and pservers that add the same delta to the same values must hold the same bits afterwards. So a product is
rounded before it is added; a fused multiply-add, which not every machine has, would round once.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .wire_types import GROUP

PIECE = 1 << 18  # elements that are processed together, so that they stay in the cache; a multiple of GROUP
INTEGERS = 127  # on each side of 0


def pieces(num_elements: int) -> Iterator[tuple[slice, slice]]:
    """Yield ranges of elements, each with the range of their scales.

    >>> [(elements.stop, scales.stop) for elements, scales in pieces(PIECE + 1)]
    [(262144, 1024), (262145, 1025)]
    """
    for begin in range(0, num_elements, PIECE):
        end = min(begin + PIECE, num_elements)
        yield slice(begin, end), slice(begin // GROUP, -(-end // GROUP))


def quantise(values: Tensor, integers: Tensor, scales: Tensor) -> None:
    """Quantise flat float32 values into integers and scales, and leave the quantisation error in `values`.

    The scale of a group with a value that is not finite is not finite either. A group whose largest element is below
    about 4e-37, which no scale can express, becomes 0.
    """
    whole = len(values) // GROUP * GROUP
    if whole:
        groups = values[:whole].view(-1, GROUP), integers[:whole].view(-1, GROUP)
        _quantise_groups(*groups, scales[: whole // GROUP])
    if whole < len(values):
        _quantise_groups(values[whole:][None], integers[whole:][None], scales[-1:])


def _quantise_groups(values: Tensor, integers: Tensor, scales: Tensor) -> None:
    low, high = torch.aminmax(values, dim=1)
    torch.maximum(high, low.neg_(), out=high)
    scales.copy_(high.div_(INTEGERS))
    inverse = scales.reciprocal()
    is_too_small = inverse.isinf()
    scales.masked_fill_(is_too_small, 0.0)
    inverse.masked_fill_(is_too_small, 0.0)
    rounded = (values * inverse[:, None]).round_()
    integers.copy_(rounded)
    values.sub_(rounded.mul_(scales[:, None]))


def dequantise(integers: Tensor, scales: Tensor) -> Tensor:
    """Return the float32 products; the first element begins a group."""
    values = integers.float()
    whole = len(values) // GROUP * GROUP
    values[:whole].view(-1, GROUP).mul_(scales[: whole // GROUP, None])
    if whole < len(values):
        values[whole:].mul_(scales[-1])
    return values


def add_delta(values: Tensor, integers: Tensor, scales: Tensor) -> None:
    """Add a quantised delta to flat float32 values, with the same bits on every machine."""
    for elements, groups in pieces(len(values)):
        values[elements].add_(dequantise(integers[elements], scales[groups]))
