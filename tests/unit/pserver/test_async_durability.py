"""An asynchronous run on a disk: acknowledged contributions are replayed once, and pauses of any order end."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ps_protocol.consistency import Consistency
from ps_protocol.errors import ContributionMissing, FutureRound, GradpostError, StorageFailed, TrainerLost, TryAgain
from services.pserver.run.asynchronous import queue_executor
from services.pserver.run.asynchronous.queues import Pauses
from services.runtime.failpoints import arm_failpoints

from ...raising import raises_code
from ...soaking import examples
from .oracle import make_options
from .support import Bench, bench, until
from .test_async_run import busy

ADAM = [make_options("Adam", lr=0.01)]


@asynccontextmanager
async def life(folder: Path, number: int = 1, *, durability: str = "log", **settings: Any) -> AsyncIterator[Bench]:
    """One life of the pserver; it ends without a word."""
    rules = settings.pop("rules", {})
    consistency = Consistency(mode="async", **rules)
    async with bench(
        2, **{"optimizer": "Adam", "groups": ADAM, **settings}, state_dir=folder, incarnation=number,
        consistency=consistency, nonfinite="allow", durability=durability,
    ) as pserver:  # fmt: skip
        yield pserver


async def steps(pserver: Bench, first: int, last: int) -> None:
    """Both trainers take these steps, one after the other."""
    for step in range(first, last + 1):
        for rank in (0, 1):
            await pserver.get(rank, step - 1)
            await pserver.push(rank, step)
            await pserver.get(rank, step)


@contextmanager
def armed(text: str) -> Iterator[None]:
    arm_failpoints(text)
    try:
        yield
    finally:
        arm_failpoints("")


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
        append = pserver.run.storage.append

        def append_slowly(*arguments: Any) -> None:
            self.num_begun += 1
            self._go.acquire()
            append(*arguments)

        pserver.run.storage.append = append_slowly
        try:
            yield self
        finally:
            self.open_up()


async def digest_without_faults(folder: Path, last: int, **settings: Any) -> str:
    async with life(folder, **settings) as pserver:
        await steps(pserver, 1, last)
        return str(pserver.run.shard.digest())


@pytest.mark.parametrize("interval", [0, 1, 3])
async def test_a_restart_after_any_step_changes_no_bit(tmp_path: Path, interval: int) -> None:
    expected = await digest_without_faults(tmp_path / "without", 6)
    for number, first in enumerate((1, 2, 4, 6), start=1):
        async with life(tmp_path / "with", number, checkpoint_rounds=interval) as pserver:
            assert pserver.run.round == 2 * (first - 1)
            await steps(pserver, first, {1: 1, 2: 3, 4: 5, 6: 6}[first])
            digest = pserver.run.shard.digest()
    assert digest == expected


@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
@pytest.mark.parametrize("compensation", ["divide", "dc"])
async def test_replayed_gradients_are_compensated_with_the_staleness_that_they_had(
    tmp_path: Path, compensation: str, optimizer: str
) -> None:
    rules = {"compensation": compensation, **({"dc_lambda": 0.5} if compensation == "dc" else {})}
    options = {"optimizer": optimizer, "groups": [make_options(optimizer, lr=0.01)]}
    async with life(tmp_path, rules=rules, **options) as pserver:
        for rank in (0, 1):
            await pserver.get(rank, 0)
        for step in (1, 2, 3):
            await pserver.push(0, step)
            await pserver.get(0, step)
        await pserver.push(1, 1)  # three updates late
        await pserver.get(1, 1)
        await pserver.push(0, 4, pserver.contribution(0, 4))
        await pserver.get(0, 4)
        digest = pserver.run.shard.digest()
    async with life(tmp_path, 2, rules=rules, **options) as pserver:
        assert (pserver.run.round, pserver.run.shard.digest()) == (5, digest)


async def test_contributions_that_were_acknowledged_are_replayed(tmp_path: Path) -> None:
    async with life(tmp_path) as pserver:
        await steps(pserver, 1, 1)
        with busy(pserver):
            await pserver.push(0, 2)
            assert pserver.run.round == 2
            pserver.run.storage.close()  # the process is gone
    async with life(tmp_path, 2) as pserver:
        assert pserver.run.schedule.open_steps == {0: 3, 1: 2}
        assert (await pserver.push(0, 2))["status"] == "already_applied"
        await pserver.get(0, 2)
        assert pserver.run.round == 3


async def test_a_contribution_that_was_staged_in_part_is_pushed_again(tmp_path: Path) -> None:
    async with life(tmp_path) as pserver:
        await steps(pserver, 1, 1)
        blocks = list(pserver.contribution(0, 2).items())
        await pserver.push(0, 2, dict(blocks[:2]), last=False)
    async with life(tmp_path, 2) as pserver:
        await pserver.push(0, 2, dict(blocks[2:]), last=False)
        with pytest.raises(ContributionMissing):
            await pserver.get(0, 2)
        assert (await pserver.push(0, 2))["complete"]
        await pserver.get(0, 2)
        assert pserver.run.schedule.clocks == {0: 2, 1: 1}


async def test_without_a_log_trainers_go_on_with_their_own_steps(tmp_path: Path) -> None:
    async with life(tmp_path, durability="none") as pserver:
        await pserver.run.want_checkpoint(4)
        await steps(pserver, 1, 3)
        await until(lambda: 4 in pserver.run.storage.checkpoints)
    async with life(tmp_path, 2, durability="none") as pserver:
        assert pserver.run.round == 4
        with pytest.raises(ContributionMissing):  # the newest step is in the trainer's memory yet
            await pserver.get(0, 3)
        await pserver.push(0, 3)
        await pserver.get(0, 3)
        with structlog.testing.capture_logs() as logs:
            await pserver.push(1, 4)
        await pserver.get(1, 4)
        assert pserver.run.schedule.clocks == {0: 3, 1: 4}  # step 3 of trainer 1 is lost
        assert [line["lost"] for line in logs if line["event"].endswith("acknowledged are lost")] == [1]
        with pytest.raises(FutureRound):  # from now on its steps come one after another
            await pserver.push(1, 6)
        assert pserver.run.round == 6


async def test_a_full_disk_sends_pushes_away_and_takes_nothing(tmp_path: Path) -> None:
    async with life(tmp_path) as pserver:
        await steps(pserver, 1, 1)
        with armed("log.append.before=enospc@1"):
            with pytest.raises(TryAgain, match="No space left on device"):
                await pserver.push(0, 2)
            assert pserver.run.schedule.open_steps == {0: 2, 1: 2}
            await pserver.push(0, 2)  # there is room again
        await pserver.get(0, 2)
        assert pserver.run.round == 3
    async with life(tmp_path, 2) as pserver:
        assert pserver.run.round == 3


async def test_a_disk_that_stays_full_ends_the_run(tmp_path: Path) -> None:
    async with life(tmp_path, round_timeout_seconds=0.0) as pserver:
        await steps(pserver, 1, 1)
        with armed("log.append.before=eio"), pytest.raises(StorageFailed):
            await pserver.push(0, 2)
        with pytest.raises(StorageFailed):
            await pserver.get(1, 1)


@pytest.mark.parametrize("durability", ["none", "log"])
async def test_a_checkpoint_holds_the_first_contributions_and_nothing_else(tmp_path: Path, durability: str) -> None:
    async with life(tmp_path, durability=durability) as pserver:
        await steps(pserver, 1, 1)
        await pserver.run.want_checkpoint(3)
        with busy(pserver) as release:
            await pserver.push(0, 2)  # number 3: a checkpoint is due, and it is not applied yet
            later = asyncio.create_task(pserver.push(1, 2))
            await asyncio.sleep(0.05)
            assert pserver.run.schedule.num_committed == 3
            release.set()
        await later
        await pserver.get(1, 2)
        await until(lambda: 3 in pserver.run.storage.checkpoints)
        restored = pserver.run.storage.restore(3)
        assert restored.history.steps == {0: (1, 2), 1: (1, 1)}
    async with life(tmp_path / "other") as other:
        await steps(other, 1, 1)
        await other.push(0, 2)
        await other.get(0, 2)
        assert restored.shard.digest() == other.run.shard.digest()


@pytest.mark.parametrize("failure", [None, TrainerLost("trainer 1 was lost")])
async def test_a_pserver_that_stops_applies_its_committed_contributions(
    tmp_path: Path, failure: GradpostError | None
) -> None:
    async with life(tmp_path, durability="none") as pserver:
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
    async with life(tmp_path, 2, durability="none") as pserver:
        assert pserver.run.schedule.open_steps == {0: 3, 1: 2}


async def test_members_do_not_change_while_a_contribution_is_being_logged(tmp_path: Path) -> None:
    async with life(tmp_path) as pserver:
        await steps(pserver, 1, 1)
        with SlowLog().of(pserver) as log:
            push = asyncio.create_task(pserver.push(0, 2))
            await until(lambda: log.num_begun)
            change = asyncio.create_task(pserver.change_members(2, {1: 1}))
            await asyncio.sleep(0.05)
            assert not change.done()
        await asyncio.gather(push, change)
        assert pserver.run.schedule.members == {1: 1}
        assert pserver.run.schedule.open_steps == {0: 3, 1: 2}
        await until(lambda: pserver.run.round == 3)


async def test_a_client_that_goes_away_leaves_no_gap_in_the_log(tmp_path: Path) -> None:
    async with life(tmp_path) as pserver:
        await steps(pserver, 1, 1)
        with SlowLog().of(pserver) as log:
            push = asyncio.create_task(pserver.push(0, 2))
            await until(lambda: log.num_begun)
            push.cancel()
            other = asyncio.create_task(pserver.push(1, 2))
        await other
        await until(lambda: pserver.run.round == 4)
        digest = pserver.run.shard.digest()
    async with life(tmp_path, 2) as pserver:
        assert (pserver.run.round, pserver.run.shard.digest()) == (4, digest)


async def test_once_the_run_is_over_every_pserver_writes_the_same_number(tmp_path: Path) -> None:
    async with life(tmp_path) as pserver:
        await steps(pserver, 1, 2)
        await pserver.run.want_checkpoint(9, is_over=True)
        await until(lambda: 9 in pserver.run.storage.checkpoints)
    async with life(tmp_path, 2) as pserver:
        assert pserver.run.round == 9
        await steps(pserver, 3, 3)
        assert pserver.run.round == 11


async def test_a_contribution_without_any_block_waits_for_a_slow_disk_like_all_others(tmp_path, monkeypatch):
    monkeypatch.setattr(queue_executor, "HOLD_SECONDS", 0.05)
    async with life(tmp_path) as pserver:
        await steps(pserver, 1, 1)
        with SlowLog().of(pserver) as log:
            first = asyncio.create_task(pserver.push(0, 2))
            await until(lambda: log.num_begun)
            with raises_code("queue_full", match="pserver 0 is busy; send the push again"):
                await pserver.push(1, 2, {})
        await first
        await pserver.push(1, 2, {})


NUM_TRAINERS = 2  # of `life`
TURNS = 40  # of the event loop: more than any request needs


async def turns(count: int = TURNS) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def train(pserver: Bench, rank: int, steps: int) -> None:
    """Always the next push, as soon as the one before is acknowledged."""
    for step in range(1, steps + 1):
        await pserver.push(rank, step)
        await pserver.get(rank, step)


@pytest.mark.parametrize("what", ["freeze", "model", "checkpoint", "stop"])
async def test_a_request_waits_for_one_pause_only(tmp_path: Path, what: str) -> None:
    async with life(tmp_path) as pserver:
        for rank in range(NUM_TRAINERS):
            await pserver.get(rank, 0)
        with SlowLog().of(pserver) as log:
            trainers = [asyncio.create_task(train(pserver, rank, 6)) for rank in range(NUM_TRAINERS)]
            await until(lambda: log.num_begun)
            asked = asyncio.create_task(
                {
                    "freeze": lambda: pserver.freeze(2),
                    "model": lambda: pserver.run.executor.read_after_round(None, dict, 0),
                    "checkpoint": lambda: pserver.run.want_checkpoint(1),
                    "stop": lambda: pserver.pserver.stop(),
                }[what]()
            )
            await turns()
            assert log.num_begun == 1
            assert not asked.done()
            await log.write_one(pserver.run.executor._pauses)
            async with asyncio.timeout(10):
                await asked
            assert pserver.run.schedule.num_committed == 1
        for trainer in trainers:
            with suppress(TryAgain):  # after the stop
                await trainer


@settings(max_examples=examples(12), deadline=None)
@given(script=st.lists(st.sampled_from(["write", "freeze", "model", "members", "cancel"]), max_size=40))
async def test_pauses_of_any_order_end(script: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        await play(Path(folder), script)


async def play(folder: Path, script: list[str]) -> None:
    async with life(folder, checkpoint_rounds=5) as pserver:
        run, pauses = pserver.run, pserver.run.executor._pauses
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
                assert not run.executor._held.has_ready(), "contributions are held back for ever"
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
                    moments.append(asyncio.create_task(pserver.change_members(number, dict(run.schedule.members))))
                elif action == "model":
                    looks.append(asyncio.create_task(run.executor.read_after_round(None, dict, 0)))
                elif action == "cancel" and looks:
                    looks.pop().cancel()
                await turns()
            log.open_up()
            async with asyncio.timeout(20):
                await asyncio.gather(*trainers, *moments, *looks)
        assert run.schedule.num_committed == NUM_TRAINERS * 12


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


@settings(max_examples=examples(12), deadline=None)
@given(script=st.lists(st.one_of(PUSHES, st.just(("write",))), max_size=12))
@example(script=[("push", 0, 0, "whole"), ("push", 0, 1, "whole"), ("write",)])
async def test_each_step_is_logged_once_and_whole_after_a_restart(script: list[tuple]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        await play_after_a_restart(Path(folder), script)


async def play_after_a_restart(folder: Path, script: list[tuple]) -> None:
    async with life(folder, rules=RULES) as pserver:
        await steps(pserver, 1, 2)
    async with life(folder, 2, rules=RULES) as pserver:
        clocks = pserver.run.schedule
        for rank in (0, 1):
            await pserver.get(rank, 2)
        with SlowLog().of(pserver) as log:
            pushes = []
            for action, *arguments in script:
                if action == "push":
                    rank, ahead, part = arguments
                    pushes.append(asyncio.create_task(push(pserver, rank, clocks.open_steps[rank] + ahead, part)))
                elif pserver.run.executor._pauses._task is not None:
                    await log.write_one(pserver.run.executor._pauses)
                await turns()
            log.open_up()
            results = await asyncio.gather(*pushes, return_exceptions=True)
            refused = [result for result in results if result is not None]
            assert all(getattr(error, "code", None) in ("future_round", "delay_exceeded") for error in refused), refused
        await pserver.run.wait_for_writes()
        await pserver.run.executor._drain()
        assert clocks.applied == clocks.num_committed
        taken, digest = clocks.num_committed, pserver.run.shard.digest()
    async with life(folder, 3, rules=RULES) as pserver:
        assert (pserver.run.schedule.num_committed, pserver.run.shard.digest()) == (taken, digest)
