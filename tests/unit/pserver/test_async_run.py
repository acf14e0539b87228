"""An asynchronous run: each gradient is applied once; full queues, failed blocks, waits and staleness."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from ps_protocol.consistency import Consistency
from ps_protocol.errors import FutureRound, RoundPending, RoundTimeout, StaleRound, StaleRun, TrainerLost
from ps_protocol.requests import Pull
from services.pserver.run import queue_run, queues
from services.pserver.shard import shard as shard_module
from services.pserver.shard.bodies import PooledBuffer

from ...raising import raises_code
from .oracle import make_options
from .support import PARAMETERS, Bench, bench, decode, failing, initial_values, until

NAMES = [f"{spec.name}.block0" for spec in PARAMETERS]
SGD = [make_options("SGD", lr=1.0)]


@asynccontextmanager
async def asynchronous(
    num_trainers: int = 2, *, mode: Any = "async", optimizer: str = "SGD", groups: Any = SGD, **rules: Any
) -> AsyncIterator[Bench]:
    """A run whose trainers have pulled version 0."""
    consistency = Consistency(mode=mode, **rules)
    settings: Any = {"consistency": consistency, "nonfinite": "allow"}  # else a push needs the compute thread at once
    async with bench(num_trainers, optimizer=optimizer, groups=groups, **settings) as pserver:
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


def before_applies(pserver: Bench, act: Callable[[str, Tensor], None]) -> None:
    """Call this on the compute thread for each block before it is stepped."""
    apply_blocks = pserver.run.shard.apply_blocks

    def act_and_apply(gradients: dict[str, Tensor], *args: Any, **kwargs: Any) -> None:
        for name, gradient in gradients.items():
            act(name, gradient)
        apply_blocks(gradients, *args, **kwargs)

    pserver.run.shard.apply_blocks = act_and_apply


def hold_applies(monkeypatch: pytest.MonkeyPatch, names: list[str] = NAMES) -> asyncio.Event:
    """The updates of these blocks are due when the event is set, all in one turn of the event loop."""
    release, apply = asyncio.Event(), queues.UpdateJobs.apply

    async def apply_late(jobs: Any, name: str, update: Any) -> None:
        if name in names:
            await release.wait()
        await apply(jobs, name, update)

    monkeypatch.setattr(queues.UpdateJobs, "apply", apply_late)
    return release


def record_call(calls: list[tuple[Any, ...]], function: Callable[..., None]) -> Callable[..., None]:
    """The function, which adds its arguments to `calls`."""

    def call(*args: Any) -> None:
        calls.append(args)
        function(*args)

    return call


def taken(pserver: Bench) -> bool:
    """Return whether each worker has emptied its queue and waits for the compute thread."""
    return all(queue._queue.empty() for queue in pserver.run.queues.values())


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


async def test_two_tries_of_a_push_that_is_held_are_queued_once() -> None:
    async with asynchronous(max_queued=1) as pserver:
        with busy(pserver):
            await pserver.push(0, 1, ones(1.0))
            tries = [asyncio.ensure_future(pserver.push(1, 1, ones(2.0))) for _ in range(3)]
            await until(lambda: pserver.metric("gradpost_held_pushes") == 3)
        assert {(await one)["status"] for one in tries} == {"staged"}
        assert stepped(await pserver.get(1, 1), by=3)


async def test_a_push_is_in_all_its_queues_or_in_none() -> None:
    async with asynchronous(max_queued=1) as pserver:
        with busy(pserver):
            await pserver.push(0, 1, ones(1.0, NAMES[:1]))  # one queue is full
            held = asyncio.ensure_future(pserver.push(1, 1, ones(1.0)))
            await until(lambda: pserver.metric("gradpost_held_pushes") == 1)
            assert pserver.metric("gradpost_queued_updates") == 1
            assert not held.done()
        assert (await held)["complete"]
        assert stepped(await pserver.get(1, 1, names=NAMES[1:]), by=1)


async def test_a_push_that_waits_for_several_queues_is_not_overtaken_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_module, "SMALL_ELEMENTS", 0)  # an update that waits must not block the event loop
    async with asynchronous(3, max_queued=1) as pserver:
        gate, reached = threading.Event(), threading.Event()

        def wait(name: str, _: Tensor) -> None:
            if name == NAMES[1]:
                reached.set()
                gate.wait(10)

        before_applies(pserver, wait)
        await pserver.push(1, 1, ones(1.0, NAMES[1:2]))
        await until(reached.is_set)
        both = asyncio.ensure_future(pserver.push(2, 1, ones(1.0, NAMES[:2])))
        await until(lambda: pserver.metric("gradpost_held_pushes") == 1)
        one = asyncio.ensure_future(pserver.push(0, 1, ones(1.0, NAMES[:1])))  # for which there is room
        await until(lambda: pserver.metric("gradpost_held_pushes") == 2)
        gate.set()
        assert [(await push)["status"] for push in (both, one)] == ["staged", "staged"]


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


async def test_an_optimizer_that_fails_stops_the_blocks_of_its_call_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    release = hold_applies(monkeypatch)
    async with asynchronous() as pserver:

        def fail(name: str, _: Tensor) -> None:
            if name == NAMES[1]:
                raise MemoryError("no memory")

        before_applies(pserver, fail)
        await pserver.push(0, 1, ones(1.0, NAMES[:2]))
        await pserver.push(1, 1, ones(1.0, NAMES[2:]))
        await until(lambda: taken(pserver))
        release.set()  # both contributions share a job, and each has a call of its own
        for _ in range(2):
            with raises_code("apply_failed", match=r"block 'p0.block0' has stopped.*no memory"):
                await pserver.get(0, 1)
            for name in NAMES[:2]:
                with raises_code("apply_failed", match=rf"block '{name}' has stopped"):
                    await pserver.push(1, 2, ones(1.0, [name]), computed_on=0)
        await until(lambda: pserver.run.schedule.clocks == {0: 0, 1: 1})
        assert pserver.metric("gradpost_updates_applied_total") == 2
        assert not pserver.run._is_idle  # no checkpoint is made of it


async def test_updates_that_are_due_together_are_one_job(monkeypatch: pytest.MonkeyPatch) -> None:
    release, jobs = hold_applies(monkeypatch), []
    async with asynchronous(3, read_consistency="none") as pserver:
        monkeypatch.setattr(queues.UpdateJobs, "_step_all", record_call(jobs, queues.UpdateJobs._step_all))
        for rank, names in enumerate((NAMES[:1], NAMES, NAMES[3:])):
            await pserver.push(rank, 1, ones(rank + 1.0, names))
        await until(lambda: sum(queue._queue.qsize() for queue in pserver.run.queues.values()) == 2)
        release.set()
        blocks = decode(await pserver.get(1, 1))[0] | decode(await pserver.get(2, 1))[0]
        start = {f"{name}.block0": value for name, value in initial_values().items()}
        moved = {name: round((start[name] - block)[0].item()) for name, block in blocks.items()}
        assert moved == {NAMES[0]: 3, NAMES[1]: 2, NAMES[2]: 2, NAMES[3]: 5}
        assert [len(due) for _, due in jobs] == [4, 2]
        assert pserver.metric("gradpost_staleness_sum") == 2  # the second updates of two blocks


async def test_blocks_whose_job_cannot_run_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queues.UpdateJobs, "_step_all", failing(MemoryError("no memory")))
    async with asynchronous() as pserver:
        await pserver.push(0, 1, ones())
        with raises_code("apply_failed", match=r"has stopped.*no memory"):
            await asyncio.wait_for(pserver.get(0, 1), 5)


async def test_a_get_does_not_wait_for_updates_behind_a_failed_block() -> None:
    async with asynchronous(3, read_consistency="shard", wait_for_apply=False) as pserver:
        before_applies(pserver, lambda *_: 1 / 0)
        with busy(pserver):
            for rank in range(2):
                await pserver.push(rank, 1, ones())
            marked = asyncio.ensure_future(pserver.get(2, 0))  # its marker is behind them
            await asyncio.sleep(0.01)
        with raises_code("apply_failed", match="division by zero"):
            await marked
        assert pserver.metric("gradpost_queued_updates") == 0


async def test_a_get_waits_for_the_trainers_own_update_only_if_asked_to() -> None:
    async with asynchronous(read_consistency="none") as waits:
        with busy(waits):
            await waits.push(0, 1, ones())
            with pytest.raises(RoundPending, match="step 1 of trainer 0 waits for its own update"):
                await waits.get(0, 1, wait_seconds=0.02)
            assert stepped(await waits.get(1, 0), by=0)  # the other has pushed nothing
        assert stepped(await waits.get(0, 1), by=1)
    async with asynchronous(read_consistency="none", wait_for_apply=False) as does_not:
        with busy(does_not):
            await does_not.push(0, 1, ones())
            assert stepped(await does_not.get(0, 1, wait_seconds=0), by=0)


async def test_a_get_waits_for_trainers_behind_max_staleness() -> None:
    async with asynchronous(mode="ssp", max_staleness=2) as pserver:
        for step in (1, 2):
            await pserver.push(0, step, ones())
            await pserver.get(0, step)
        await pserver.push(0, 3, ones())
        with pytest.raises(RoundPending, match="step 3 of trainer 0 waits for trainer 1") as pending:
            await pserver.get(0, 3, wait_seconds=0.02)
        assert pending.value.facts["missing"] == [1]
        assert pserver.pserver.make_heartbeat().missing == (1,)
        held = asyncio.ensure_future(pserver.get(0, 3))
        await pserver.push(1, 1, ones())
        assert stepped(await held, by=4)
        await pserver.push(0, 4, ones())
        last = asyncio.ensure_future(pserver.get(0, 4))
        await until(lambda: pserver.pserver.make_heartbeat().missing == (1,))
        await pserver.change_members(2, {0: 1})  # the slow one leaves
        assert stepped(await last, by=5)
        assert pserver.pserver.make_heartbeat().missing == ()


async def test_an_abandoned_get_stops_waiting_once_the_clocks_allow_it() -> None:
    async with asynchronous(mode="ssp", max_staleness=0) as pserver:
        await pserver.push(0, 1, ones())
        with pytest.raises(RoundPending):
            await pserver.get(0, 1, wait_seconds=0.02)
        assert pserver.pserver.make_heartbeat().missing == (1,)
        assert pserver.run.late[1] > 0
        await pserver.push(1, 1, ones())
        await pserver.get(1, 1)
        assert (pserver.pserver.make_heartbeat().missing, pserver.run.late[1]) == ((), 0)


async def test_a_round_time_out_names_the_trainer_that_is_behind() -> None:
    async with bench(2, consistency=Consistency(mode="ssp", max_staleness=0), round_timeout_seconds=0.1) as pserver:
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


async def test_the_memory_of_a_reply_is_not_reused_while_it_is_sent() -> None:
    async with asynchronous() as pserver:
        reply = await pserver.run.get(pserver.fence(0, 0), Pull(0, wait_seconds=1))
        [part] = reply.parts
        before = bytes(part)
        other = PooledBuffer(pserver.pserver.pool, len(part))
        other.buffer[:] = bytes(len(part))
        assert bytes(part) == before
        del reply
        assert pserver.pserver.pool.idle_bytes > 0


async def test_there_are_no_barriers() -> None:
    async with asynchronous() as pserver:
        with raises_code("mode_mismatch", match="a batch barrier requires the synchronous mode"):
            await pserver.barrier(0, 1)
        with raises_code("mode_mismatch"):
            await pserver.get(0, 0, with_barrier=True)


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


async def test_a_get_behind_an_update_that_fails_raises_apply_failed() -> None:
    async with asynchronous(3, read_consistency="shard") as pserver:

        def fail(_: str, gradient: Tensor) -> None:
            assert gradient[0] != 7

        before_applies(pserver, fail)
        with busy(pserver):
            await pserver.push(2, 1, ones(1.0, NAMES[:1]))
            await until(lambda: taken(pserver))
            await pserver.push(0, 1, ones(7.0, NAMES[:1]))
            get = asyncio.ensure_future(pserver.get(1, 0))
            await until(pserver.run._turn.locked)
        with raises_code("apply_failed", match="has stopped"):
            await asyncio.wait_for(get, 30)


@pytest.mark.parametrize(("read_consistency", "seen"), [("none", {0.0, 1.0}), ("block", {1.0}), ("shard", {1.0})])
async def test_a_block_that_is_being_updated(
    monkeypatch: pytest.MonkeyPatch, read_consistency: Any, seen: set[float]
) -> None:
    monkeypatch.setattr(shard_module, "SMALL_ELEMENTS", 0)  # an update that waits must not block the event loop
    async with asynchronous(read_consistency=read_consistency) as pserver:
        gate, reached = threading.Event(), threading.Event()
        shard, name = pserver.run.shard, NAMES[3]
        start = shard.block(name).clone()

        def apply_slowly(gradients: dict[str, Tensor], *args: Any, **kwargs: Any) -> None:
            [(name, gradient)] = gradients.items()
            block = shard.block(name)
            block[:64] -= gradient[:64]
            reached.set()
            gate.wait(10)
            block[64:] -= gradient[64:]
            shard.versions[name] += 1

        shard.apply_blocks = apply_slowly
        await pserver.push(0, 1, ones(1.0, [name]))
        await until(reached.is_set)
        get = asyncio.ensure_future(pserver.get(1, 0, names=[name]))
        if read_consistency == "none":
            await until(get.done)
        gate.set()
        block = decode(await get)[0][name]
        assert {round(value, 3) for value in (start - block).tolist()} == seen


async def test_staleness_is_measured_and_divides_the_rate() -> None:
    async with asynchronous(3, compensation="divide") as pserver:
        for rank, moved in ((0, 1.0), (1, 2.0), (2, 2.5)):  # staleness 0 and 1 count alike; 2 halves the step
            await pserver.push(rank, 1, ones())
            assert stepped(await pserver.get(rank, 1), by=moved)
        assert pserver.metric("gradpost_staleness_sum") == (0 + 1 + 2) * len(NAMES)
        assert pserver.metric("gradpost_staleness_count") == 3 * len(NAMES)


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


async def test_the_next_run_ends_the_workers_of_this_one() -> None:
    async with asynchronous() as pserver:
        await pserver.push(0, 1, ones())
        first, workers = pserver.run, [queue._task for queue in pserver.run.queues.values()]
        await pserver.install_next_run()
        await asyncio.sleep(0)
        assert workers
        assert all(worker.done() for worker in workers)
        assert isinstance(first.failure, StaleRun)
