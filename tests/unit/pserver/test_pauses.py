"""Contributions that are logged, and what waits for a moment between them: neither keeps the other waiting for ever."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ps_protocol.errors import TryAgain
from services.pserver.pauses import Pauses

from .support import Bench
from .test_async_durability import before_appends, life, steps
from .test_async_run import until

NUM_TRAINERS = 2  # of `life`
TURNS = 40  # of the event loop: more than any request needs


class SlowLog:
    """Writes an update when it is told to."""

    def __init__(self) -> None:
        self.num_begun = 0
        self._go = threading.Semaphore(0)

    async def write_one(self, pauses: Pauses) -> None:
        """Let the contribution whose pause is under way get to the disk, and wait until its pause is over."""
        assert pauses._task is not None
        self._go.release()
        async with asyncio.timeout(30):
            await asyncio.wait({pauses._task})
        await turns()

    def open_up(self) -> None:
        self._go.release(1000)

    @contextmanager
    def of(self, pserver: Bench) -> Iterator[SlowLog]:
        def wait() -> None:
            self.num_begun += 1
            self._go.acquire()

        before_appends(pserver, wait)
        try:
            yield self
        finally:
            self.open_up()


async def turns(count: int = TURNS) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def train(pserver: Bench, rank: int, steps: int) -> None:
    """Always the next push, as soon as the one before is acknowledged."""
    for step in range(1, steps + 1):
        await pserver.push(rank, step)
        await pserver.get(rank, step)


@pytest.mark.parametrize("what", ["freeze", "model", "checkpoint", "stop"])
async def test_what_waits_for_a_pause_waits_for_that_one_only(tmp_path: Path, what: str) -> None:
    async with life(tmp_path) as pserver:
        for rank in range(NUM_TRAINERS):
            await pserver.get(rank, 0)
        with SlowLog().of(pserver) as log:
            trainers = [asyncio.create_task(train(pserver, rank, 6)) for rank in range(NUM_TRAINERS)]
            await until(lambda: log.num_begun)
            asked = asyncio.create_task(
                {
                    "freeze": lambda: pserver.freeze(2),
                    "model": lambda: pserver.run.read_after_round(None, dict, 0),
                    "checkpoint": lambda: pserver.run.want_checkpoint(1),
                    "stop": lambda: pserver.pserver.stop(),
                }[what]()
            )
            await turns()
            assert log.num_begun == 1
            assert not asked.done()
            await log.write_one(pserver.run._pauses)
            async with asyncio.timeout(10):
                await asked
            assert pserver.run.clocks.num_committed == 1
        for trainer in trainers:
            with suppress(TryAgain):  # after the stop
                await trainer


@settings(max_examples=25, deadline=None)
@given(script=st.lists(st.sampled_from(["write", "freeze", "model", "members", "cancel"]), max_size=40))
async def test_in_any_order_everything_has_its_turn(script: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        await play(Path(folder), script)


async def play(folder: Path, script: list[str]) -> None:
    async with life(folder, checkpoint_rounds=5) as pserver:
        run, pauses = pserver.run, pserver.run._pauses
        for rank in range(NUM_TRAINERS):
            await pserver.get(rank, 0)
        begun: list[str] = []
        begin = pauses.begin_pause

        def watched(work: Any) -> Any:
            name = work.__name__
            assert pauses._task is None or name == "_drain_and_snapshot", "two at once"
            if name == "_log_and_commit":
                waiting = [task for task in moments if not task.done()]
                assert not waiting or begun[-1:] == ["drain_and_read"], "a contribution overtook a freeze"
            elif begun[-1:] == [name] == ["drain_and_read"]:
                assert not run._held.has_ready(), "contributions are held back for ever"
            begun.append(name)
            return begin(work)

        pauses.begin_pause = watched
        moments: list[asyncio.Task[Any]] = []
        looks: list[asyncio.Task[Any]] = []
        with SlowLog().of(pserver) as log:
            trainers = [asyncio.create_task(train(pserver, rank, 12)) for rank in range(NUM_TRAINERS)]
            await turns()
            number = 1
            for action in script:
                if action == "write" and pauses._task is not None and begun[-1] == "_log_and_commit":
                    await log.write_one(pauses)
                elif action == "freeze":
                    number += 1
                    moments.append(asyncio.create_task(pserver.freeze(number)))
                elif action == "members":
                    number += 1
                    moments.append(asyncio.create_task(pserver.change_members(number, dict(run.members))))
                elif action == "model":
                    looks.append(asyncio.create_task(run.read_after_round(None, dict, 0)))
                elif action == "cancel" and looks:
                    looks.pop().cancel()
                await turns()
            log.open_up()
            async with asyncio.timeout(20):
                await asyncio.gather(*trainers, *moments, *looks)
        assert run.clocks.num_committed == NUM_TRAINERS * 12


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


@settings(max_examples=30, deadline=None)
@given(script=st.lists(st.one_of(PUSHES, st.just(("write",))), max_size=12))
@example(script=[("push", 0, 0, "whole"), ("push", 0, 1, "whole"), ("write",)])
async def test_each_step_is_logged_once_and_whole_after_a_restart(script: list[tuple]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        await play_after_a_restart(Path(folder), script)


async def play_after_a_restart(folder: Path, script: list[tuple]) -> None:
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
