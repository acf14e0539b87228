"""The coordinator's event loop: it changes pservers despite faults, and acknowledges only what is on its disk."""

from __future__ import annotations

import asyncio
import errno
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from ps_protocol.errors import (
    BadModel,
    NotReady,
    StalePserver,
    StorageFailed,
    TryAgain,
)
from ps_protocol.fields import Message
from ps_protocol.membership import Controls, InstallMembers, InstallRun
from ps_protocol.routes import DECLARE_MODEL, JOIN_TRAINER, LEAVE, REGISTER_PSERVER
from services.coordinator.administration import Administration, StopRun
from services.coordinator.coordinator import Coordinator
from services.coordinator.process import make_coordinator_app
from services.coordinator.settings import CoordinatorSettings
from services.coordinator.shell import RecordFile
from services.coordinator.state.record import ClusterRecord, RunRecord, TrainerRecord
from services.runtime.metrics import ServiceMetrics

from ...raising import raises_code
from .coordinating import FakePservers, begin, coordinating, eventually, heartbeat, leave, training
from .support import alive, joining, leaving, model, registration

# ---------------------------------------------------------------- changes of pservers


@pytest.mark.parametrize(
    ("error", "num_installations"),
    [
        (httpx.ReadTimeout("the response was lost"), 2),
        # The installation may arrive before the response to the registration.
        (StalePserver("the installation is for another incarnation of pserver 0"), 1),
    ],
)
async def test_an_installation_is_repeated(error: Exception, num_installations: int) -> None:
    pservers = FakePservers()
    errors = [error]

    async def fail(message: InstallRun | InstallMembers) -> None:
        if errors:
            if num_installations == 2:
                pservers.taken["0"].append(message)
            raise errors.pop()

    pservers.answer["0"] = fail
    async with coordinating(pservers, lease_seconds=30) as coordinator:
        begin(coordinator)
        await eventually(lambda: coordinator.cluster.run.record.state == "training")
        assert [kind for kind, _, _ in pservers.told("0")] == ["InstallRun"] * num_installations


@pytest.mark.parametrize(
    ("refusal", "failure", "reason"),
    [
        (BadModel("too large"), "pserver_lost", "pserver 1 cannot serve the run: too large"),
        (StorageFailed("it is damaged"), "storage_failed", "pserver 1 cannot serve the run: it is damaged"),
        (TryAgain("no space left"), "pserver_lost", r"no change could be installed for 0\.5 s: .*no space left"),
    ],
)
async def test_a_pserver_that_cannot_install_the_run_ends_it(refusal: Exception, failure: str, reason: str) -> None:
    pservers = FakePservers()
    num_attempts = 0

    async def refuse(message: object) -> None:
        nonlocal num_attempts
        num_attempts += isinstance(message, InstallRun)
        if isinstance(message, InstallRun) or isinstance(refusal, TryAgain):
            raise refusal

    pservers.answer["1"] = refuse
    async with coordinating(pservers, lease_seconds=30, rejoin_timeout_seconds=0.5) as coordinator:
        [trainer, _] = begin(coordinator)
        with raises_code(failure, match=reason):
            await asyncio.wait_for(coordinator.wait_for_plan(*trainer, 20), 5)
    assert (num_attempts > 1) == isinstance(refusal, TryAgain)


# ---------------------------------------------------------------- time


async def test_a_pause_of_the_coordinator_renews_every_lease_once():
    async with training(lease_seconds=1.0, on_trainer_loss="fail") as coordinator:
        time.sleep(1.5)  # noqa: ASYNC251 - as between SIGSTOP and SIGCONT: no heartbeat can be received
        await asyncio.sleep(0.5)
        assert coordinator.cluster.run.record.failure is None
        await eventually(lambda: coordinator.cluster.run.record.failure is not None)


# ---------------------------------------------------------------- the end of a run, and a place that hangs


async def test_a_place_that_hangs_delays_neither_a_change_of_members_nor_the_end_of_the_process(monkeypatch):
    pservers, may_go_on = FakePservers(), threading.Event()
    async with training(pservers, num_trainers=3, on_trainer_loss="continue", durability="none") as coordinator:
        is_listing = threading.Event()

        def hang(_: str) -> list[str]:
            is_listing.set()
            may_go_on.wait(20)
            return []

        monkeypatch.setattr(coordinator.checkpoints.place, "list", hang)
        coordinator.cluster.run = coordinator.cluster.run.add_checkpoint(0, 0)
        coordinator.changed()
        await eventually(is_listing.is_set)
        leave(coordinator, 2, "failed")
        await eventually(lambda: all(taken[-1].membership.members == {0: 1, 1: 1} for taken in pservers.taken.values()))
    assert not may_go_on.is_set()
    may_go_on.set()


# ---------------------------------------------------------------- the disk


class SlowFile:
    """Delays the first matching write of the coordinator's record until `may_write` is set."""

    def __init__(self, coordinator: Coordinator, is_slow: Callable[[RunRecord], bool]) -> None:
        self.is_writing, self.may_write = threading.Event(), threading.Event()
        self.newest: RunRecord | None = None
        write = coordinator.file.write

        def write_slowly(record: ClusterRecord) -> None:
            if record.run is not None and is_slow(record.run):
                self.is_writing.set()
                assert self.may_write.wait(10)
            write(record)
            self.newest = record.run

        coordinator.file.write = write_slowly


async def test_no_trainer_begins_before_the_disk_has_the_beginning_of_the_run():
    """A restarted coordinator would begin the run again, and pservers would forget what they have logged."""
    async with coordinating(FakePservers(), lease_seconds=30) as coordinator:
        file = SlowFile(coordinator, lambda run: run.state == "training")
        [trainer, _] = begin(coordinator)
        waiting = asyncio.create_task(coordinator.wait_for_plan(*trainer, 20))
        assert await asyncio.to_thread(file.is_writing.wait, 10)
        await asyncio.sleep(0.05)
        assert not waiting.done()
        with pytest.raises(NotReady):
            await coordinator.wait_for_plan(*trainer, 0.01)
        file.may_write.set()
        assert (await waiting).start == 1
        assert file.newest.state == "training"


async def test_a_stop_is_answered_once_the_disk_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.coordinator.administration.END_SECONDS", 0.0)  # no trainer leaves
    async with training() as coordinator:
        file = SlowFile(coordinator, lambda run: run.is_over)
        stopping = asyncio.create_task(Administration(coordinator).stop("admin", StopRun(fail=True)))
        assert await asyncio.to_thread(file.is_writing.wait, 10)
        await asyncio.sleep(0.05)
        assert not stopping.done()
        file.may_write.set()
        await stopping
        assert file.newest is not None
        assert file.newest.is_over


async def test_no_trainer_learns_of_a_rollback_before_the_disk_has_it():
    """Its rounds would be ahead of those of a restarted coordinator."""
    pservers = FakePservers()
    async with training(pservers) as coordinator:
        file, cluster = SlowFile(coordinator, lambda run: run.attempt == 1), coordinator.cluster
        message = alive(run=cluster.run.record.name)
        pservers.empty.add("1")
        leave(coordinator, 1, "failed")
        assert await asyncio.to_thread(file.is_writing.wait, 10)
        reply = cluster.trainer_heartbeat(0, message, coordinator.now())
        assert (reply.attempt, reply.resume) == (0, 0)
        another_request = asyncio.create_task(coordinator.persist())  # must not undo the decision
        file.may_write.set()
        await another_request
        await eventually(lambda: cluster.run.record.attempt == 1)
        reply = cluster.trainer_heartbeat(0, message, coordinator.now())
        assert (reply.attempt, reply.resume) == (1, 4)
        assert (file.newest.attempt, file.newest.base_round) == (1, 4)


@pytest.mark.parametrize("wait", ["freeze", "disk", "installation"])
async def test_no_message_is_lost_that_arrives_while_a_change_waits(wait: str) -> None:
    pservers = FakePservers()
    async with training(pservers, num_trainers=3) as coordinator:
        cluster, controls = coordinator.cluster, Controls(is_paused=True)

        def receive() -> None:
            heartbeat(coordinator, 0, 7)
            cluster.run = cluster.run.request_controls(controls)
            leave(coordinator, 2, round=7)

        async def receive_once(_: object) -> None:
            if 2 in cluster.run.record.members:
                receive()

        if wait == "freeze":
            pservers.on_freeze = receive
        elif wait == "installation":
            pservers.answer["0"] = receive_once
        file = SlowFile(coordinator, lambda run: wait == "disk" and 1 not in run.membership.members)
        leave(coordinator, 1)
        if wait == "disk":
            assert await asyncio.to_thread(file.is_writing.wait, 10)
            receive()
            file.may_write.set()
        await eventually(lambda: cluster.run.record.membership.members == {0: 1} and not cluster.run.is_changing)
        run = cluster.run
        assert (run.reports[0].round, run.newest_received, run.record.trainers[2].round) == (7, 7, 7)
        assert (run.record.membership.newest_controls.is_paused, run.wanted_controls) == (True, None)


async def test_no_request_is_acknowledged_before_the_disk_has_its_change(monkeypatch):
    async with coordinating(FakePservers(), lease_seconds=30, num_trainers=1) as coordinator:
        transport = httpx.ASGITransport(make_coordinator_app(coordinator, ServiceMetrics("coordinator")))
        headers = {"content-type": "application/json"}
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=headers) as http:
            file, is_full = coordinator.file, True
            write = file.write

            def write_if_there_is_room(record: ClusterRecord) -> None:
                if is_full:
                    raise OSError(errno.ENOSPC, "no space left on device")
                write(record)

            monkeypatch.setattr(file, "write", write_if_there_is_room)

            async def post(path: str, message: Message) -> dict[str, Any]:
                nonlocal is_full
                is_full = True
                answer = await http.post(path, content=message.model_dump_json())
                assert (answer.status_code, answer.json()["code"]) == (503, "try_again")
                is_full = False
                answer = await http.post(path, content=message.model_dump_json())
                answer.raise_for_status()
                return answer.json() if answer.content else {}

            def trainer_on_disk() -> TrainerRecord:
                record = RecordFile(coordinator.settings.state_dir).read()
                return record.run.trainers[0]

            for index in (0, 1):
                await post(REGISTER_PSERVER, registration(str(index), index=index))
            run = (await post(JOIN_TRAINER, joining("a", 0)))["run"]
            assert not trainer_on_disk().has_declared
            await post(DECLARE_MODEL.format(rank=0), model(run=run))
            assert trainer_on_disk().has_declared
            await coordinator.wait_until(lambda: coordinator.cluster.run.record.state == "training", 5)
            await post(LEAVE.format(rank=0), leaving(run=run))
            assert trainer_on_disk().state == "done"


async def test_one_coordinator_at_a_time_uses_a_folder(tmp_path):
    settings = CoordinatorSettings(state_dir=tmp_path)
    async with httpx.AsyncClient() as http:
        one, other = Coordinator(settings, http), Coordinator(settings, http)
        await one.restore()
        with pytest.raises(StorageFailed, match="another coordinator uses"):
            await other.restore()
        stop = asyncio.Event()
        stop.set()
        await one.run(stop)
        await other.restore()
        await other.run(stop)
