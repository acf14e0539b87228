from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.placement import PLACE, SizedName, place_balanced, place_hash, place_round_robin
from ps_protocol.vocabulary import PLACEMENTS, Placement

from .strategies import all_num_pservers, few, names

sized_names = st.lists(st.tuples(names, st.integers(1, 1 << 40)), max_size=20)
few_sized_names = st.lists(st.tuples(names, st.integers(1, 12)), min_size=1, max_size=7)


def loads(blocks: Sequence[SizedName], owners: Sequence[int], num_pservers: int) -> list[int]:
    return [
        sum(size for (_, size), owner in zip(blocks, owners, strict=True) if owner == i) for i in range(num_pservers)
    ]


def test_every_placement_has_a_function() -> None:
    assert set(PLACE) == set(PLACEMENTS)


@pytest.mark.parametrize("placement", PLACEMENTS)
@few
@given(blocks=sized_names, num_pservers=all_num_pservers)
def test_every_block_has_an_owner_that_exists(placement: Placement, blocks: list[SizedName], num_pservers: int) -> None:
    owners = PLACE[placement](blocks, num_pservers)
    assert len(owners) == len(blocks)
    assert all(0 <= owner < num_pservers for owner in owners)


@few
@given(sized_names, all_num_pservers)
def test_round_robin_goes_round(blocks: list[SizedName], num_pservers: int) -> None:
    expected = itertools.islice(itertools.cycle(range(num_pservers)), len(blocks))
    assert place_round_robin(blocks, num_pservers) == list(expected)


@few
@given(sized_names, all_num_pservers)
def test_hash_looks_at_the_name_alone(blocks: list[SizedName], num_pservers: int) -> None:
    alone = [place_hash([(name, 1)], num_pservers)[0] for name, _ in blocks]
    assert place_hash(blocks, num_pservers) == alone


def test_hash_is_the_same_on_every_machine() -> None:
    """From `printf %s NAME | sha256sum`: the first 16 hexadecimal digits modulo 7."""
    by_hand = {
        "w1.block0": 0x9E80B0B2FA71E537,
        "weiß.block1": 0x281080D3240BE4A5,
    }
    assert place_hash([(name, 1) for name in by_hand], 7) == [digits % 7 for digits in by_hand.values()]


@few
@given(sized_names, all_num_pservers)
def test_balanced_keeps_grahams_bound(blocks: list[SizedName], num_pservers: int) -> None:
    """The fullest pserver had the least when it got its last block, so it is at most that block above the mean."""
    held = loads(blocks, place_balanced(blocks, num_pservers), num_pservers)
    sizes = [size for _, size in blocks]
    largest = max(sizes, default=0)
    assert num_pservers * max(held) <= sum(sizes) + (num_pservers - 1) * largest


@few
@given(few_sized_names, st.integers(1, 3))
def test_balanced_is_within_a_third_of_the_best(blocks: list[SizedName], num_pservers: int) -> None:
    best = min(
        max(loads(blocks, owners, num_pservers))
        for owners in itertools.product(range(num_pservers), repeat=len(blocks))
    )
    held = loads(blocks, place_balanced(blocks, num_pservers), num_pservers)
    assert 3 * num_pservers * max(held) <= (4 * num_pservers - 1) * best  # (4/3 - 1/(3 M)) * best


@few
@given(st.integers(1, 50), all_num_pservers, st.integers(1, 1000))
def test_balanced_gives_equal_blocks_round(num_blocks: int, num_pservers: int, size: int) -> None:
    blocks = [(f"w.block{i}", size) for i in range(num_blocks)]
    assert place_balanced(blocks, num_pservers) == place_round_robin(blocks, num_pservers)
