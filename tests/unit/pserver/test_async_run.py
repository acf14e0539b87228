"""An asynchronous run: each gradient is applied once, waits and staleness, the content of checkpoints, and restarts."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ps_protocol.consistency import Consistency
from ps_protocol.errors import (
    FutureRound,
    GradpostError,
    RoundPending,
    RoundTimeout,
    StaleRound,
    TrainerLost,
    TryAgain,
)
from ps_protocol.membership import Controls
from ps_protocol.optimizers import StepState
from ps_protocol.requests import APPLIED_KEY, HISTORY_KEY
from services.pserver.inspection import make_heartbeat
from services.pserver.run import queue_run
from services.pserver.shard.shard_state import History

from ...raising import raises_code
from ...soaking import examples
from .oracle import make_options
from .support import PARAMETERS, Bench, bench, decode, initial_values, until

NAMES = [f"{spec.name}.block0" for spec in PARAMETERS]
SGD = [make_options("SGD", lr=1.0)]


@asynccontextmanager
async def asynchronous(
    num_trainers: int = 2, *, mode: Any = "async", optimizer: str = "SGD", groups: Any = SGD, **rules: Any
) -> AsyncIterator[Bench]:
    """A run whose trainers have pulled version 0."""
    consistency = Consistency(mode=mode, **rules)
    async with bench(num_trainers, optimizer=optimizer, groups=groups, consistency=consistency) as pserver:
        for rank in range(num_trainers):
            await pserver.get(rank, 0)
        yield pserver


def ones(value: float = 1.0, names: list[str] = NAMES) -> dict[str, Tensor]:
    """A gradient of equal numbers."""
    sizes = {f"{spec.name}.block0": spec.num_elements for spec in PARAMETERS}
    return {name: torch.full((sizes[name],), value) for name in names}


def stepped(body: bytes, by: float) -> bool:
    """Return whether every element has moved by this much since version 0."""
    start = {f"{name}.block0": value for name, value in initial_values().items()}
    return all(torch.allclose(block, start[name] - by, atol=1e-5) for name, block in decode(body)[0].items())


@contextmanager
def busy(pserver: Bench) -> Iterator[threading.Event]:
    """The compute thread does something else until the event is set."""
    release = threading.Event()
    job = asyncio.ensure_future(pserver.compute.run(release.wait))
    try:
        yield release
    finally:
        release.set()
        assert not job.cancelled()


@pytest.mark.parametrize("read_consistency", ["none", "block", "shard"])
async def test_every_gradient_is_applied_once(read_consistency: Any) -> None:
    async with asynchronous(3, read_consistency=read_consistency) as pserver:

        async def train(rank: int) -> None:
            for step in range(1, 21):
                await pserver.push(rank, step, ones(rank + 1.0), computed_on=step - 1)
                await pserver.push(rank, step, ones(rank + 1.0), computed_on=step - 1)  # a retry
                await pserver.get(rank, step)

        await asyncio.gather(*(train(rank) for rank in range(3)))
        assert stepped(await pserver.get(0, 20), by=20 * (1 + 2 + 3))
        assert pserver.run.round == 60
        assert pserver.metric("gradpost_rounds_applied_total") == 60
        assert pserver.metric("gradpost_queued_updates") == 0
        assert pserver.metric("gradpost_updates_applied_total") == 60 * len(NAMES)


async def test_a_full_queue_sends_the_sender_away_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_run, "HOLD_SECONDS", 0.05)
    async with asynchronous(max_queued=1) as pserver:
        with busy(pserver):
            await pserver.push(0, 1, ones(1.0))
            with raises_code("queue_full", match=r"the queue of block 'p0.block0' is full") as refused:
                await pserver.push(1, 1, ones(2.0))
            assert refused.value.may_be_retried
            with pytest.raises(FutureRound):  # the step after it has to wait
                await pserver.push(1, 2, ones(2.0), computed_on=0)
        await pserver.get(0, 1)
        assert (await pserver.push(1, 1, ones(2.0)))["duplicates"] == len(NAMES)
        assert stepped(await pserver.get(1, 1), by=3)


async def test_a_gradient_that_its_client_has_not_checked_stops_its_blocks_before_they_are_stepped() -> None:
    async with asynchronous() as pserver:
        blocks = ones(1.0, NAMES[:2])
        blocks[NAMES[1]][3] = float("nan")
        await pserver.push(0, 1, blocks)
        for _ in range(2):
            with raises_code("non_finite_update", match=rf"in the update of block '{NAMES[1]}'"):
                await pserver.get(0, 1)
        assert stepped(await pserver.get(1, 0), by=0.0)


async def test_a_get_waits_for_trainers_behind_max_staleness() -> None:
    async with asynchronous(mode="ssp", max_staleness=2) as pserver:
        for step in (1, 2):
            await pserver.push(0, step, ones())
            await pserver.get(0, step)
        await pserver.push(0, 3, ones())
        with pytest.raises(RoundPending, match="step 3 of trainer 0 waits for trainer 1") as pending:
            await pserver.get(0, 3, wait_seconds=0.02)
        assert pending.value.facts["missing"] == [1]
        assert make_heartbeat(pserver.pserver).missing == (1,)
        held = asyncio.ensure_future(pserver.get(0, 3))
        await pserver.push(1, 1, ones())
        assert stepped(await held, by=4)
        await pserver.push(0, 4, ones())
        last = asyncio.ensure_future(pserver.get(0, 4))
        await until(lambda: make_heartbeat(pserver.pserver).missing == (1,))
        await pserver.change_members(2, {0: 1})  # the slow one leaves
        assert stepped(await last, by=5)
        assert make_heartbeat(pserver.pserver).missing == ()


async def test_a_round_time_out_names_the_trainer_that_is_behind() -> None:
    async with bench(2, consistency=Consistency(mode="ssp", max_staleness=0), patience_seconds=0.1) as pserver:
        await pserver.get(0, 0)
        await pserver.push(0, 1, ones())
        with pytest.raises(RoundTimeout, match="trainer 1 did not let trainer 0 go on after step 1 within") as late:
            await pserver.get(0, 1)
        assert late.value.facts["missing"] == [1]


async def test_gradients_of_old_parameters_are_refused() -> None:
    async with asynchronous(max_delay=1) as pserver:
        for step in (1, 2):
            await pserver.push(0, step, ones(), computed_on=0)
        with raises_code("delay_exceeded", match="computed step 3 on version 0, which is too old"):
            await pserver.push(0, 3, ones(), computed_on=0)
        with pytest.raises(FutureRound):
            await pserver.push(0, 3, ones(), computed_on=3)
        with pytest.raises(StaleRound, match="no recorded pull after its step 2"):
            await pserver.push(0, 3, ones(), computed_on=2)
        await pserver.get(0, 2)
        await pserver.push(0, 3, ones(), computed_on=2)
        assert stepped(await pserver.get(0, 3), by=3)


async def read_in_the_middle(pserver: Bench) -> dict[str, float]:
    """Return the change of each block in a get between the updates of two blocks with one contribution."""
    gate, reached = threading.Event(), threading.Event()
    apply_blocks = pserver.run.shard.apply_blocks

    def apply(gradients: dict[str, Tensor], *args: Any, **kwargs: Any) -> None:
        apply_blocks(gradients, *args, **kwargs)
        if NAMES[1] in gradients:
            reached.set()
            gate.wait(10)

    pserver.run.shard.apply_blocks = apply
    with busy(pserver):
        # The first block of the second waits for the update before it.
        await asyncio.gather(pserver.push(0, 1, ones(1.0, NAMES[:1])), pserver.push(1, 1, ones()))
    await until(reached.is_set)
    num_jobs = pserver.compute.num_jobs
    get = asyncio.ensure_future(pserver.get(2, 0))
    await until(lambda: pserver.compute.num_jobs > num_jobs or pserver.run._turn.locked())
    gate.set()
    start = {f"{name}.block0": value for name, value in initial_values().items()}
    return {name: round((start[name] - block)[0].item()) for name, block in decode(await get)[0].items()}


async def test_a_get_sees_half_a_contribution_unless_reads_are_consistent_in_the_shard() -> None:
    async with asynchronous(3) as pserver:
        assert await read_in_the_middle(pserver) == dict.fromkeys(NAMES, 1)
    async with asynchronous(3, read_consistency="shard") as pserver:
        assert await read_in_the_middle(pserver) == {**dict.fromkeys(NAMES, 1), NAMES[0]: 2}


@pytest.mark.parametrize("read_consistency", ["block", "shard"])
async def test_delay_compensation_is_the_papers_formula(read_consistency: Any) -> None:
    async with asynchronous(compensation="dc", dc_lambda=0.5, read_consistency=read_consistency) as pserver:
        await pserver.push(0, 1, ones(2.0))
        assert stepped(await pserver.get(0, 1), by=2)  # nothing had changed since its pull
        await pserver.push(1, 1, ones(3.0))  # w - w_pulled = -2 by now
        assert stepped(await pserver.get(1, 1), by=2 + (3 + 0.5 * 3 * 3 * -2))


@pytest.mark.parametrize("read_consistency", ["none", "block", "shard"])
async def test_staleness_counts_from_the_pull_that_a_gradient_was_computed_on(read_consistency: Any) -> None:
    async with asynchronous(compensation="divide", read_consistency=read_consistency) as pserver:
        await pserver.push(0, 1, ones())
        await pserver.get(0, 1)
        for step in (1, 2, 3):
            await pserver.push(1, step, ones())
            assert stepped(await pserver.get(1, step), by=1 + step)
            if step == 2:
                await pserver.get(0, 1)  # asked again, the newer answer counts
        await pserver.push(0, 2, ones())  # one step of trainer 1 has come between, not three
        assert stepped(await pserver.get(0, 2), by=5)
        assert pserver.metric("gradpost_staleness_sum") == (0 + 1 + 0 + 0 + 1) * len(NAMES)


@pytest.mark.parametrize("read_consistency", ["none", "block", "shard"])
async def test_every_wait_ends_with_the_failure_of_the_run(read_consistency: Any) -> None:
    async with asynchronous(3, mode="ssp", max_staleness=0, max_queued=1, read_consistency=read_consistency) as pserver:
        lost = TrainerLost("trainer 2 was lost", ranks=[2])
        with busy(pserver):
            await pserver.push(0, 1, ones())
            waiting = [asyncio.ensure_future(c) for c in (pserver.push(1, 1, ones()), pserver.get(0, 1))]
            if read_consistency == "shard":
                waiting.append(asyncio.ensure_future(pserver.get(2, 0)))
            await until(lambda: pserver.metric("gradpost_held_pushes") == 1)
            await pserver.change_members(2, {}, failure=lost.to_problem())
            for one in waiting:
                with pytest.raises(TrainerLost, match="trainer 2 was lost"):
                    await asyncio.wait_for(one, 10)
        with pytest.raises(TrainerLost):
            await pserver.push(1, 1, ones())


ADAM = [make_options("Adam", lr=0.01)]
NUM_TRAINERS = 2
TURNS = 40  # of the event loop: more than any request needs


@asynccontextmanager
async def life(folder: Path, number: int = 1, **settings: Any) -> AsyncIterator[Bench]:
    """One life of the pserver; it ends without a word."""
    consistency = Consistency(mode="async", **settings.pop("rules", {}))
    async with bench(
        NUM_TRAINERS, **{"optimizer": "Adam", "groups": ADAM, **settings}, state_dir=folder, incarnation=number,
        consistency=consistency,
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


async def test_each_trainer_counts_its_own_steps_from_those_that_were_loaded_last(tmp_path: Path) -> None:
    async with life(tmp_path) as pserver:
        optimizer = pserver.run.shard.optimizer
        before_and_after = [((0, 1), (0, 2), (1, 1)), [{2}, {1}]], [((1, 2), (0, 3), (1, 3)), [{8}, {9}]]
        for pushed, counts in before_and_after:
            for rank, step in pushed:
                await pserver.get(rank, step - 1)
                await pserver.push(rank, step)
                await pserver.get(rank, step)
            found = [{state.steps for state in optimizer.steps_for(rank).values()} for rank in range(NUM_TRAINERS)]
            assert found == counts
            optimizer.load_blocks(dict.fromkeys(optimizer.state.steps, StepState(7)), {})


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
