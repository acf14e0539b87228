"""What trainers have of a shard whose pulls are quantised differences: beside the values, and a little off them.

After each round a stepped block is published: the difference between its values and what trainers have is rounded to
eight bits, and added to the latter here as it is there. What the rounding lacks stays in the values, so that it is in
the next difference.

    values ──(values - published)──► integers, scales ──► published += integers * scales     here, and in every trainer

Error feedback: see `trainer_client/encoding.py`. Differences to a copy that the receiver has, too: Mishchenko et al.
2019, "Distributed Learning with Compressed Gradient Differences" (arXiv:1901.09269).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from ps_protocol.quantisation import add_delta, pieces, quantise
from ps_protocol.wire_types import WireTensor, quantised

from .layout import BlockPlace, ShardLayout
from .tensors import TORCH_DTYPES, view_bytes

BorrowedTensor = tuple[WireTensor, memoryview]


class Published:
    """Flat float32 of the shard's layout, and the newest differences: 1.3 shards. Only float32 parameters have any."""

    def __init__(self, layout: ShardLayout, exact: Tensor) -> None:
        """`exact` are the shard's values, only read."""
        self.values = torch.zeros_like(exact)
        self._exact = exact
        self._layout = layout
        self._specs = {
            p.name: quantised(p.name, p.block.num_elements) for p in layout.places if p.dtype == "F32" and not p.is_mean
        }
        self._differences = {
            name: [torch.empty(count, dtype=TORCH_DTYPES[dtype]) for _, dtype, (count,) in tensors]
            for name, tensors in self._specs.items()
        }
        self._newest: list[str] = []  # blocks whose difference leads from the round before to this one

    def set(self, name: str) -> None:
        """Publish a block as it is."""
        place = self._layout.place[name]
        self.values[place.begin : place.end] = self._exact[place.begin : place.end]

    def load(self, values: Tensor | None) -> None:
        """Go on with what trainers had, or with the values."""
        self.values.copy_(self._exact if values is None else values)
        self.discard_deltas()

    def discard_deltas(self) -> None:
        """Publish this round as it is, to all.

        That of an earlier life of the pserver has to be: a trainer that was being sent all of it, and not to the end,
        has something between two rounds, which it overwrites, but could add nothing to.
        """
        self._newest.clear()

    def follow(self, stepped: Collection[str], loaded: Collection[str] = ()) -> None:
        """Publish the blocks that a round has stepped as differences.

        Blocks whose difference is not finite, and those with `loaded` values, are published whole.
        """
        self.discard_deltas()
        for name in loaded:
            self.set(name)
        for name in stepped:
            if name in loaded:
                continue
            if name in self._differences and self._compute_delta(self._layout.place[name]):
                self._newest.append(name)
            else:
                self.set(name)

    def _compute_delta(self, place: BlockPlace) -> bool:
        """Whether there is one: not if it is infinite, or no number."""
        exact, published = self._exact[place.begin : place.end], self.values[place.begin : place.end]
        integers, scales = self._differences[place.name]
        for elements, groups in pieces(len(exact)):
            quantise(exact[elements] - published[elements], integers[elements], scales[groups])
        if not scales.isfinite().all():
            return False
        add_delta(published, integers, scales)
        return True

    def borrow_deltas(self) -> dict[str, Sequence[BorrowedTensor]]:
        """The newest by block: views that hold until the next round."""
        return {
            name: list(zip(self._specs[name], map(view_bytes, self._differences[name]), strict=True))
            for name in self._newest
        }
