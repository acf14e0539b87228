"""The slicing of parameters into blocks, and the placement of blocks on pservers: pure functions."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from .vocabulary import Placement, PserverIndex

SizedName = tuple[str, int]  # a block's name and its size in bytes


def place_round_robin(blocks: Sequence[SizedName], num_pservers: int) -> list[PserverIndex]:
    """Deal all blocks of all parameters in turn.

    >>> place_round_robin([("w.block0", 8), ("w.block1", 8), ("b.block0", 4)], 2)
    [0, 1, 0]
    """
    return [i % num_pservers for i in range(len(blocks))]


def place_hash(blocks: Sequence[SizedName], num_pservers: int) -> list[PserverIndex]:
    """Place by SHA-256 of the block's name modulo M, which is the same in all processes, unlike Python's `hash()`."""
    digests = (hashlib.sha256(name.encode()).digest() for name, _ in blocks)
    return [int.from_bytes(digest[:8], "big") % num_pservers for digest in digests]


def place_balanced(blocks: Sequence[SizedName], num_pservers: int) -> list[PserverIndex]:
    """Place the largest block first, on the least loaded pserver (Graham's LPT rule).

    Blocks of equal size keep their order. Of equally loaded pservers, the one with the lowest index is chosen.

    >>> place_balanced([("a.block0", 4), ("b.block0", 16), ("c.block0", 8)], 2)
    [1, 0, 1]
    """
    loads = [(0, index) for index in range(num_pservers)]
    owners = [0] * len(blocks)
    for i in sorted(range(len(blocks)), key=lambda i: -blocks[i][1]):
        load, owner = heapq.heappop(loads)
        owners[i] = owner
        heapq.heappush(loads, (load + blocks[i][1], owner))
    return owners


PLACE: Mapping[Placement, Callable[[Sequence[SizedName], int], list[PserverIndex]]] = {
    "balanced": place_balanced,
    "round_robin": place_round_robin,
    "hash": place_hash,
}


DEFAULT_MIN_BLOCK_SIZE = 8192  # elements


def slice_parameter(
    num_elements: int, num_pservers: int, *, min_block_size: int = DEFAULT_MIN_BLOCK_SIZE, whole: bool = False
) -> list[tuple[int, int]]:
    """Cut `num_elements` into contiguous half-open ranges that differ by one element at most, larger ones first.

    There are `min(ceil(num_elements / min_block_size), num_pservers)` of them; one if `whole`; none for an
    empty parameter. For example, shape (10, 1000) on three pservers:

    >>> slice_parameter(10 * 1000, 3)
    [(0, 5000), (5000, 10000)]
    >>> slice_parameter(10, 3, min_block_size=1)
    [(0, 4), (4, 7), (7, 10)]
    """
    if num_elements == 0:
        return []
    max_blocks = -(-num_elements // min_block_size)
    num_blocks = 1 if whole else min(max_blocks, num_pservers)
    size, num_larger = divmod(num_elements, num_blocks)
    begins = [i * size + min(i, num_larger) for i in range(num_blocks + 1)]
    return list(pairwise(begins))
