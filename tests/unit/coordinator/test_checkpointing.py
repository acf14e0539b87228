"""When checkpoints of the whole model are made, and what happens if one fails."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from ps_protocol.errors import NotReady, StaleRound, TryAgain
from ps_protocol.membership import Controls, Membership, WantCheckpoint
from ps_protocol.routes import WANT_CHECKPOINT
from services.coordinator import checkpointing
from services.coordinator.administration import Administration
from services.coordinator.checkpointing import CheckpointSchedule
from services.coordinator.cluster import Cluster
from services.coordinator.run import Run

from .coordinating import FakePservers, answering, eventually, leave, training
from .support import beat, make_cluster, shard_file, train

pytestmark = pytest.mark.asyncio


class Writers(FakePservers):
    """Pservers that receive requests for checkpoints, and may be past the requested round."""

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

    def report(
        self, cluster: Cluster, *, written: Sequence[Sequence[int]] = ([0], [0]), coming: Sequence[int] = ()
    ) -> None:
        """Send heartbeats of both pservers with their shards, and with the rounds in `coming` that they will write."""
        for index in (0, 1):
            files = tuple(shard_file(index, round_) for round_ in written[index])
            changes = {"coming_checkpoints": tuple(set(coming) - set(written[index])), "checkpoints": files}
            cluster.pserver_heartbeat(index, beat(run=cluster.run.name, round_=self.rounds[index], **changes), 1.0)


Scheduled = tuple[Cluster, Writers, CheckpointSchedule]


@asynccontextmanager
async def scheduling(rounds: Sequence[int] = (0, 0), **settings: Any) -> AsyncIterator[Scheduled]:
    """Yield a run in these rounds with an interval of 5, a checkpoint of round 0, and a clock that stands at 1."""
    cluster = make_cluster(**{"durability": "log", "on_trainer_loss": "wait", "checkpoint_rounds": 5, **settings})
    train(cluster)
    cluster.complete_checkpoints[:], cluster.checkpoints_known_for = [0], (cluster.run.name, 0)
    writers = Writers()
    writers.rounds = list(rounds)
    writers.report(cluster)
    async with httpx.AsyncClient(transport=httpx.MockTransport(answering(writers))) as http:
        yield cluster, writers, CheckpointSchedule(cluster, http, lambda: 1.0)


async def test_the_next_checkpoint_is_requested_when_the_one_before_is_complete():
    async with scheduling() as (cluster, writers, schedule):
        for _ in range(2):
            await schedule.advance()
            assert writers.named == [5]
        writers.rounds = [13, 14]
        for written in ([[0, 5], [0]], [[0, 5], [0, 5]]):  # a slow disk, then a missing manifest
            writers.report(cluster, written=written, coming=[5])
            await schedule.advance()
            assert writers.named == [5]
        cluster.complete_checkpoints[:] = [5, 0]
        await schedule.advance()
        assert writers.named == [5, 15]


async def test_a_restarted_coordinator_waits_for_the_checkpoint_that_is_being_written():
    async with scheduling() as (cluster, writers, schedule):
        writers.report(cluster, coming=[5])
        await schedule.advance()
        assert writers.named == []


async def test_a_pserver_that_cannot_write_makes_all_try_a_later_round(monkeypatch):
    monkeypatch.setattr(checkpointing, "RETRY_SECONDS", 0.0)
    async with scheduling() as (cluster, writers, schedule):
        await schedule.advance()
        writers.rounds = [5, 5]
        writers.report(cluster, written=[[0, 5], [0]])
        await schedule.advance()
        assert (writers.named, schedule.num_failures) == ([5, 10], 1)


async def test_a_later_round_is_requested_if_a_pserver_is_past_the_requested_one():
    async with scheduling() as (_, writers, schedule):
        writers.rounds = [4, 12]  # after the heartbeats
        await schedule.advance()
        assert writers.named == [5, 15]


async def test_without_an_interval_a_checkpoint_is_made_on_request_only():
    async with scheduling([7, 7], durability="none", checkpoint_rounds=None) as (_, writers, schedule):
        await schedule.advance()
        assert writers.named == []
        assert schedule.request() == 7
        await schedule.advance()
        assert writers.named == [7]


async def test_a_requested_checkpoint_does_not_wait_for_the_scheduled_one():
    async with scheduling([7, 6]) as (cluster, writers, schedule):
        writers.report(cluster, coming=[10])
        schedule.request()
        await schedule.advance()
        assert writers.named == [7]


async def test_a_requested_checkpoint_is_made_once():
    """The heartbeats may be a second old, and the schedule may advance before the request is answered."""
    async with scheduling([6, 6]) as (cluster, writers, schedule):
        writers.rounds = [7, 7]
        schedule.request()
        for _ in range(2):
            await schedule.advance()
            assert writers.named == [6, 8]
        writers.rounds = [9, 9]
        writers.report(cluster, written=[[0, 8], [0, 8]])
        cluster.complete_checkpoints.append(8)
        await schedule.advance()
        assert writers.named == [6, 8, 10]  # the next scheduled one


async def test_a_requested_checkpoint_is_not_made_in_the_next_attempt():
    async with scheduling([7, 7]) as (cluster, writers, schedule):
        schedule.request()
        cluster.run.attempt, cluster.checkpoints_known_for = 1, (cluster.run.name, 1)
        for member in cluster.registry.members.values():
            member.attempt = 1
        await schedule.advance()
        assert writers.named == [10]


async def test_a_checkpoint_needs_every_pserver():
    async with training() as coordinator:
        coordinator.cluster.registry.members.clear()
        with pytest.raises(NotReady, match="needs every pserver"):
            await Administration(coordinator).checkpoint("me")


async def test_a_request_for_a_checkpoint_ends_when_the_run_fails():
    async with training(on_trainer_loss="fail") as coordinator:
        made = asyncio.create_task(Administration(coordinator).checkpoint("me"))
        await asyncio.sleep(0.05)
        leave(coordinator, 1, "failed")
        with pytest.raises(NotReady, match="no run is training"):
            await asyncio.wait_for(made, 5)


async def test_a_requested_checkpoint_that_fails_repeatedly_is_given_up(monkeypatch):
    monkeypatch.setattr(checkpointing, "RETRY_SECONDS", 0.0)
    writers = Writers()
    async with training(writers, durability="none", on_trainer_loss="fail") as coordinator:
        made = asyncio.create_task(Administration(coordinator).checkpoint("me"))
        while not made.done():
            writers.report(coordinator.cluster, written=[[], []])
            coordinator.changed()
            await asyncio.sleep(0.005)
        with pytest.raises(TryAgain, match="no checkpoint of round 0 or later is complete"):
            await made
        assert len(writers.named) >= 12


async def test_a_paused_asynchronous_run_with_unequal_pservers_has_no_checkpoint():
    writers = Writers()
    async with training(writers, durability="none", on_trainer_loss="fail", mode="async") as coordinator:
        coordinator.cluster.run.membership = Membership({}, controls=(Controls(is_paused=True),))
        writers.rounds = [94, 93]
        writers.report(coordinator.cluster, written=[[], []])
        with pytest.raises(TryAgain, match=r"is paused, and its pservers have taken \[93, 94\] contributions"):
            await asyncio.wait_for(Administration(coordinator).checkpoint("me"), 5)
        assert writers.named == []


async def test_the_last_checkpoint_contains_pushes_that_are_applied_after_the_trainers_have_left(monkeypatch):
    requested: list[int] = []

    async def want(http: object, member: object, run: str, round_: int, *, is_over: bool) -> None:
        requested.append(round_)
        if round_ < 95:
            raise StaleRound("later contributions than 90 have been committed", current=95)

    monkeypatch.setattr("services.coordinator.coordinator.want_checkpoint", want)
    async with training() as coordinator:
        run = coordinator.cluster.run.name
        assert await coordinator._write_result(run, 90) == 95
        assert await coordinator._write_result(run, 95) is None
        assert requested == [90, 90, 95, 95]


async def test_a_place_that_hangs_delays_neither_a_change_of_members_nor_the_end_of_the_process(monkeypatch):
    pservers, may_go_on = FakePservers(), threading.Event()
    async with training(pservers, num_trainers=3, on_trainer_loss="continue", durability="none") as coordinator:
        is_listing = threading.Event()

        def hang(_: str) -> list[str]:
            is_listing.set()
            may_go_on.wait(20)
            return []

        coordinator.cluster.checkpoints_known_for = None
        monkeypatch.setattr(coordinator.place, "list", hang)
        coordinator.changed()
        await eventually(is_listing.is_set)
        leave(coordinator, 2, "failed")
        await eventually(lambda: all(taken[-1].membership.members == {0: 1, 1: 1} for taken in pservers.taken.values()))
    assert not may_go_on.is_set()
    may_go_on.set()


async def test_the_result_of_a_run_is_recorded_once(monkeypatch):
    """Otherwise a coordinator that waits for the next run would never be idle."""
    async with training(lease_seconds=0.4, durability="none", on_trainer_loss="fail") as coordinator:
        cluster, recorded, checks = coordinator.cluster, [], []
        keep = coordinator._finish_run

        async def keep_and_note(run: Run) -> None:
            await keep(run)
            recorded.append(run)

        monkeypatch.setattr(coordinator, "_finish_run", keep_and_note)
        for rank in (0, 1):
            leave(coordinator, rank)
        await eventually(lambda: bool(recorded))
        monkeypatch.setattr(cluster, "start_run_if_complete", checks.append)
        for _ in range(5):
            coordinator.changed()
            await asyncio.sleep(0.05)
        assert len(recorded) == 1
        assert len(checks) < 20  # these five, and some for leases and heartbeats
