from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.placement import DEFAULT_MIN_BLOCK_SIZE, slice_parameter

from .strategies import all_min_block_sizes, all_num_pservers

all_num_elements = st.integers(0, 100_000) | st.integers(0, 1 << 62)


@given(all_num_elements, all_num_pservers, all_min_block_sizes)
def test_blocks_tile_the_parameter(num_elements: int, num_pservers: int, min_block_size: int) -> None:
    blocks = slice_parameter(num_elements, num_pservers, min_block_size=min_block_size)
    position = 0
    for begin, end in blocks:
        assert begin == position < end
        position = end
    assert position == num_elements


@given(all_num_elements, all_num_pservers, all_min_block_sizes)
def test_their_number_is_the_seeds(num_elements: int, num_pservers: int, min_block_size: int) -> None:
    blocks = slice_parameter(num_elements, num_pservers, min_block_size=min_block_size)
    max_blocks = (num_elements + min_block_size - 1) // min_block_size
    assert len(blocks) == min(max_blocks, num_pservers)


@given(all_num_elements, all_num_pservers, all_min_block_sizes)
def test_sizes_differ_by_one_at_most_and_larger_ones_come_first(
    num_elements: int, num_pservers: int, min_block_size: int
) -> None:
    sizes = [end - begin for begin, end in slice_parameter(num_elements, num_pservers, min_block_size=min_block_size)]
    assert sizes == sorted(sizes, reverse=True)
    assert not sizes or sizes[0] - sizes[-1] <= 1


@given(st.integers(1, 1 << 62), all_num_pservers, all_min_block_sizes)
def test_whole_is_one_block(num_elements: int, num_pservers: int, min_block_size: int) -> None:
    blocks = slice_parameter(num_elements, num_pservers, min_block_size=min_block_size, whole=True)
    assert blocks == [(0, num_elements)]


@pytest.mark.parametrize("whole", [False, True])
def test_an_empty_parameter_has_no_blocks(whole: bool) -> None:
    assert slice_parameter(0, 3, whole=whole) == []


def test_the_seeds_example() -> None:
    """Shape (10, 1000) on three pservers: two blocks by size, three by pservers, so two."""
    assert DEFAULT_MIN_BLOCK_SIZE == 8192
    assert math.ceil(10 * 1000 / DEFAULT_MIN_BLOCK_SIZE) == 2
    assert slice_parameter(10 * 1000, 3) == [(0, 5000), (5000, 10_000)]
    assert slice_parameter(1 * 10, 3) == [(0, 10)]


@pytest.mark.parametrize(
    ("num_elements", "expected"),
    [(8192, [8192]), (8193, [4097, 4096]), (16384, [8192] * 2), (16385, [5462, 5462, 5461])],
)
def test_around_the_minimum(num_elements: int, expected: list[int]) -> None:
    assert [end - begin for begin, end in slice_parameter(num_elements, 3)] == expected


@pytest.mark.parametrize(("num_elements", "num_pservers", "min_block_size"), [(-1, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_nonsense_is_refused(num_elements: int, num_pservers: int, min_block_size: int) -> None:
    with pytest.raises(ValueError, match="expected num_elements >= 0"):
        slice_parameter(num_elements, num_pservers, min_block_size=min_block_size)
