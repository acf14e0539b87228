"""A pserver that has come back takes each step once, whole, and as it is in the log, whatever trainers send at once."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from .support import Bench
from .test_async_durability import life, steps
from .test_pauses import SlowLog, turns

RULES = {"max_delay": 4}
PUSHES = st.tuples(st.just("push"), st.integers(0, 1), st.integers(0, 2), st.sampled_from(["first", "last", "whole"]))


async def push(pserver: Bench, rank: int, step: int, part: str) -> None:
    """Push half of a step, or all of it."""
    blocks = pserver.contribution(rank, step)
    first = dict(list(blocks.items())[:2])
    if part == "first":
        await pserver.push(rank, step, first, last=False)
    elif part == "whole":
        await pserver.push(rank, step, blocks, computed_on=2)
    else:
        await push(pserver, rank, step, "first")
        await push(pserver, rank, step, "whole")


@pytest.mark.asyncio
@settings(max_examples=30, deadline=None)
@given(script=st.lists(st.one_of(PUSHES, st.just(("write",))), max_size=12))
@example(script=[("push", 0, 0, "whole"), ("push", 0, 1, "whole"), ("write",)])
async def test_the_log_has_what_was_taken(script: list[tuple]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        await play(Path(folder), script)


async def play(folder: Path, script: list[tuple]) -> None:
    async with life(folder, rules=RULES) as pserver:
        await steps(pserver, 1, 2)
    async with life(folder, 2, rules=RULES) as pserver:
        clocks = pserver.run.clocks
        for rank in (0, 1):
            await pserver.get(rank, 2)
        with SlowLog().of(pserver) as log:
            pushes = []
            for action, *arguments in script:
                if action == "push":
                    rank, ahead, part = arguments
                    pushes.append(asyncio.create_task(push(pserver, rank, clocks.open_steps[rank] + ahead, part)))
                elif pserver.run._pauses._task is not None:
                    await log.write_one(pserver.run._pauses)
                await turns()
            log.open_up()
            results = await asyncio.gather(*pushes, return_exceptions=True)
            refused = [result for result in results if result is not None]
            assert all(getattr(error, "code", None) in ("future_round", "delay_exceeded") for error in refused), refused
        await pserver.run.wait_for_writes()
        await pserver.run._drain()
        assert clocks.applied == clocks.num_committed
        taken, digest = clocks.num_committed, pserver.run.shard.digest()
    async with life(folder, 3, rules=RULES) as pserver:
        assert (pserver.run.clocks.num_committed, pserver.run.shard.digest()) == (taken, digest)
