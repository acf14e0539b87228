"""Rounds that somebody has ended, and pservers that come back without them."""

from __future__ import annotations

from dataclasses import replace

import httpx
import pytest

from ps_protocol.messages import FrozenRounds, HeldRun
from services.coordinator.coordinator import Coordinator

from .coordinating import FakePservers, begin, coordinating, eventually
from .support import alive, beat, leaving, registration

pytestmark = pytest.mark.asyncio


async def test_a_pserver_that_is_short_rounds_takes_everybody_back_though_nobody_else_knows_of_them():
    """All trainers who had pulled them may have died: else their next lives would take other steps in those rounds."""
    pservers = FakePservers()
    async with coordinating(pservers, lease_seconds=30, on_trainer_loss="wait", durability="log") as coordinator:
        [trainer, _] = begin(coordinator)
        await coordinator.wait_for_plan(*trainer, 5)
        pservers.short.add("0")
        pservers.pages += [
            httpx.Response(502, content=b"<h1>Bad Gateway</h1>"),
            httpx.Response(502, json={"message": "upstream connect error"}),
            httpx.Response(200, content=b"?"),
        ]
        coordinator.cluster.register_pserver(registration("0", index=0), coordinator.now())
        coordinator.cluster.run.number += 1
        coordinator.changed()
        await eventually(lambda: coordinator.cluster.run.attempt == 1)
        assert coordinator.cluster.run.resume == 4


@pytest.mark.parametrize(
    ("reported", "round_", "attempt", "goes_back"),
    [
        (5, 5, 0, True),
        (5, 4, 0, False),
        (4, 5, 0, False),  # some clients send the round that is in progress
        (5, 9, 1, False),
    ],
)
async def test_what_a_trainer_has_received_is_remembered_when_it_is_gone(reported, round_, attempt, goes_back):
    """A pserver comes back without the newest round: its log was cut off, and the trainer that had it has died."""
    pservers = FakePservers()  # they have applied round 4
    async with coordinating(pservers, lease_seconds=30, on_trainer_loss="wait", durability="log") as coordinator:
        [trainer, _] = begin(coordinator)
        await coordinator.wait_for_plan(*trainer, 5)
        cluster = coordinator.cluster
        cluster.pserver_heartbeat(0, beat(run=trainer[1], round_=reported), coordinator.now())
        message = alive(run=trainer[1], round_=round_).model_copy(update={"attempt": attempt})
        cluster.trainer_heartbeat(0, message, coordinator.now())
        cluster.leave_trainer(0, leaving("failed", run=trainer[1]), coordinator.now())
        coordinator.changed()
        await eventually(lambda: all(len(taken) == 2 for taken in pservers.taken.values()))
        assert cluster.run.attempt == goes_back
        if goes_back:
            assert (cluster.run.resume, cluster.run.pulled) == (4, 0)


@pytest.mark.parametrize("has_trained", [True, False])
async def test_initial_values_do_not_do_once_a_round_was_ended(has_trained):
    """All pservers have lost their disks: what a trainer could send as initial values is what it has trained."""
    pservers = FakePservers()
    async with coordinating(pservers, lease_seconds=30, on_trainer_loss="wait", durability="log") as coordinator:
        [trainer, _] = begin(coordinator)
        await coordinator.wait_for_plan(*trainer, 5)
        cluster = coordinator.cluster
        cluster.trainer_heartbeat(0, alive(run=trainer[1], round_=5 * has_trained), coordinator.now())
        pservers.empty |= {"0", "1"}
        pservers.ranges = []
        cluster.run.number += 1
        coordinator.changed()
        await eventually(lambda: cluster.run.is_over or cluster.run.attempt == 1)
        assert (cluster.run.failure is not None and cluster.run.failure.code == "pserver_lost") == has_trained


async def test_where_a_newcomer_begins_is_nothing_that_it_has_ended():
    async with coordinating(FakePservers(), lease_seconds=30, on_trainer_loss="wait", durability="log") as coordinator:
        [trainer, _] = begin(coordinator)
        await coordinator.wait_for_plan(*trainer, 5)
        run = coordinator.cluster.run
        run.membership = replace(run.membership, starts={0: 7})
        for round_, pulled in ((6, 0), (7, 7)):
            coordinator.cluster.trainer_heartbeat(0, alive(run=trainer[1], round_=round_), coordinator.now())
            assert run.pulled == pulled


def come_back(coordinator: Coordinator, *, with_round: int | None) -> None:
    """Pserver 0 is started again and registers; with a round it has restored that from its disk."""
    run = coordinator.cluster.run
    held = None
    if with_round is not None:
        assert run.plan is not None
        rounds = FrozenRounds(applied=with_round)
        held = HeldRun(run=run.name, attempt=run.attempt, plan=run.plan.digest, rounds=rounds, restorable=((0, 4),))
    request = registration("0", index=0, previous=1, held=held).model_copy(update={"instance": "another process"})
    coordinator.cluster.register_pserver(request, coordinator.now())
    coordinator.changed()


@pytest.mark.parametrize(
    ("restored", "received", "named", "reported", "goes_back"),
    [
        (4, 5, 2, None, True),
        (4, 5, 1, None, False),  # an earlier incarnation is named
        (4, 4, 2, None, False),  # nothing is lost
        (4, 9, 2, 5, False),  # the pserver has applied a round since it came back
        (None, 0, 1, 4, False),  # the pserver was never away: a trainer's word alone
    ],
)
async def test_a_trainer_takes_back_a_run_only_if_a_pserver_has_come_back_with_less(
    restored, received, named, reported, goes_back
):
    async with coordinating(FakePservers(), lease_seconds=30, on_trainer_loss="wait", durability="log") as coordinator:
        [trainer, _] = begin(coordinator)
        await coordinator.wait_for_plan(*trainer, 5)
        cluster, run = coordinator.cluster, coordinator.cluster.run
        if restored is not None:
            come_back(coordinator, with_round=restored)
            await eventually(lambda: not run.is_changing)
        if reported is not None:
            life = cluster.registry.members[0].info.incarnation
            cluster.pserver_heartbeat(0, beat(life, run.name, reported), coordinator.now())
        report = alive(run=run.name, round_=received).model_copy(update={"ahead_of": {0: named}})
        for _ in range(2):  # the second one changes nothing more
            cluster.trainer_heartbeat(0, report, coordinator.now())
        assert run.is_changing == goes_back
        coordinator.changed()
        await eventually(lambda: not run.is_changing)
        assert run.attempt == goes_back
        if goes_back:
            [event] = [event for event in coordinator.events.after(0) if event.kind == "rollback"]
            assert "pserver 0 came back with round 4, and trainer 0 has received round 5" in event.text
