"""The rule by which a parameter is cut into blocks."""

from __future__ import annotations

from itertools import pairwise

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
    if num_elements < 0 or num_pservers < 1 or min_block_size < 1:
        raise ValueError(
            "expected num_elements >= 0, num_pservers >= 1 and min_block_size >= 1, "
            f"got {num_elements}, {num_pservers} and {min_block_size}"
        )
    if num_elements == 0:
        return []
    max_blocks = -(-num_elements // min_block_size)
    num_blocks = 1 if whole else min(max_blocks, num_pservers)
    size, num_larger = divmod(num_elements, num_blocks)
    begins = [i * size + min(i, num_larger) for i in range(num_blocks + 1)]
    return list(pairwise(begins))
