"""The waits of a synchronous run on one pserver, and what ends them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from ps_protocol.consistency import Consistency
from ps_protocol.errors import Conflict, NotReady, RoundPending, RoundTimeout, StalePserver, StaleRun, TrainerLost
from ps_protocol.membership import Controls, Membership
from ps_protocol.vocabulary import BufferSpec, Mode
from services.pserver.run import sync_run

from ...raising import raises_code
from .support import (
    Refusal,
    bench,
    decode,
    encode,
    failing,
    initial_values,
    keep_busy,
    refused,
    unchanged,
    until,
)


async def test_a_long_poll_ends_with_round_pending_that_names_the_missing_trainer():
    async with bench(3) as b:
        await b.push(0, 1)
        await b.push(2, 1)
        await b.barrier(0, 1)
        await b.barrier(2, 1)
        begin = asyncio.get_running_loop().time()
        refusal = await unchanged(b, "round_pending", b.get(0, 1, wait_seconds=0.05))
        assert refusal == Refusal("round 1 waits for trainer 1", {"missing": [1], "round": 1})
        assert asyncio.get_running_loop().time() - begin >= 0.05
        with pytest.raises(RoundPending):
            await b.get(2, 1, wait_seconds=0)


async def test_round_timeout_names_the_missing_trainer():
    async with bench(round_timeout_seconds=0.1) as b:
        await b.push(0, 1)
        begin = asyncio.get_running_loop().time()
        with pytest.raises(RoundTimeout, match=r"trainer 1 did not reach the batch barrier of round 1") as caught:
            await b.get(0, 1, wait_seconds=20, with_barrier=True)
        assert caught.value.facts == {"missing": [1], "round": 1}
        assert 0.1 <= asyncio.get_running_loop().time() - begin < 2
        # A late trainer is let in: the coordinator alone ends a run.
        await b.push(1, 1)
        await b.barrier(1, 1)
        assert decode(await b.get(0, 1))[1]["round"] == "1"


async def test_round_timeout_counts_from_the_first_get_though_no_barrier_was_sent():
    async with bench(round_timeout_seconds=0.1) as b:
        with pytest.raises(RoundTimeout, match="trainers 0, 1"):
            await b.get(0, 1, wait_seconds=20)


async def test_round_timeout_names_the_trainer_that_owes_the_initial_values():
    async with bench(initial=False, round_timeout_seconds=0.6) as b:
        with pytest.raises(NotReady, match="initial values") as pending:
            await b.get(1, 0, wait_seconds=0.01)
        assert pending.value.facts == {"waiting_for": "trainer 0"}
        await unchanged(b, "not_ready", b.push(0, 1))
        await asyncio.sleep(0.4)
        value = initial_values()["p0"]
        await b.call("initial", b.fence(0, 0), encode({"p0.block0": value}))  # it is slow, but it goes on
        with pytest.raises(NotReady):
            await b.get(1, 0, wait_seconds=0.4)
        with pytest.raises(RoundTimeout, match="trainer 0") as caught:
            await b.get(1, 0, wait_seconds=20)
        assert caught.value.facts["missing"] == [0]


@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_the_round_time_out_begins_again_after_a_pause_before_version_0(mode: Mode) -> None:
    async with bench(initial=False, round_timeout_seconds=0.2, consistency=Consistency(mode=mode)) as b:
        with pytest.raises(NotReady):
            await b.get(1, 0, wait_seconds=0)
        for number, is_paused in ((2, True), (3, False)):
            await b.freeze(number)
            await b.change_members(number, {0: 1, 1: 1}, controls=(Controls(since=1, is_paused=is_paused),))
            if is_paused:
                with pytest.raises(NotReady):
                    await b.get(1, 0, wait_seconds=0.25)
        with pytest.raises(NotReady):
            await b.get(1, 0, wait_seconds=0)


async def test_the_round_time_out_begins_again_with_every_round_and_change_of_members():
    async with bench(3, round_timeout_seconds=0.6) as b:
        await b.push(0, 1)
        await b.barrier(0, 1)
        await asyncio.sleep(0.4)
        await b.change_members(2, {1: 1, 2: 1})  # the waiting trainer has left
        assert b.run.late[1] == 0
        await b.push(1, 1)
        with pytest.raises(RoundPending):
            await b.get(1, 1, wait_seconds=0.4, with_barrier=True)
        await b.push(2, 1)
        await b.barrier(2, 1)
        await b.get(1, 1)
        assert b.run.late[1] == 0


async def test_a_failure_installed_by_the_coordinator_wakes_all_waiters():
    async with bench(3) as b:
        for rank in (0, 1):
            await b.push(rank, 1)
        gets = [asyncio.create_task(b.get(rank, 1, with_barrier=True)) for rank in (0, 1)]
        await asyncio.sleep(0)
        gets.append(asyncio.create_task(b.get(0, 1, names=["p1.block0"])))
        await asyncio.sleep(0.01)
        failure = TrainerLost("trainer 2 was lost", ranks=[2]).to_problem()
        begin = asyncio.get_running_loop().time()
        await b.change_members(2, {0: 1, 1: 1}, failure=failure)
        errors = await asyncio.gather(*gets, return_exceptions=True)
        assert asyncio.get_running_loop().time() - begin < 1
        assert [(e.code, str(e)) for e in errors] == [("trainer_lost", "trainer 2 was lost")] * 3
        assert len(set(map(id, errors))) == 3  # one shared exception would keep the frames of all requests
        for request in (b.push(1, 1), b.barrier(1, 1), b.get(1, 0), b.call("initial", b.fence(0, 0), encode({}))):
            await unchanged(b, "trainer_lost", request)
        assert b.run.failure.__traceback__ is None  # it would keep the requests' memory
        await b.change_members(3, {}, failure=TrainerLost("trainer 0 was lost").to_problem())
        with pytest.raises(TrainerLost, match="trainer 2"):  # the first failure stands
            await b.get(0, 1)


async def test_an_older_number_of_members_changes_nothing():
    async with bench(3) as b:
        await b.change_members(5, {0: 1, 1: 1})
        await b.change_members(4, {0: 1, 1: 1, 2: 1})
        await b.change_members(5, {}, failure=TrainerLost("late").to_problem())
        assert b.run.schedule.members == {0: 1, 1: 1}
        assert b.run.failure is None


@pytest.mark.parametrize("code", ["stale_trainer", "stale_run"])
async def test_a_get_ends_when_its_trainer_is_removed_or_its_run_replaced(code):
    async with bench() as b:
        await b.push(1, 1)
        get = asyncio.create_task(b.get(1, 1, with_barrier=True))
        await asyncio.sleep(0.01)
        await (b.change_members(2, {0: 1}) if code == "stale_trainer" else b.install_next_run())
        await asyncio.wait_for(refused(code, get), 1)
        del get
        assert await b.settle_used_bytes(0) == 0


async def test_a_late_installation_of_a_replaced_run_does_not_bring_it_back():
    async with bench() as b:
        await b.install_next_run()
        with pytest.raises(StaleRun):
            await b.pserver.install_run(b.install)
        assert b.run.installed.run == "run2"
        with pytest.raises(StalePserver):
            await b.install_next_run("run3", incarnation=9)
        assert b.run.installed.run == "run2"


async def test_the_same_installation_again_changes_nothing_but_brings_newer_members():
    async with bench() as b:
        await b.push(0, 1)
        digest = await b.digest()
        await b.pserver.install_run(b.install)
        assert await b.digest() == digest
        await b.pserver.install_run(b.install.model_copy(update={"number": 9, "membership": Membership({0: 1})}))
        assert b.run.schedule.members == {0: 1}
        other = replace(b.install.plan, buffers=(BufferSpec("mean", (2,), "F32", 0),))
        with pytest.raises(Conflict):
            await b.pserver.install_run(b.install.model_copy(update={"plan": other}))
        await b.change_members(9, {0: 1, 1: 1})  # the number came with the installation
        assert b.run.schedule.members == {0: 1}


async def test_an_initial_upload_that_is_cancelled_at_its_end_can_be_repeated():
    async with bench(initial=False) as b:
        release = await keep_busy(b)
        upload = asyncio.create_task(b.upload_initial())
        await asyncio.sleep(0.01)
        upload.cancel()
        await asyncio.gather(upload, return_exceptions=True)
        await release()
        await b.upload_initial()
        assert decode(await b.get(1, 0, wait_seconds=1))[1]["round"] == "0"


async def test_the_request_that_completed_the_barrier_may_go_away():
    async with bench(1) as b:
        await b.push(0, 1)
        get = asyncio.create_task(b.get(0, 1, with_barrier=True))
        release = await keep_busy(b)
        await asyncio.sleep(0.01)
        assert b.run.schedule.applying
        get.cancel()
        await asyncio.gather(get, return_exceptions=True)
        await release()
        assert decode(await b.get(0, 1, wait_seconds=5))[1]["round"] == "1"


async def test_an_apply_that_fails_ends_every_wait():
    async with bench() as b:
        b.run.shard.apply = failing(RuntimeError("out of memory"))
        await b.push(0, 1)
        await b.push(1, 1)
        get = asyncio.create_task(b.get(0, 1, with_barrier=True))
        await asyncio.sleep(0.01)
        await b.barrier(1, 1)
        with raises_code("apply_failed", match=r"pserver 0 failed in round 1: out of memory"):
            await asyncio.wait_for(get, 2)
        with raises_code("apply_failed"):
            await b.push(0, 2)
        assert b.run.schedule.applying is not None  # no checkpoint is made of it


async def test_a_log_that_hangs_is_reported_and_fails_the_run_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync_run, "STALLED_SECONDS", 0.0)
    async with bench(2, state_dir=tmp_path, durability="log", round_timeout_seconds=0.2) as b:
        release = await keep_busy(b)  # as a write that does not return
        for rank in (0, 1):
            await b.push(rank, 1)
        get = asyncio.create_task(b.get(0, 1, with_barrier=True))
        assert not b.pserver.make_heartbeat().is_stalled
        await b.barrier(1, 1)
        await until(lambda: b.pserver.make_heartbeat().is_stalled)
        with raises_code("storage_failed", match="cannot log round 1: the disk does not answer"):
            await get
        await release()
