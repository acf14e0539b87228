"""The values that trainers have of a shard whose pulls are quantised deltas: close to the shard's own values.

After each round a stepped block is published: the delta between its values and the published ones is rounded to eight
bits, and added to the published values here as it is in every trainer. The rounding error stays in the values, so that
the next delta contains it.

    values ──(values - published)──► integers, scales ──► published += integers * scales     here, and in every trainer

Error feedback: see `trainer_client/client/error_feedback.py`. Deltas to a copy that the receiver has, too: Mishchenko
et al. 2019, "Distributed Learning with Compressed Gradient Differences" (arXiv:1901.09269).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from ps_protocol.encodings import TORCH_DTYPES, add_delta, pieces, quantise
from ps_protocol.wire_types import WireTensor, quantised

from .bodies import view_bytes
from .layout import BlockPlace, ShardLayout

BorrowedTensor = tuple[WireTensor, memoryview]


class Published:
    """Flat float32 values of the shard's layout, and the newest deltas, which only float32 parameters have.

    Takes the memory of 1.3 shards.
    """

    def __init__(self, layout: ShardLayout, exact: Tensor) -> None:
        """`exact` are the shard's values, only read."""
        self.values = torch.zeros_like(exact)
        self._exact = exact
        self._layout = layout
        self._specs = {
            p.name: quantised(p.name, p.block.num_elements)
            for p in layout.places
            if p.dtype == "F32" and not p.buffer_rule
        }
        self._deltas = {
            name: [torch.empty(count, dtype=TORCH_DTYPES[dtype]) for _, dtype, (count,) in tensors]
            for name, tensors in self._specs.items()
        }
        self._newest: list[str] = []  # blocks with a delta from the round before to this one

    def publish_whole(self, name: str) -> None:
        """Publish a block's values as they are."""
        place = self._layout.place[name]
        self.values[place.begin : place.end] = self._exact[place.begin : place.end]

    def load(self, values: Tensor | None) -> None:
        """Resume with published values, or with the shard's."""
        self.values.copy_(self._exact if values is None else values)
        self.discard_deltas()

    def discard_deltas(self) -> None:
        """Publish this round whole, to all trainers.

        A restored round needs that: a trainer that had received a part of it has values between two rounds, which it
        can overwrite, but not add a delta to.
        """
        self._newest.clear()

    def publish_round(self, stepped: Collection[str], loaded: Collection[str] = ()) -> None:
        """Publish the blocks that a round has stepped, as deltas.

        Blocks whose delta is not finite, and blocks with `loaded` values, are published whole.
        """
        self.discard_deltas()
        for name in loaded:
            self.publish_whole(name)
        for name in stepped:
            if name in loaded:
                continue
            if name in self._deltas and self._publish_delta(self._layout.place[name]):
                self._newest.append(name)
            else:
                self.publish_whole(name)

    def _publish_delta(self, place: BlockPlace) -> bool:
        """Publish a block's delta if it is finite. Return whether it is."""
        exact, published = self._exact[place.begin : place.end], self.values[place.begin : place.end]
        integers, scales = self._deltas[place.name]
        for elements, groups in pieces(len(exact)):
            quantise(exact[elements] - published[elements], integers[elements], scales[groups])
        if not scales.isfinite().all():
            return False
        add_delta(published, integers, scales)
        return True

    def borrow_deltas(self) -> dict[str, Sequence[BorrowedTensor]]:
        """Return the newest deltas by block: views that are valid until the next round."""
        return {
            name: list(zip(self._specs[name], map(view_bytes, self._deltas[name]), strict=True))
            for name in self._newest
        }
