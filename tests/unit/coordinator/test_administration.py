"""What an administrator asks for and cannot have leaves the run as it is; what takes its time is no failure."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from ps_protocol.errors import Conflict, NotFound, TryAgain
from services.coordinator import administration
from services.coordinator.administration import Administration
from services.coordinator.metrics import measure_cluster

from .coordinating import FakePservers, begin, coordinating, eventually
from .support import alive, leaving

pytestmark = pytest.mark.asyncio


async def test_nobody_goes_back_without_those_who_are_done() -> None:
    """They would not take their steps again, so that the run would fail: it was not asked for that."""
    async with coordinating(FakePservers(), lease_seconds=30, on_trainer_loss="wait", durability="log") as coordinator:
        [first, second] = begin(coordinator)
        await coordinator.wait_for_plan(*first, 5)
        cluster = coordinator.cluster
        cluster.trainer_heartbeat(1, alive(run=second[1], round_=4), coordinator.now())
        cluster.leave_trainer(1, leaving("done", run=second[1], round=4), coordinator.now())
        cluster.complete_checkpoints[:] = [2]
        with pytest.raises(Conflict, match="trainer 1"):
            await Administration(coordinator).roll_back("me", 2)
        assert cluster.run.state == "training"
        assert cluster.run.rollback_to is None
        assert [entry.outcome for entry in coordinator.audit.entries()] == ["requested", "failed"]


async def test_a_checkpoint_that_goes_while_another_change_is_under_way_is_not_gone_back_to() -> None:
    """The run would fail: no pserver could restore it."""
    pservers, goes_on = FakePservers(), asyncio.Event()
    async with coordinating(pservers, lease_seconds=30, on_trainer_loss="wait", durability="log") as coordinator:
        [first, _] = begin(coordinator)
        await coordinator.wait_for_plan(*first, 5)
        coordinator.cluster.complete_checkpoints[:] = [2]
        administrator = Administration(coordinator)

        async def hang(_: Any) -> None:
            await goes_on.wait()

        pservers.answer["0"] = hang
        pausing = asyncio.create_task(administrator.pause("me"))
        await asyncio.sleep(0)
        going_back = asyncio.create_task(administrator.roll_back("me", 2))
        await eventually(lambda: coordinator.cluster.run.is_changing)
        coordinator.cluster.complete_checkpoints[:] = [4]
        goes_on.set()
        await pausing
        with pytest.raises(NotFound, match="of this run there are: 4"):
            await going_back
        assert coordinator.cluster.run.rollback_to is None


async def test_what_is_under_way_has_not_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pserver takes longer than an administrator waits; the change comes about all the same."""
    monkeypatch.setattr(administration, "WAIT_SECONDS", 0.1)
    pservers, goes_on = FakePservers(), asyncio.Event()
    async with coordinating(pservers, lease_seconds=30, on_trainer_loss="wait", durability="log") as coordinator:
        [first, _] = begin(coordinator)
        await coordinator.wait_for_plan(*first, 5)

        async def hang(_: Any) -> None:
            await goes_on.wait()

        pservers.answer["0"] = hang
        with pytest.raises(TryAgain, match="under way"):
            await Administration(coordinator).pause("me")
        assert [entry.outcome for entry in coordinator.audit.entries()] == ["requested"]
        goes_on.set()
        run = coordinator.cluster.run
        await eventually(lambda: bool(run.membership.controls) and run.installed_number == run.number)
        assert run.membership.newest_controls.is_paused
        await eventually(lambda: len(coordinator.audit.entries()) == 2)  # nobody asks any more
        last = coordinator.audit.entries()[-1]
        assert (last.number, last.outcome, last.round) == (1, "done", run.membership.newest_controls.since)


async def test_what_is_asked_for_while_all_have_to_go_back_counts_from_there_on() -> None:
    """A pserver has lost the end of its log, and the change of members becomes a rollback."""
    pservers = FakePservers()
    async with coordinating(pservers, lease_seconds=30, on_trainer_loss="wait", durability="log") as coordinator:
        [first, _] = begin(coordinator)
        await coordinator.wait_for_plan(*first, 5)
        administrator, run = Administration(coordinator), coordinator.cluster.run
        await administrator.set_rate("me", 0.5, None)
        pservers.short.add("0")
        done = await administrator.pause("me")
        assert (run.attempt, run.wanted) == (1, None)
        assert (done.round, done.controls.is_paused, done.controls.rates) == (5, True, {0: 0.5})
        for taken in pservers.taken.values():
            controls = taken[-1].membership.controls
            assert [(one.since, one.is_paused, one.rates) for one in controls] == [(5, True, {0: 0.5})]


async def test_a_rollback_to_a_checkpoint_that_pservers_cannot_restore_is_refused() -> None:
    pservers = FakePservers()
    async with coordinating(pservers, lease_seconds=30, on_trainer_loss="wait", durability="log") as coordinator:
        [first, _] = begin(coordinator)
        await coordinator.wait_for_plan(*first, 5)
        administrator = Administration(coordinator)
        coordinator.cluster.complete_checkpoints[:] = [3]
        pservers.ranges = [[0, 2]]
        run = coordinator.cluster.run
        with pytest.raises(Conflict, match="not every pserver can restore round 3"):
            await administrator.roll_back("me", 3)
        assert [entry.outcome for entry in coordinator.audit.entries()] == ["requested", "failed"]
        assert (run.state, run.attempt, run.rollback_to) == ("training", 0, None)
        pservers.ranges = [[3, 3], [0, 2]]
        assert (await administrator.roll_back("me", 3)).round == 4


@pytest.mark.parametrize("obstacle", ["a trainer leaves", "a pserver does not answer"])
async def test_a_rollback_is_refused_when_something_comes_between(obstacle: str) -> None:
    """Only the administrator wants the run to go back, so it does not fail for that."""
    pservers = FakePservers()
    async with coordinating(pservers, lease_seconds=30, on_trainer_loss="wait", durability="log") as coordinator:
        [first, second] = begin(coordinator)
        await coordinator.wait_for_plan(*first, 5)
        cluster = coordinator.cluster
        cluster.trainer_heartbeat(1, alive(run=second[1], round_=4), coordinator.now())
        cluster.complete_checkpoints[:] = [2]
        if obstacle == "a trainer leaves":
            message = leaving("done", run=second[1], round=4, attempt=0)
            pservers.on_freeze = lambda: cluster.leave_trainer(1, message, coordinator.now())
            expected = "trainer 1 cannot take the rounds after 2 again, being done; the run goes on"
        else:
            pservers.pages.append(httpx.Response(500, text="a shard cannot be read"))
            expected = "a pserver did not say what it can restore"
        with pytest.raises(Conflict, match=expected):
            await Administration(coordinator).roll_back("me", 2)
        assert (cluster.run.state, cluster.run.attempt) == ("training", 0)
        assert [entry.outcome for entry in coordinator.audit.entries()] == ["requested", "failed"]


@pytest.mark.parametrize("attempt", [0, None, 1])
async def test_a_trainer_that_leaves_with_rounds_that_are_undone_has_not_trained_them(attempt: int | None) -> None:
    """It learns of the rollback only with its next step, and there is none."""
    async with coordinating(FakePservers(), lease_seconds=30, on_trainer_loss="wait", durability="log") as coordinator:
        [first, second] = begin(coordinator)
        await coordinator.wait_for_plan(*first, 5)
        run = coordinator.cluster.run
        coordinator.cluster.complete_checkpoints[:] = [2]
        await Administration(coordinator).roll_back("me", 2)
        coordinator.cluster.leave_trainer(
            1, leaving("done", run=second[1], round=4, attempt=attempt), coordinator.now()
        )
        if attempt == 0:
            assert run.failure is not None
            assert run.failure.code == "pserver_lost"
            assert "rounds 3 to 4 are lost, and trainer 1 cannot take them again" in run.failure.detail
        else:  # the trainer has taken them again, or the request does not say of which attempt they are
            assert run.failure is None


async def test_a_checkpoint_that_takes_its_time_keeps_nobody_from_going_on() -> None:
    async with coordinating(FakePservers(), lease_seconds=30, on_trainer_loss="wait", durability="log") as coordinator:
        [first, _] = begin(coordinator)
        await coordinator.wait_for_plan(*first, 5)
        administrator = Administration(coordinator)
        await administrator.pause("me")
        made = asyncio.create_task(administrator.checkpoint("me"))
        await eventually(lambda: coordinator.audit.entries()[-1].action == "checkpoint")
        async with asyncio.timeout(10):
            await administrator.resume("me")
        coordinator.cluster.complete_checkpoints[:] = [4]
        await eventually(made.done)
        assert (await made).round == 4
        done = [(entry.number, entry.action) for entry in coordinator.audit.entries() if entry.outcome == "done"]
        assert sorted(done) == [(1, "pause"), (2, "checkpoint"), (3, "resume")]


async def test_who_is_evicted_counts_as_no_loss() -> None:
    """An alert about it would stand to the end of the run."""
    registry = CollectorRegistry()
    async with coordinating(FakePservers(), lease_seconds=30, on_trainer_loss="wait", durability="log") as coordinator:
        [first, _] = begin(coordinator)
        await coordinator.wait_for_plan(*first, 5)
        measure_cluster(coordinator.cluster, registry)
        await Administration(coordinator).evict("me", 1)
        assert coordinator.cluster.run.trainers[1].state == "lost"
        assert registry.get_sample_value("gradpost_trainers_gone") == 0
        coordinator.cluster.run.trainers[1].why = "trainer 1 has said nothing for 30 s"
        assert registry.get_sample_value("gradpost_trainers_gone") == 1
