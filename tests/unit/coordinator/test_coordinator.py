"""The shell: waiting for pservers does not stop the clock, and nobody hears of what the disk does not have."""

from __future__ import annotations

import asyncio
import errno
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from ps_protocol.errors import NotReady, StorageFailed, TrainerLost
from ps_protocol.fields import Message
from ps_protocol.messages import InstallMembers, PserverState
from ps_protocol.routes import DECLARE_MODEL, JOIN_TRAINER, LEAVE, REGISTER_PSERVER
from services.coordinator.app import make_coordinator_app
from services.coordinator.coordinator import Coordinator
from services.coordinator.record import ClusterRecord, RecordFile, RunRecord, TrainerRecord
from services.coordinator.settings import CoordinatorSettings
from services.runtime.metrics import ServiceMetrics

from .coordinating import FakePservers, begin, coordinating, eventually
from .support import alive, beat, joining, leaving, model, registration

pytestmark = pytest.mark.asyncio


async def test_leases_end_while_a_pserver_keeps_the_coordinator_waiting():
    pservers = FakePservers()

    async def hang(message: object) -> None:
        if isinstance(message, InstallMembers):
            await asyncio.sleep(1.5)

    pservers.answer["1"] = hang
    async with coordinating(pservers) as coordinator:
        trainers = begin(coordinator)
        await eventually(lambda: coordinator.cluster.run.state == "training")
        run, cluster = trainers[0][1], coordinator.cluster
        cluster.leave_trainer(1, leaving(run=run), coordinator.now())  # pserver 1 is told, and hangs
        coordinator.changed()
        begun = coordinator.now()
        while cluster.run.failure is None:
            cluster.pserver_heartbeat(0, beat(run=run), coordinator.now())
            cluster.pserver_heartbeat(1, beat(run=run), coordinator.now())
            await asyncio.sleep(0.05)
        assert isinstance(cluster.run.failure, TrainerLost)  # trainer 0 has been silent
        assert coordinator.now() - begun < 1.2


async def test_a_pause_of_the_coordinator_is_nobodys_fault():
    """It could not hear the heartbeats: every lease begins anew, and then counts as ever."""
    async with coordinating(FakePservers()) as coordinator:
        begin(coordinator)
        await eventually(lambda: coordinator.cluster.run.state == "training")
        time.sleep(0.7)  # noqa: ASYNC251 - SIGSTOP, SIGCONT
        await asyncio.sleep(0.2)
        assert coordinator.cluster.run.failure is None
        await eventually(lambda: coordinator.cluster.run.failure is not None)


class SlowFile:
    """Of the records it writes the first such one only when it may."""

    def __init__(self, coordinator: Coordinator, is_slow: Callable[[RunRecord], bool]) -> None:
        self.is_asked, self.may_write = threading.Event(), threading.Event()
        self.newest: RunRecord | None = None
        write = coordinator._file.write

        def write_slowly(record: ClusterRecord) -> None:
            if record.run is not None and is_slow(record.run):
                self.is_asked.set()
                assert self.may_write.wait(10)
            write(record)
            self.newest = record.run

        coordinator._file.write = write_slowly  # type: ignore[method-assign]


async def test_nobody_trains_before_the_disk_has_it_that_the_run_has_begun():
    """Another life of the coordinator would begin it anew, and pservers would forget what they have logged."""
    pservers = FakePservers()
    async with coordinating(pservers, lease_seconds=30) as coordinator:
        file = SlowFile(coordinator, lambda run: run.state == "training")
        [trainer, _] = begin(coordinator)
        waiting = asyncio.create_task(coordinator.wait_for_plan(*trainer, 20))
        assert await asyncio.to_thread(file.is_asked.wait, 10)
        await asyncio.sleep(0.05)
        assert not waiting.done()
        with pytest.raises(NotReady):
            await coordinator.wait_for_plan(*trainer, 0.01)
        file.may_write.set()
        assert (await waiting).start == 1
        assert file.newest is not None
        assert file.newest.state == "training"


async def test_nobody_hears_of_a_rollback_before_the_disk_has_it():
    """Trainers that followed would be ahead of another life of the coordinator."""
    pservers = FakePservers()
    async with coordinating(pservers, lease_seconds=30, on_trainer_loss="wait", durability="log") as coordinator:
        [trainer, other] = begin(coordinator)
        await coordinator.wait_for_plan(*trainer, 5)
        file, cluster = SlowFile(coordinator, lambda run: run.attempt == 1), coordinator.cluster
        pservers.empty.add("1")
        rank, run, incarnation = other
        cluster.leave_trainer(rank, leaving("failed", run=run, incarnation=incarnation), coordinator.now())
        coordinator.changed()
        assert await asyncio.to_thread(file.is_asked.wait, 10)
        reply = cluster.trainer_heartbeat(0, alive(run=run), coordinator.now())
        assert (reply.attempt, reply.resume) == (0, 0)
        joining_again = asyncio.create_task(coordinator.keep())  # of another request: it must not undo the decision
        file.may_write.set()
        await joining_again
        await eventually(lambda: cluster.run.attempt == 1)
        reply = cluster.trainer_heartbeat(0, alive(run=run), coordinator.now())
        assert (reply.attempt, reply.resume) == (1, 4)
        assert file.newest is not None
        assert (file.newest.attempt, file.newest.resume) == (1, 4)


async def test_nothing_is_acknowledged_that_the_disk_does_not_have(monkeypatch):
    """Else another life of the coordinator would not know of it."""
    async with coordinating(FakePservers(), lease_seconds=30, num_trainers=1) as coordinator:
        app = make_coordinator_app(coordinator, ServiceMetrics("coordinator"))
        transport = httpx.ASGITransport(app)
        headers = {"content-type": "application/json"}
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=headers) as http:
            file, is_full = coordinator._file, True
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
                record = RecordFile(coordinator._settings.state_dir).read()
                assert record is not None
                assert record.run is not None
                return record.run.trainers[0]

            for index in (0, 1):
                await post(REGISTER_PSERVER, registration(str(index), index=index))
            run = (await post(JOIN_TRAINER, joining("a", 0)))["run"]
            assert not trainer_on_disk().declared
            await post(DECLARE_MODEL.format(rank=0), model(run=run))
            assert trainer_on_disk().declared
            await coordinator.wait_until(lambda: coordinator.cluster.run.state == "training", 5)
            await post(LEAVE.format(rank=0), leaving(run=run))
            assert trainer_on_disk().state == "done"


async def test_one_coordinator_at_a_time_uses_a_folder(tmp_path):
    settings = CoordinatorSettings(state_dir=tmp_path)
    async with httpx.AsyncClient() as http:
        one, other = Coordinator(settings, http), Coordinator(settings, http)
        await one.recall()
        with pytest.raises(StorageFailed, match="another coordinator uses"):
            await other.recall()
        stop = asyncio.Event()
        stop.set()
        await one.run(stop)
        await other.recall()
        await other.run(stop)


async def test_all_who_ask_after_the_same_round_hear_the_same_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trainers print them at the end, and one may be slower than another by then."""
    async with httpx.AsyncClient() as http:
        coordinator = Coordinator(CoordinatorSettings(state_dir=tmp_path), http)

    async def ask(round_: int, now: float) -> tuple[int, float]:
        async def answer(_: object) -> list[PserverState]:
            facts = {"index": 0, "transports": (), "shard_bytes": 0, "pushed_bytes": 0, "pulled_bytes": 0}
            return [PserverState.model_construct(run=coordinator.cluster.run.name, round=round_, **facts)]

        monkeypatch.setattr(coordinator, "ask_pservers", answer)
        monkeypatch.setattr(coordinator, "now", lambda: now)
        summary = await coordinator.summary()
        return summary.rounds, summary.seconds

    assert await ask(0, 5.0) == (0, 0.0)
    coordinator.cluster.run.started_at = 10.0
    assert await ask(0, 11.0) == (0, 1.0)  # not less than nothing: the round is the same as before the start
    assert [await ask(7, 12.0), await ask(7, 13.0), await ask(8, 14.0)] == [(7, 2.0), (7, 2.0), (8, 4.0)]


async def test_waits_that_are_given_up_hold_nothing() -> None:
    """Who closes an event stream is cancelled again and again until it is over, as anyio does."""
    async with coordinating(FakePservers(), lease_seconds=30) as coordinator, asyncio.timeout(10):
        for _ in range(20):
            waits = [asyncio.create_task(coordinator.wait_until(lambda: False, 30)) for _ in range(5)]
            for _ in range(3):
                await asyncio.sleep(0)
            while not all(wait.done() for wait in waits):
                for wait in waits:
                    wait.cancel()
                coordinator.changed()
                await asyncio.sleep(0)
            assert all(wait.cancelled() for wait in waits)
        await coordinator.wait_until(lambda: True, 1)
