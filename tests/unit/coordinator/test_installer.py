"""Decisions reach the pservers whatever goes wrong on the way."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from ps_protocol.errors import BadModel, NotReady, StalePserver, StorageFailed, TrainerLost, TryAgain
from ps_protocol.messages import InstallMembers, InstallRun

from ...raising import raises_code
from .coordinating import FakePservers, begin, coordinating, eventually
from .support import joining, leaving

pytestmark = pytest.mark.asyncio


async def test_a_run_is_installed_everywhere_before_trainers_get_the_plan():
    pservers = FakePservers()
    free = asyncio.Event()

    async def wait(_: object) -> None:
        await free.wait()

    pservers.answer["1"] = wait
    async with coordinating(pservers, lease_seconds=30) as coordinator:
        [trainer, _] = begin(coordinator)
        waiting = asyncio.create_task(coordinator.wait_for_plan(*trainer, 20))
        await eventually(lambda: len(pservers.taken["0"]) == 1)
        assert not waiting.done()
        assert coordinator.cluster.run.state == "gathering"
        free.set()
        ready = await asyncio.wait_for(waiting, 2)
        assert [p.index for p in ready.pservers] == [0, 1]
        assert pservers.told("0") == pservers.told("1") == [("InstallRun", trainer[1], 4)]


async def test_a_wait_for_the_plan_says_what_it_waits_for():
    async with coordinating(FakePservers()) as coordinator:
        coordinator.cluster.join_trainer(joining("a", 0), coordinator.now())
        run = coordinator.cluster.run.name
        with pytest.raises(NotReady, match="pserver 0, pserver 1, trainer 0 to declare its model, trainer 1"):
            await coordinator.wait_for_plan(0, run, 1, 0.01)


async def test_an_installation_whose_response_was_lost_is_repeated():
    pservers = FakePservers()
    lost: list[InstallRun | InstallMembers] = []

    async def lose(message: InstallRun | InstallMembers) -> None:
        if not lost:
            lost.append(message)
            pservers.taken["0"].append(message)
            raise httpx.ReadTimeout("lost")

    pservers.answer["0"] = lose
    async with coordinating(pservers, lease_seconds=30) as coordinator:
        begin(coordinator)
        await eventually(lambda: coordinator.cluster.run.state == "training")
        assert [kind for kind, _, _ in pservers.told("0")] == ["InstallRun", "InstallRun"]


async def test_a_pserver_that_does_not_know_yet_who_it_is_is_asked_again():
    """The installation may overtake the answer to its registration."""
    pservers = FakePservers()
    refusals = [StalePserver("this installation was meant for another life of this pserver")] * 2

    async def refuse(_: object) -> None:
        if refusals:
            raise refusals.pop()

    pservers.answer["1"] = refuse
    async with coordinating(pservers, lease_seconds=30) as coordinator:
        begin(coordinator)
        await eventually(lambda: coordinator.cluster.run.state == "training")


async def test_a_pserver_that_cannot_be_changed_for_long_ends_the_run_though_it_lives():
    pservers = FakePservers()
    tries = 0

    async def refuse(_: object) -> None:
        nonlocal tries
        tries += 1
        raise TryAgain("pserver 1 cannot open the state of the run: no space left on device")

    pservers.answer["1"] = refuse
    async with coordinating(pservers, lease_seconds=30, rejoin_timeout_seconds=0.5) as coordinator:
        [trainer, _] = begin(coordinator)
        with raises_code("pserver_lost", match=r"no change could be carried out for 0\.5 s: .* no space left"):
            await asyncio.wait_for(coordinator.wait_for_plan(*trainer, 20), 5)
    assert tries > 1


@pytest.mark.parametrize(
    ("refusal", "failure"),
    [
        (BadModel("the shard does not fit into memory"), "pserver_lost"),
        (StorageFailed("pserver-1-of-2.safetensors is damaged"), "storage_failed"),
    ],
)
async def test_a_pserver_that_cannot_serve_the_run_ends_it(refusal, failure):
    pservers = FakePservers()

    async def refuse(message: object) -> None:
        if isinstance(message, InstallRun):
            raise refusal

    pservers.answer["1"] = refuse
    async with coordinating(pservers, lease_seconds=30) as coordinator:
        [trainer, _] = begin(coordinator)
        with raises_code(failure, match=f"pserver 1 cannot serve the run: {refusal.detail}"):
            await asyncio.wait_for(coordinator.wait_for_plan(*trainer, 20), 5)


async def test_a_failure_reaches_every_pserver_and_every_waiting_trainer():
    pservers = FakePservers()
    async with coordinating(pservers, lease_seconds=30) as coordinator:
        trainers = begin(coordinator)
        await eventually(lambda: coordinator.cluster.run.state == "training")
        coordinator.cluster.leave_trainer(1, leaving("failed", run=trainers[1][1], reason="no data"), coordinator.now())
        coordinator.changed()
        await eventually(lambda: all(len(taken) == 2 for taken in pservers.taken.values()))
        for taken in pservers.taken.values():
            assert isinstance(taken[1], InstallMembers)
            assert taken[1].failure is not None
            assert taken[1].failure["detail"] == "trainer 1 failed: no data"
        errors = await asyncio.gather(
            *(coordinator.wait_for_plan(*trainers[0], 5) for _ in range(2)), return_exceptions=True
        )
        assert [type(e) for e in errors] == [TrainerLost, TrainerLost]
        assert errors[0] is not errors[1]


async def test_a_run_that_begins_in_the_middle_of_a_reconciliation_is_left_to_the_next():
    pservers = FakePservers()
    async with coordinating(pservers, lease_seconds=30) as coordinator:
        trainers = begin(coordinator)
        await eventually(lambda: coordinator.cluster.run.state == "training")
        cluster, now = coordinator.cluster, coordinator.now()
        for rank, run, incarnation in trainers:
            cluster.leave_trainer(rank, leaving(run=run, incarnation=incarnation), now)
        reconciling = asyncio.create_task(coordinator._installer.reconcile())
        await asyncio.sleep(0)  # it has seen the old run, and not begun to ask the pservers
        cluster.join_trainer(joining("next", 0), now)
        await reconciling
        assert cluster.run.name != trainers[0][1]
        assert {kind for kind, run, _ in pservers.told("0") if run == cluster.run.name} == set()


async def test_members_are_told_in_their_newest_state_only():
    pservers = FakePservers()
    free = asyncio.Event()

    async def wait(message: object) -> None:
        if isinstance(message, InstallMembers):
            await free.wait()

    pservers.answer["0"] = pservers.answer["1"] = wait
    async with coordinating(pservers, lease_seconds=30, num_trainers=3) as coordinator:
        trainers = begin(coordinator)
        await eventually(lambda: coordinator.cluster.run.state == "training")
        for rank, run, incarnation in trainers[:2]:
            coordinator.cluster.leave_trainer(rank, leaving(run=run, incarnation=incarnation), coordinator.now())
            coordinator.changed()
            await asyncio.sleep(0.01)
        free.set()
        await eventually(lambda: all(taken[-1].membership.members == {2: 1} for taken in pservers.taken.values()))
        numbers = [number for _, _, number in pservers.told("0")]
        assert numbers == sorted(set(numbers))
