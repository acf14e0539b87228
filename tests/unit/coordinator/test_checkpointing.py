"""Checkpoints of the whole model, and a place for them that hangs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from ps_protocol.errors import NotReady, StaleRound, TryAgain
from ps_protocol.membership import Controls, Membership
from ps_protocol.messages import WantCheckpoint
from ps_protocol.routes import WANT_CHECKPOINT
from services.coordinator import checkpointing
from services.coordinator.administration import Administration
from services.coordinator.checkpointing import CheckpointSchedule
from services.coordinator.cluster import Cluster
from services.coordinator.run import Run

from .coordinating import FakePservers, answering, begin, coordinating, eventually
from .support import beat, leaving, make_cluster, shard_file, train

pytestmark = pytest.mark.asyncio


class Writers(FakePservers):
    """Pservers that are asked for checkpoints, and may be past the round that is named."""

    def __init__(self) -> None:
        super().__init__()
        self.named: list[int] = []  # rounds that pserver 0 was asked for
        self.rounds = [0, 0]

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path != WANT_CHECKPOINT:
            return await super().__call__(request)
        index, message = int(request.url.host), WantCheckpoint.model_validate_json(request.content)
        if index == 0:
            self.named.append(message.round)
        if message.round < self.rounds[index]:
            raise StaleRound("it is over", current=self.rounds[index])
        return httpx.Response(204)

    def tell(self, cluster: Cluster, *, written: Sequence[Sequence[int]], coming: Sequence[Sequence[int]]) -> None:
        """Heartbeats of both pservers: the shards that they have written, and those that they are about to write."""
        for index in (0, 1):
            cluster.pserver_heartbeat(
                index,
                beat(
                    run=cluster.run.name, round_=self.rounds[index], coming_checkpoints=tuple(coming[index]),
                    checkpoints=tuple(shard_file(index, round_) for round_ in written[index]),
                ),
                1.0,
            )  # fmt: skip


@asynccontextmanager
async def scheduling(**settings: Any) -> AsyncIterator[tuple[Cluster, Writers, CheckpointSchedule]]:
    """A run that trains, with a checkpoint of round 0 and an interval of 5 rounds; the clock stands at 1."""
    cluster = make_cluster(**{"durability": "log", "on_trainer_loss": "wait", "checkpoint_rounds": 5, **settings})
    train(cluster)
    cluster.complete_checkpoints[:], cluster.checkpoints_known_for = [0], (cluster.run.name, 0)
    writers = Writers()
    writers.tell(cluster, written=[[0], [0]], coming=[[], []])
    async with httpx.AsyncClient(transport=httpx.MockTransport(answering(writers))) as http:
        yield cluster, writers, CheckpointSchedule(cluster, http, lambda: 1.0)


async def test_a_round_is_named_when_the_one_before_is_complete_and_not_earlier():
    async with scheduling() as (cluster, writers, schedule):
        await schedule.advance()
        await schedule.advance()
        assert writers.named == [5]
        writers.rounds = [13, 14]
        writers.tell(cluster, written=[[0, 5], [0]], coming=[[], [5]])  # one of the disks is slow
        await schedule.advance()
        assert writers.named == [5]
        writers.tell(cluster, written=[[0, 5], [0, 5]], coming=[[], []])  # the manifest is missing
        await schedule.advance()
        assert writers.named == [5]
        cluster.complete_checkpoints[:] = [5, 0]
        await schedule.advance()
        assert writers.named == [5, 15]


async def test_a_coordinator_that_was_restarted_waits_for_the_checkpoint_that_is_open():
    async with scheduling() as (cluster, writers, schedule):
        writers.tell(cluster, written=[[0], [0]], coming=[[5], [5]])
        await schedule.advance()
        assert writers.named == []


async def test_a_pserver_that_cannot_write_makes_all_try_a_later_round(monkeypatch):
    monkeypatch.setattr(checkpointing, "RETRY_SECONDS", 0.0)
    async with scheduling() as (cluster, writers, schedule):
        await schedule.advance()
        writers.rounds = [5, 5]
        writers.tell(cluster, written=[[0, 5], [0]], coming=[[], []])
        await schedule.advance()
        assert writers.named == [5, 10]
        assert schedule.num_failures == 1


async def test_a_later_round_is_named_if_a_pserver_has_passed_the_one_that_was_named():
    async with scheduling() as (_, writers, schedule):
        writers.rounds = [4, 12]  # as of after the heartbeats
        await schedule.advance()
        assert writers.named == [5, 15]


async def test_without_an_interval_none_is_made_until_one_is_asked_for():
    async with scheduling(durability="none", checkpoint_rounds=None) as (cluster, writers, schedule):
        writers.rounds = [7, 7]
        writers.tell(cluster, written=[[0], [0]], coming=[[], []])
        await schedule.advance()
        assert writers.named == []
        assert schedule.request() == 7
        await schedule.advance()
        assert writers.named == [7]


async def test_one_that_is_asked_for_does_not_wait_for_the_round_of_the_next():
    async with scheduling() as (cluster, writers, schedule):
        writers.rounds = [7, 6]
        writers.tell(cluster, written=[[0], [0]], coming=[[10], [10]])
        schedule.request()
        await schedule.advance()
        assert writers.named == [7]


async def test_one_that_was_asked_for_is_named_once():
    """The heartbeats that say how far the pservers are may be a second old."""
    async with scheduling() as (cluster, writers, schedule):
        writers.rounds = [6, 6]
        writers.tell(cluster, written=[[0], [0]], coming=[[], []])
        writers.rounds = [7, 7]  # as of after the heartbeats
        schedule.request()
        await schedule.advance()
        await schedule.advance()
        assert writers.named == [6, 8]


async def test_one_that_was_asked_for_is_made_once():
    """The schedule may advance before the request for the checkpoint is answered."""
    async with scheduling() as (cluster, writers, schedule):
        writers.rounds = [7, 7]
        writers.tell(cluster, written=[[0], [0]], coming=[[], []])
        schedule.request()
        await schedule.advance()
        writers.rounds = [8, 8]
        writers.tell(cluster, written=[[0, 7], [0, 7]], coming=[[], []])
        cluster.complete_checkpoints.append(7)
        await schedule.advance()
        assert writers.named == [7, 10]  # the next one that is due


async def test_what_was_asked_for_in_a_run_is_not_made_in_the_next_attempt():
    async with scheduling() as (cluster, writers, schedule):
        writers.rounds = [7, 7]
        writers.tell(cluster, written=[[0], [0]], coming=[[], []])
        schedule.request()
        cluster.run.attempt, cluster.checkpoints_known_for = 1, (cluster.run.name, 1)
        for member in cluster.registry.members.values():
            member.attempt = 1
        await schedule.advance()
        assert writers.named == [10]


async def test_a_checkpoint_needs_every_pserver():
    async with coordinating(FakePservers(), lease_seconds=30) as coordinator:
        [trainer, _] = begin(coordinator)
        await coordinator.wait_for_plan(*trainer, 5)
        coordinator.cluster.registry.members.clear()
        with pytest.raises(NotReady, match="needs every pserver"):
            await Administration(coordinator).checkpoint("me")


async def test_who_wants_a_checkpoint_of_a_run_that_fails_meanwhile_hears_of_it_at_once():
    async with coordinating(FakePservers(), lease_seconds=30) as coordinator:
        [_, trainer] = begin(coordinator)
        await coordinator.wait_for_plan(*trainer, 5)
        made = asyncio.create_task(Administration(coordinator).checkpoint("me"))
        await asyncio.sleep(0.05)
        rank, run, incarnation = trainer
        coordinator.cluster.leave_trainer(rank, leaving("failed", run=run, incarnation=incarnation), coordinator.now())
        coordinator.changed()
        with pytest.raises(NotReady, match="no run is training"):
            await asyncio.wait_for(made, 5)


async def test_a_checkpoint_that_never_comes_about_is_given_up(monkeypatch):
    monkeypatch.setattr(checkpointing, "RETRY_SECONDS", 0.0)
    writers = Writers()
    async with coordinating(writers, lease_seconds=30) as coordinator:
        [trainer, _] = begin(coordinator)
        await coordinator.wait_for_plan(*trainer, 5)
        cluster, made = coordinator.cluster, asyncio.create_task(Administration(coordinator).checkpoint("me"))
        while not made.done():
            writers.tell(cluster, written=[[], []], coming=[[], []])  # they could not write it
            coordinator.changed()
            await asyncio.sleep(0.005)
        with pytest.raises(TryAgain, match="no checkpoint of round 0 or later is complete"):
            await made
        assert len(writers.named) >= 12


async def test_pservers_of_a_paused_asynchronous_run_do_not_get_to_a_common_number():
    writers = Writers()
    async with coordinating(writers, lease_seconds=30, mode="async") as coordinator:
        [trainer, _] = begin(coordinator)
        await coordinator.wait_for_plan(*trainer, 5)
        coordinator.cluster.run.membership = Membership({}, controls=(Controls(is_paused=True),))
        writers.rounds = [94, 93]
        writers.tell(coordinator.cluster, written=[[], []], coming=[[], []])
        with pytest.raises(TryAgain, match=r"is paused, and its pservers have taken \[93, 94\] contributions"):
            await asyncio.wait_for(Administration(coordinator).checkpoint("me"), 5)
        assert writers.named == []


async def test_the_last_checkpoint_holds_what_pservers_have_taken_meanwhile(monkeypatch):
    """Asynchronous pushes that nobody waited for: they are applied after the trainer has gone."""
    asked: list[int] = []

    async def want(http: object, member: object, run: str, round_: int, *, is_over: bool) -> None:
        asked.append(round_)
        if round_ < 95:
            raise StaleRound("later contributions than 90 have been committed", current=95)

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
        loop, is_asked = asyncio.get_running_loop(), asyncio.Event()

        def hang(_: str) -> list[str]:
            loop.call_soon_threadsafe(is_asked.set)
            is_let_go.wait(20)
            return []

        monkeypatch.setattr(coordinator.place, "list", hang)
        trainers = begin(coordinator)
        cluster = coordinator.cluster
        await eventually(lambda: cluster.run.state == "training")
        await asyncio.wait_for(is_asked.wait(), 5)
        rank, run, incarnation = trainers[2]
        cluster.leave_trainer(rank, leaving("failed", run=run, incarnation=incarnation), coordinator.now())
        coordinator.changed()
        await eventually(lambda: all(taken[-1].membership.members == {0: 1, 1: 1} for taken in pservers.taken.values()))
    assert not is_let_go.is_set()
    is_let_go.set()


async def test_what_a_run_leaves_is_recorded_once(monkeypatch):
    """Else a coordinator that waits for the next run would be busy with the last one for ever."""
    async with coordinating(FakePservers(), lease_seconds=0.4) as coordinator:
        cluster, recorded = coordinator.cluster, []
        keep = coordinator._finish_run

        async def keep_and_note(run: Run) -> None:
            await keep(run)
            recorded.append(run)

        monkeypatch.setattr(coordinator, "_finish_run", keep_and_note)
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
