"""Whoever waits for a parameter goes on when its last block has landed, or when no more will."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.plan import make_plan
from ps_protocol.vocabulary import ParameterSpec
from trainer_client.pulling.arrivals import Arrivals

PLAN = make_plan(
    [ParameterSpec("w", (30,)), ParameterSpec("none", (0,)), ParameterSpec("b", (7,))], 3, min_block_size=10
)


@given(st.permutations([block.name for block in PLAN.blocks] * 2), st.integers(0, 2 * len(PLAN.blocks)))
def test_a_parameter_is_there_when_all_its_blocks_are(order: list[str], num_landed: int) -> None:
    arrivals = Arrivals(PLAN.blocks_of)
    for block in order[:num_landed]:
        arrivals.landed(block)
    arrivals.end()
    for name, blocks in PLAN.blocks_of.items():
        assert arrivals.wait(name) == ({block.name for block in blocks} <= set(order[:num_landed]))


@pytest.mark.parametrize("is_there", [True, False])
def test_who_waits_is_woken(is_there: bool) -> None:
    arrivals = Arrivals(PLAN.blocks_of)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(arrivals.wait, "b")
        if is_there:
            arrivals.landed("b.block0")
        else:
            arrivals.end()
        assert waiting.result(timeout=10) == is_there
