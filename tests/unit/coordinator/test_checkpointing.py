"""Checkpoints of the whole model, and a place for them that hangs."""

from __future__ import annotations

import asyncio
import threading

import pytest

from ps_protocol.errors import NotReady, StaleRound
from services.coordinator.checkpointing import create_checkpoint
from services.coordinator.run import Run

from .coordinating import FakePservers, begin, coordinating, eventually
from .support import beat, join_all, leaving, registration

pytestmark = pytest.mark.asyncio


async def test_a_checkpoint_needs_every_pserver():
    async with coordinating(FakePservers()) as coordinator:
        cluster = coordinator.cluster
        for index in range(2):
            cluster.register_pserver(registration(str(index), index=index), coordinator.now())
        join_all(cluster, coordinator.now())
        coordinator.changed()
        await coordinator.wait_until(lambda: cluster.run.state == "training", 5)
        assert cluster.run.state == "training"
        cluster.registry.members.clear()
        with pytest.raises(NotReady, match="needs every pserver"):
            await create_checkpoint(coordinator)


async def test_who_wants_a_checkpoint_of_a_run_that_fails_meanwhile_hears_of_it_at_once(monkeypatch):
    is_asked = asyncio.Event()

    async def want(http: object, member: object, run: str, round_: int) -> None:
        is_asked.set()

    monkeypatch.setattr("services.coordinator.checkpointing.want_checkpoint", want)
    async with coordinating(FakePservers(), lease_seconds=30) as coordinator:
        [_, trainer] = begin(coordinator)
        await coordinator.wait_for_plan(*trainer, 5)
        made = asyncio.create_task(create_checkpoint(coordinator))
        await is_asked.wait()
        rank, run, incarnation = trainer
        coordinator.cluster.leave_trainer(rank, leaving("failed", run=run, incarnation=incarnation), coordinator.now())
        coordinator.changed()
        with pytest.raises(NotReady, match="no run is training"):
            await asyncio.wait_for(made, 5)


async def test_the_last_checkpoint_holds_what_pservers_have_taken_meanwhile(monkeypatch):
    """Asynchronous pushes that nobody waited for: they are applied after the trainer has gone."""
    asked: list[int] = []

    async def want(http: object, member: object, run: str, round_: int, *, is_over: bool) -> None:
        asked.append(round_)
        if round_ < 95:
            raise StaleRound("contribution 90 was taken before others", current=95)

    monkeypatch.setattr("services.coordinator.coordinator.want_checkpoint", want)
    async with coordinating(FakePservers(), lease_seconds=30) as coordinator:
        [trainer, _] = begin(coordinator)
        assert await coordinator._write_result(trainer[1], 90) == 95
        assert await coordinator._write_result(trainer[1], 95) is None
        assert asked == [90, 90, 95, 95]


async def test_a_place_that_hangs_holds_up_no_change_of_members(monkeypatch):
    """Neither that of a checkpoint's manifest, nor the end of the process."""
    pservers, is_let_go = FakePservers(), threading.Event()
    async with coordinating(pservers, lease_seconds=30, num_trainers=3, on_trainer_loss="continue") as coordinator:
        trainers = begin(coordinator)
        cluster, place = coordinator.cluster, coordinator.place
        await eventually(lambda: cluster.run.state == "training")
        is_asked = asyncio.Event()

        def hang(_: str) -> list[str]:
            coordinator_loop.call_soon_threadsafe(is_asked.set)
            is_let_go.wait(20)
            return []

        coordinator_loop = asyncio.get_running_loop()
        monkeypatch.setattr(place, "list", hang)
        for index in (0, 1):
            cluster.pserver_heartbeat(index, beat(run=cluster.run.name), coordinator.now())
        coordinator.changed()
        await asyncio.wait_for(is_asked.wait(), 5)
        rank, run, incarnation = trainers[2]
        cluster.leave_trainer(rank, leaving("failed", run=run, incarnation=incarnation), coordinator.now())
        coordinator.changed()
        await eventually(lambda: all(taken[-1].members == {0: 1, 1: 1} for taken in pservers.taken.values()))
    assert not is_let_go.is_set()
    is_let_go.set()


async def test_what_a_run_leaves_is_recorded_once(monkeypatch):
    """Else a coordinator that waits for the next run would be busy with the last one for ever."""
    async with coordinating(FakePservers(), lease_seconds=0.4) as coordinator:
        cluster, recorded = coordinator.cluster, []
        keep = coordinator._keep_summary_and_result

        async def keep_and_note(run: Run) -> None:
            await keep(run)
            recorded.append(run)

        monkeypatch.setattr(coordinator, "_keep_summary_and_result", keep_and_note)
        trainers = begin(coordinator)
        await eventually(lambda: cluster.run.state == "training")
        for rank, run, incarnation in trainers:
            cluster.leave_trainer(rank, leaving("done", run=run, incarnation=incarnation), coordinator.now())
        coordinator.changed()
        await eventually(lambda: bool(recorded))
        looks = 0

        def look() -> None:
            nonlocal looks
            looks += 1

        monkeypatch.setattr(cluster, "start_run_if_complete", lambda now: look())
        for _ in range(5):
            coordinator.changed()
            await asyncio.sleep(0.05)
        assert len(recorded) == 1
        assert looks < 20  # those five, and some for leases and heartbeats
