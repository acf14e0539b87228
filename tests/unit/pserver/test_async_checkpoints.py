"""An asynchronous run on a disk: the content of checkpoints, restarts, and requests that need empty queues."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from ps_protocol.consistency import Consistency
from ps_protocol.errors import (
    BadModel,
    ContributionMissing,
    FutureRound,
    GradpostError,
    StaleRound,
    TrainerLost,
    TryAgain,
)
from ps_protocol.membership import Controls
from ps_protocol.requests import APPLIED_KEY, HISTORY_KEY
from services.pserver.run.queues import UpdateJobs
from services.pserver.shard.history import History

from ...raising import raises_code
from ...soaking import examples
from .oracle import make_options
from .support import Bench, bench, failing, until
from .test_async_run import busy

ADAM = [make_options("Adam", lr=0.01)]
NUM_TRAINERS = 2
TURNS = 40  # of the event loop: more than any request needs


@asynccontextmanager
async def life(folder: Path, number: int = 1, **settings: Any) -> AsyncIterator[Bench]:
    """One life of the pserver; it ends without a word."""
    consistency = Consistency(mode="async", **settings.pop("rules", {}))
    async with bench(
        NUM_TRAINERS, **{"optimizer": "Adam", "groups": ADAM, **settings}, state_dir=folder, incarnation=number,
        consistency=consistency, nonfinite="allow",
    ) as pserver:  # fmt: skip
        yield pserver
        await pserver.wait_until_published()


async def steps(pserver: Bench, first: int, last: int) -> None:
    """Both trainers take these steps, one after the other."""
    for step in range(first, last + 1):
        for rank in range(NUM_TRAINERS):
            await pserver.get(rank, step - 1)
            await pserver.push(rank, step)
            await pserver.get(rank, step)


async def turns() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


def count_steps(metadata: Mapping[str, str]) -> tuple[int, int]:
    """Return the contributions that a read of the whole shard names, and the steps in its history."""
    history = History.from_json(metadata[HISTORY_KEY])
    return int(metadata[APPLIED_KEY]), sum(step for _, step in history.steps.values())


@pytest.mark.parametrize("durability", ["log", "fsync", "replicated"])
async def test_a_log_is_refused(tmp_path: Path, durability: str) -> None:
    text = f"durability {durability} needs the synchronous mode: in mode async .* Omit durability {durability}, and set"
    with pytest.raises(BadModel, match=text):
        async with life(tmp_path, durability=durability):
            pass


async def test_a_restarted_pserver_begins_with_its_newest_checkpoint(tmp_path: Path) -> None:
    async with life(tmp_path, checkpoint_rounds=4) as pserver:
        await steps(pserver, 1, 3)
        await pserver.wait_until_published()
        restored = pserver.run.storage.restore(4)
    async with life(tmp_path, 2) as pserver:
        assert (pserver.run.round, pserver.run.schedule.open_steps) == (4, {0: 3, 1: 3})
        assert pserver.run.shard.digest() == restored.shard.digest()


async def test_trainers_go_on_with_their_own_steps(tmp_path: Path) -> None:
    async with life(tmp_path) as pserver:
        await pserver.run.want_checkpoint(4)
        await steps(pserver, 1, 3)
        await until(lambda: pserver.run.writer.published.round == 4)
        blocks = list(pserver.contribution(0, 4).items())
        await pserver.push(0, 4, dict(blocks[:2]), last=False)  # it is lost
        blocks = list(pserver.contribution(0, 3).items())
    async with life(tmp_path, 2) as pserver:
        assert pserver.run.round == 4
        with pytest.raises(ContributionMissing):  # the newest step is in the trainer's memory yet
            await pserver.get(0, 3)
        await pserver.push(0, 3, dict(blocks[2:]), last=False)
        assert (await pserver.push(0, 3))["complete"]
        await pserver.get(0, 3)
        with structlog.testing.capture_logs() as logs:
            await pserver.push(1, 4)
        await pserver.get(1, 4)
        assert pserver.run.schedule.clocks == {0: 3, 1: 4}  # step 3 of trainer 1 is lost
        assert [line["lost"] for line in logs if line["event"].endswith("acknowledged are lost")] == [1]
        with pytest.raises(FutureRound):  # from now on its steps come one after another
            await pserver.push(1, 6)
        assert pserver.run.round == 6


async def test_a_checkpoint_that_a_stopped_block_prevents_holds_up_no_other(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(UpdateJobs, "_step_all", failing(MemoryError("no memory")))
    async with life(tmp_path) as pserver:
        await pserver.get(0, 0)
        await pserver.run.want_checkpoint(1)
        await pserver.push(0, 1)  # which is answered once the checkpoint was given up
        with raises_code("apply_failed"):
            await pserver.get(0, 1)
        await pserver.run.want_checkpoint(2)


async def test_a_checkpoint_holds_the_first_contributions_and_nothing_else(tmp_path: Path) -> None:
    async with life(tmp_path) as pserver:
        await steps(pserver, 1, 1)
        await pserver.run.want_checkpoint(3)
        with busy(pserver) as release:
            third = asyncio.create_task(pserver.push(0, 2))  # a checkpoint is due, and it is not applied yet
            later = asyncio.create_task(pserver.push(1, 2))
            await asyncio.sleep(0.05)
            assert pserver.run.schedule.num_committed == 3
            release.set()
        await asyncio.gather(third, later)
        await pserver.get(1, 2)
        await until(lambda: pserver.run.writer.published.round == 3)
        restored = pserver.run.storage.restore(3)
        assert restored.history.steps == {0: (1, 2), 1: (1, 1)}
    async with life(tmp_path / "other") as other:
        await steps(other, 1, 1)
        await other.push(0, 2)
        await other.get(0, 2)
        assert restored.shard.digest() == other.run.shard.digest()


async def test_a_checkpoint_of_a_number_that_is_over_is_refused(tmp_path: Path) -> None:
    async with life(tmp_path) as pserver:
        await steps(pserver, 1, 1)
        with busy(pserver) as release:
            await pserver.push(0, 2)
            asked = [asyncio.create_task(pserver.run.want_checkpoint(3)) for _ in range(2)]
            await turns()
            later = asyncio.create_task(pserver.push(1, 2))
            await turns()
            assert pserver.run.schedule.num_committed == 3  # nothing is committed before the checkpoint
            release.set()
        outcomes = await asyncio.gather(*asked, return_exceptions=True)
        assert outcomes[0] is None
        assert outcomes[1] is None or isinstance(outcomes[1], TryAgain)
        await later
        await pserver.wait_until_published()
        with pytest.raises(StaleRound):
            await pserver.run.want_checkpoint(3)


@pytest.mark.parametrize("failure", [None, TrainerLost("trainer 1 was lost")])
async def test_a_pserver_that_stops_applies_its_committed_contributions(
    tmp_path: Path, failure: GradpostError | None
) -> None:
    async with life(tmp_path) as pserver:
        await steps(pserver, 1, 1)
        with busy(pserver) as release:
            await pserver.push(0, 2)
            if failure is not None:
                await pserver.change_members(2, {}, failure=failure.to_problem())
            stopping = asyncio.create_task(pserver.pserver.stop())
            await asyncio.sleep(0.05)
            refused = asyncio.create_task(pserver.push(1, 2))
            await asyncio.sleep(0.05)
            release.set()
        await stopping
        with pytest.raises(TryAgain if failure is None else TrainerLost):
            await refused
    async with life(tmp_path, 2) as pserver:
        assert pserver.run.schedule.open_steps == {0: 3, 1: 2}


async def test_once_the_run_is_over_every_pserver_writes_the_same_number(tmp_path: Path) -> None:
    async with life(tmp_path) as pserver:
        await steps(pserver, 1, 2)
        await pserver.run.want_checkpoint(9, is_over=True)
        await until(lambda: pserver.run.writer.published.round == 9)
    async with life(tmp_path, 2) as pserver:
        assert pserver.run.round == 9
        await steps(pserver, 3, 3)
        assert pserver.run.round == 11


async def test_a_push_of_a_paused_run_keeps_no_administrator_waiting(tmp_path: Path) -> None:
    async with life(tmp_path) as pserver:
        await steps(pserver, 1, 1)
        members = dict(pserver.run.schedule.members)
        await pserver.change_members(2, members, controls=(Controls(since=1, is_paused=True),))
        push = asyncio.create_task(pserver.push(0, 2))
        await turns()
        assert await pserver.run.read_after_round(None, count_steps, 0) == (2, 2)
        await pserver.run.want_checkpoint(2)
        assert not push.done()
        await pserver.change_members(3, members)
        assert (await push)["complete"]


async def test_a_client_that_goes_away_leaves_its_whole_contribution(tmp_path: Path) -> None:
    async with life(tmp_path, rules={"max_queued": 1}) as pserver:
        await steps(pserver, 1, 1)
        with busy(pserver):
            await pserver.push(0, 2)
            push = asyncio.create_task(pserver.push(1, 2))
            await until(lambda: pserver.metric("gradpost_held_pushes") == 1)
            push.cancel()
        await until(lambda: pserver.run.round == 4)
        assert (await pserver.push(1, 2))["status"] == "already_applied"


ACTIONS = ["work", "work", "freeze", "members", "model", "cancel", "checkpoint", "pause"]


@settings(max_examples=examples(25), deadline=None)
@given(script=st.lists(st.sampled_from(ACTIONS), max_size=40))
async def test_requests_in_any_order_end_and_see_whole_contributions(script: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        await play(Path(folder), script)


async def play(folder: Path, script: list[str]) -> None:
    async with life(folder, checkpoint_rounds=5, rules={"max_queued": 2}) as pserver:
        run, work = pserver.run, asyncio.Semaphore(0)
        members, run_update = dict(pserver.run.schedule.members), run.run_update

        async def update_when_told(*arguments: Any) -> Any:
            await work.acquire()
            return await run_update(*arguments)

        async def train(rank: int) -> None:
            for step in range(1, 9):
                await pserver.get(rank, step - 1)
                await pserver.push(rank, step)
            await pserver.get(rank, 8)

        async def look() -> None:
            applied, counted = await run.read_after_round(None, count_steps, 0)
            assert applied == counted

        async def want_checkpoint() -> None:
            with suppress(TryAgain, StaleRound):
                await pserver.run.want_checkpoint(pserver.run.schedule.num_committed + len(asked) % 2)

        run.run_update = update_when_told
        number, asked, looks = 1, [], []
        trainers = [asyncio.create_task(train(rank)) for rank in range(NUM_TRAINERS)]
        for action in script:
            if action == "work":
                work.release()
            elif action == "freeze":
                number += 1
                asked.append(asyncio.create_task(pserver.freeze(number)))
            elif action in ("members", "pause"):
                number += 1
                controls = (Controls(since=1, is_paused=True),) if action == "pause" else ()
                asked.append(asyncio.create_task(pserver.change_members(number, members, controls=controls)))
            elif action == "model":
                looks.append(asyncio.create_task(look()))
            elif action == "checkpoint":
                asked.append(asyncio.create_task(want_checkpoint()))
            elif looks:
                looks.pop().cancel()
            await turns()
        await pserver.change_members(number + 1, members)
        for _ in range(1000):
            work.release()
        async with asyncio.timeout(20):
            await asyncio.gather(*trainers, *asked, *looks)
            await pserver.wait_until_published()
        assert (pserver.run.schedule.num_committed, pserver.run.round) == (16, 16)
        for round_ in pserver.run.storage.rounds:
            restored = pserver.run.storage.restore(round_)
            assert sum(step for _, step in restored.history.steps.values()) == round_ == restored.round


RULES = {"max_delay": 4}
PUSHES = st.tuples(st.just("push"), st.integers(0, 1), st.integers(0, 2), st.sampled_from(["first", "last", "whole"]))


async def push(pserver: Bench, rank: int, step: int, part: str) -> None:
    """Push half of a step, or all of it."""
    blocks = pserver.contribution(rank, step)
    if part != "whole":
        await pserver.push(rank, step, dict(list(blocks.items())[:2]), last=False)
    if part != "first":
        await pserver.push(rank, step, blocks, computed_on=2)


@settings(max_examples=examples(12), deadline=None)
@given(script=st.lists(PUSHES, max_size=12))
async def test_after_a_restart_each_step_counts_once_and_whole(script: list[tuple[str, int, int, str]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with life(Path(folder), rules=RULES) as pserver:
            await steps(pserver, 1, 2)
            await pserver.run.want_checkpoint(4)
            await pserver.wait_until_published()
        async with life(Path(folder), 2, rules=RULES) as pserver:
            clocks, pushes = pserver.run.schedule, []
            for rank in range(NUM_TRAINERS):
                await pserver.get(rank, 2)
            for _, rank, ahead, part in script:
                pushes.append(asyncio.create_task(push(pserver, rank, clocks.open_steps[rank] + ahead, part)))
                await turns()
            results = await asyncio.gather(*pushes, return_exceptions=True)
            refused = [result for result in results if result is not None]
            assert all(getattr(error, "code", None) in ("future_round", "delay_exceeded") for error in refused), refused
            applied, _ = await pserver.run.read_after_round(None, count_steps, 0)
            assert applied == clocks.num_committed
            whole = {rank: step for rank, (_, step) in clocks.copy_history().steps.items()}
            assert whole == {rank: step - 1 for rank, step in clocks.open_steps.items()} == clocks.clocks
