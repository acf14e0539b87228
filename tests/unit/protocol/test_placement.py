"""Slicing parameters into blocks, and placing blocks on pservers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.placement import PLACE, SizedName, place_balanced, place_hash, slice_parameter
from ps_protocol.vocabulary import PLACEMENTS, Placement, is_name, is_shape, is_size

from .strategies import all_min_block_sizes, all_num_pservers, few, names

# ---------------------------------------------------------------- vocabulary


@pytest.mark.parametrize(
    ("is_valid", "right", "wrong"),
    [
        (is_size, [0, 1, (1 << 63) - 1], [-1, 1 << 63, True, 1.0, "1", None]),
        (is_shape, [(), (1,) * 64], [(1,) * 65, (True,), [1]]),
        (is_name, ["w", "\n", "__metadata__.weight", "\U0001f40d", "\ue000"],
         ["", "__metadata__", "a\ud800", "\udfff", None, 1]),
    ],
)  # fmt: skip
def test_sizes_shapes_and_names_are_checked(is_valid: Any, right: list[Any], wrong: list[Any]) -> None:
    assert [is_valid(value) for value in right] == [True] * len(right)
    assert [is_valid(value) for value in wrong] == [False] * len(wrong)


# ---------------------------------------------------------------- slicing

all_num_elements = st.integers(0, 100_000) | st.integers(0, 1 << 62)


@given(all_num_elements, all_num_pservers, all_min_block_sizes)
def test_a_parameter_is_tiled_by_the_smallest_number_of_equal_blocks(
    num_elements: int, num_pservers: int, min_block_size: int
) -> None:
    blocks = slice_parameter(num_elements, num_pservers, min_block_size=min_block_size)
    position = 0
    for begin, end in blocks:
        assert begin == position < end
        position = end
    assert position == num_elements
    assert len(blocks) == min((num_elements + min_block_size - 1) // min_block_size, num_pservers)
    sizes = [end - begin for begin, end in blocks]
    assert sizes == sorted(sizes, reverse=True)
    assert not sizes or sizes[0] - sizes[-1] <= 1
    whole = slice_parameter(num_elements, num_pservers, min_block_size=min_block_size, whole=True)
    assert whole == ([(0, num_elements)] if num_elements else [])


# ---------------------------------------------------------------- placement

sized_names = st.lists(st.tuples(names, st.integers(1, 1 << 40)), max_size=20)
few_sized_names = st.lists(st.tuples(names, st.integers(1, 12)), min_size=1, max_size=7)


def loads(blocks: Sequence[SizedName], owners: Sequence[int], num_pservers: int) -> list[int]:
    return [
        sum(size for (_, size), owner in zip(blocks, owners, strict=True) if owner == i) for i in range(num_pservers)
    ]


@pytest.mark.parametrize("placement", PLACEMENTS)
@few
@given(blocks=sized_names, num_pservers=all_num_pservers)
def test_every_block_has_an_owner_that_exists(placement: Placement, blocks: list[SizedName], num_pservers: int) -> None:
    owners = PLACE[placement](blocks, num_pservers)
    assert len(owners) == len(blocks)
    assert all(0 <= owner < num_pservers for owner in owners)


def test_hash_is_the_same_on_every_machine() -> None:
    """From `printf %s NAME | sha256sum`: the first 16 hexadecimal digits modulo 7."""
    by_hand = {
        "w1.block0": 0x9E80B0B2FA71E537,
        "weiß.block1": 0x281080D3240BE4A5,
    }
    assert place_hash([(name, 1) for name in by_hand], 7) == [digits % 7 for digits in by_hand.values()]


@few
@given(few_sized_names, st.integers(1, 3))
def test_balanced_is_within_a_third_of_the_best(blocks: list[SizedName], num_pservers: int) -> None:
    best = min(
        max(loads(blocks, owners, num_pservers))
        for owners in itertools.product(range(num_pservers), repeat=len(blocks))
    )
    held = loads(blocks, place_balanced(blocks, num_pservers), num_pservers)
    assert 3 * num_pservers * max(held) <= (4 * num_pservers - 1) * best  # (4/3 - 1/(3 M)) * best
