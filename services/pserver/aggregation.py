"""Contributions to one gradient: a mean whose rounding depends on the ranks' order alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .layout import BlockPlace, ShardLayout

PIECE = 1 << 18  # elements: summed piece by piece, so that the sum stays in the cache until it is scaled


class Aggregator:
    """Owns the gradient, one flat float32 tensor of the layout, and a scratch piece. Reuses both every round."""

    def __init__(self, layout: ShardLayout) -> None:
        self._layout = layout
        self._gradient = torch.zeros(layout.num_elements)
        self._scratch = torch.empty(min(PIECE, layout.num_elements))

    def aggregate(self, contributions: Sequence[Mapping[str, Tensor]]) -> tuple[Tensor, tuple[str, ...]]:
        """Average contributions, which stand in rank order, and return the gradient and the blocks present in it.

        Each maps block names to tensors of shape (num_elements,) in the wire's dtype, which are only read and may
        lie at any address. They are summed in float32 in the given order, the first one copied (so that -0.0
        survives), and multiplied by 1/n once, n being the number of contributions: one that lacks a block counts
        zeros for it, as DDP does. A block that all of them lack is not present; what the gradient holds there is
        left over from an earlier round. The gradient is ours and holds until the next call.
        """
        present = []
        for name, place in self._layout.place.items():
            parts = [blocks[name] for blocks in contributions if name in blocks]
            if parts:
                self._average(place, parts, len(contributions))
                present.append(name)
        return self._gradient, tuple(present)

    def _average(self, place: BlockPlace, parts: list[Tensor], num_contributions: int) -> None:
        num_elements = place.block.num_elements
        for part in parts:
            if part.shape != (num_elements,):  # copy_ and add_ would broadcast it
                raise ValueError(f"block {place.name!r} has shape {tuple(part.shape)}, expected ({num_elements},)")
        total = self._gradient[place.begin : place.end]
        for begin in range(0, num_elements, PIECE):
            piece = total[begin : begin + PIECE]
            _sum([part[begin : begin + PIECE] for part in parts], piece, self._scratch[: len(piece)])
            if num_contributions > 1:
                piece.mul_(1 / num_contributions)


def _sum(parts: list[Tensor], total: Tensor, scratch: Tensor) -> None:
    if parts[0].dtype == torch.float32 and len(parts) > 1:
        torch.add(parts[0], parts[1], out=total)  # the same as copy and add, in one pass
        rest = parts[2:]
    else:
        total.copy_(parts[0])
        rest = parts[1:]
    for part in rest:
        # add_ itself would allocate a float32 copy of a bfloat16 or float16 operand
        total.add_(part if part.dtype == torch.float32 else scratch.copy_(part))
