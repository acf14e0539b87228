"""`EqualGradients`: the search for trainers that push the same gradients, because they read the same data."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

import xxhash

from ps_protocol.vocabulary import Rank

from ...shard.tensors import StagedBlock
from .rounds import Apply

MAX_ROUNDS = 10
MAX_BYTES = 1 << 20  # of each contribution are compared


class EqualGradients:
    """The search. It ends after ten successive rounds with equal gradients, or after ten rounds without any."""

    def __init__(self) -> None:
        self._pairs: set[tuple[Rank, Rank]] = set()  # with equal gradients in each of the last `_num_equal` rounds
        self._num_equal = self._num_different = 0

    def find(self, apply: Apply[StagedBlock]) -> tuple[Rank, Rank] | None:
        """Compare the gradients of a round. Return two ranks, once, whose gradients were equal in ten of them."""
        if len(apply.ranks) < 2 or MAX_ROUNDS in (self._num_equal, self._num_different):
            return None
        found = {
            rank: _digest(contribution.blocks)
            for rank, contribution in zip(apply.ranks, apply.contributions, strict=True)
        }
        digests = {rank: digest for rank, digest in found.items() if digest is not None}
        if len(digests) < 2:
            return None
        pairs = {(one, other) for one, other in combinations(digests, 2) if digests[one] == digests[other]}
        self._pairs = pairs & self._pairs if self._num_equal else pairs
        self._num_equal = self._num_equal + 1 if self._pairs else 0
        self._num_different += not self._pairs
        return min(self._pairs) if self._num_equal == MAX_ROUNDS else None


def _digest(blocks: Mapping[str, StagedBlock]) -> bytes | None:
    """Return the digest of the first bytes of the blocks; None if all of them are zero."""
    digest, left, is_zero = xxhash.xxh3_128(), MAX_BYTES, True
    for name in sorted(blocks):
        for view in blocks[name].bytes():
            part = bytes(view[:left])
            digest.update(part)
            left -= len(part)
            is_zero = is_zero and part.count(0) == len(part)
        if not left:
            break
    return None if is_zero else digest.digest()
