"""A pserver registers, sends heartbeats and writes its last checkpoint before it stops."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog
from prometheus_client import CollectorRegistry

from ps_protocol.errors import StorageFailed, Unauthenticated
from ps_protocol.membership import PserverRegistered, RegisterPserver, WantCheckpoint
from services.pserver import registration
from services.pserver.durable import snapshots
from services.pserver.durable.disk import Disk, StateFolder
from services.pserver.durable.snapshot_writer import Publisher
from services.pserver.metrics import PserverMetrics
from services.pserver.pserver import Pserver
from services.pserver.registration import Registration
from services.pserver.settings import PserverSettings
from services.runtime.compute import ComputeExecutor

from .support import LIMITS, bench, hold

REGISTERED = {"index": 0, "incarnation": 1, "lease_seconds": 0.03}
HEARTBEAT_REPLY = {"complete": [], "notice": "", "stop": False, "exit_code": 0}


@asynccontextmanager
async def registration_of(answer: Any, folder: Path, *, exits: bool = False, **settings: Any) -> AsyncIterator[Any]:
    """A pserver that serves a run, and its registration with a coordinator that gives these answers."""
    async with (
        bench(state_dir=folder, **settings) as one,
        httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http,
    ):
        yield one, Registration(one.pserver, PserverSettings(state_dir=folder, exit_when_done=exits), http)


async def test_a_page_of_a_proxy_is_no_answer_and_one_401_does_not_end_a_pserver(tmp_path: Path) -> None:
    answers: list[object] = [
        "<h1>Bad Gateway</h1>",
        httpx.Response(502, json={"message": "upstream connect error"}),
        httpx.Response(401, json=Unauthenticated("no valid token").to_problem()),
        httpx.ReadTimeout(""),
        REGISTERED,
        "<h1>Bad Gateway</h1>",
        {**HEARTBEAT_REPLY, "stop": True},
    ]
    stop = asyncio.Event()

    def answer(request: httpx.Request) -> httpx.Response:
        one = answers.pop(0) if answers else {}
        if isinstance(one, Exception):
            raise one
        if isinstance(one, httpx.Response):
            return one
        return httpx.Response(200, text=one) if isinstance(one, str) else httpx.Response(200, json=one)

    async with registration_of(answer, tmp_path, exits=True) as (one, staying):
        with structlog.testing.capture_logs() as logs:
            await asyncio.wait_for(staying.run("http://pserver:1", stop), 10)
        assert (stop.is_set(), answers, staying.exit_code) == (True, [], 0)
        hints = ["its address begins with https:" in line["event"] for line in logs if "waiting for" in line["event"]]
        assert hints == [False, False, True]  # a page is an answer
        await one.install_next_run()


async def test_a_pserver_follows_the_standby_that_has_locked_the_newest_folder_of_its_index(tmp_path: Path) -> None:
    StateFolder(tmp_path, 0).close()  # of a former pserver, which has followed since
    successor, compute, stop = StateFolder(tmp_path, 0, 1), ComputeExecutor(), asyncio.Event()
    successor.write_identity(2, None)
    metrics = PserverMetrics(CollectorRegistry(), compute)
    pserver = Pserver(compute, metrics, LIMITS, disk=Disk(tmp_path))
    async with httpx.AsyncClient(transport=httpx.MockTransport(lambda _: httpx.Response(500))) as http:
        returning = Registration(pserver, PserverSettings(state_dir=tmp_path, pserver_index=0), http)
        await asyncio.wait_for(returning.run("http://pserver:1", stop), 10)
    assert (returning.next_role, returning.exit_code, stop.is_set()) == ({"follow": 0}, 0, True)
    successor.close()
    compute.close()


async def test_the_coordinator_is_notified_of_a_failure_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registration, "heartbeat_period", lambda _: 3600.0)
    stop, said = asyncio.Event(), asyncio.Event()
    failures: list[object] = []

    def answer(request: httpx.Request) -> httpx.Response:
        if not request.url.path.endswith("/heartbeat"):
            return httpx.Response(200, json=REGISTERED)
        failures.append(json.loads(request.content)["failure"])
        said.set()
        return httpx.Response(200, json=HEARTBEAT_REPLY)

    async with registration_of(answer, tmp_path) as (one, staying):
        running = asyncio.create_task(staying.run("http://pserver:1", stop))
        await asyncio.wait_for(said.wait(), 10)
        said.clear()
        await one.install_next_run()
        await one.run.end(StorageFailed("the disk is full"), is_failure=True)
        await asyncio.wait_for(said.wait(), 10)
        assert failures == [None, StorageFailed("the disk is full").to_problem()]
        stop.set()
        await asyncio.wait_for(running, 10)


async def test_a_storage_that_hangs_does_not_keep_a_pserver_from_stopping(tmp_path, monkeypatch):
    is_let_go, stop = threading.Event(), asyncio.Event()
    stop.set()
    async with registration_of(lambda _: httpx.Response(404), tmp_path) as (one, staying):
        await one.play_round(1)
        await one.wait_until_published()
        monkeypatch.setattr(Publisher, "_copy", lambda *_: is_let_go.wait(20))
        await one.pserver.want_checkpoint(WantCheckpoint(run=one.install.run, round=1))
        await asyncio.wait_for(staying.run("http://pserver:1", stop), 5)
        assert not is_let_go.is_set()
        is_let_go.set()
        await one.wait_until_published()


async def test_a_folder_that_hangs_does_not_keep_a_pserver_from_stopping(tmp_path, monkeypatch):
    stop = asyncio.Event()
    stop.set()
    async with registration_of(lambda _: httpx.Response(404), tmp_path) as (one, staying):
        await one.play_round(1)
        _, is_let_go = hold(monkeypatch, snapshots, "write_file")
        monkeypatch.setattr(registration, "LAST_CHECKPOINT_SECONDS", 0.2)
        with structlog.testing.capture_logs() as logs:
            await asyncio.wait_for(staying.run("http://pserver:1", stop), 5)
        assert "the last checkpoint was not written in time" in [line["event"] for line in logs]
        is_let_go.set()


async def test_a_folder_that_fails_to_read_is_asked_again_before_a_pserver_registers(tmp_path, monkeypatch):
    async with bench(state_dir=tmp_path) as one:
        await one.play_round(1)
        await one.pserver.want_checkpoint(WantCheckpoint(run=one.install.run, round=1))
        await one.wait_until_published()
    read, errors, stop = snapshots.read_file, [OSError("Input/output error")], asyncio.Event()
    registered: list[RegisterPserver] = []

    def read_badly(path: Path) -> memoryview:
        if errors:
            raise errors.pop()
        return read(path)

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("heartbeat"):
            return httpx.Response(404)
        registered.append(RegisterPserver.model_validate_json(request.content))
        stop.set()
        return httpx.Response(200, json={"index": 0, "incarnation": 2, "lease_seconds": 10})

    monkeypatch.setattr(snapshots, "read_file", read_badly)
    monkeypatch.setattr(registration, "RETRY_SECONDS", 0.01)
    compute = ComputeExecutor()
    pserver = Pserver(compute, PserverMetrics(CollectorRegistry(), compute), LIMITS, disk=Disk(tmp_path))
    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
        staying = Registration(pserver, PserverSettings(state_dir=tmp_path), http)
        with structlog.testing.capture_logs() as logs:
            await asyncio.wait_for(staying.run("http://pserver:1", stop), 10)
    compute.close()
    text = f"pserver 0 cannot read its state in {tmp_path / 'pserver-0'}: Input/output error"
    assert text in [line["event"] for line in logs]
    [message] = registered
    assert message.held is not None
    assert message.held.rounds.applied == 1


async def test_heartbeats_say_that_a_pserver_stops_while_it_writes_its_last_checkpoint(tmp_path, monkeypatch):
    stop = asyncio.Event()
    said: list[tuple[bool, bool]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        if not request.url.path.endswith("heartbeat"):
            return httpx.Response(200, json=REGISTERED)
        is_written = 1 in one.run.storage.rounds
        said.append((json.loads(request.content)["is_stopping"], is_written))
        stop.set()
        if len(said) == 4:
            may_write.set()
        return httpx.Response(200, json=HEARTBEAT_REPLY)

    async with registration_of(answer, tmp_path) as (one, staying):
        _, may_write = hold(monkeypatch, snapshots, "write_file")
        await one.play_round(1)
        registered = PserverRegistered(**REGISTERED)
        await staying._send_heartbeats(registered, stop)
        await asyncio.wait_for(staying._leave(registered), 10)
    assert said[0] == (False, False)
    assert set(said[1:4]) == {(True, False)}
    assert said[-1] == (True, True)


@pytest.mark.parametrize("exits", [True, False])
async def test_a_pserver_whose_coordinator_does_not_come_back_exits(tmp_path: Path, exits: bool) -> None:
    stop = asyncio.Event()

    def answer(request: httpx.Request) -> httpx.Response:
        if not request.url.path.endswith("heartbeat"):
            return httpx.Response(200, json=REGISTERED)
        raise httpx.ConnectError("refused")

    async with registration_of(answer, tmp_path, exits=exits, round_timeout_seconds=0.3) as (one, staying):
        await one.play_round(1)
        with structlog.testing.capture_logs() as logs, contextlib.suppress(TimeoutError):
            await asyncio.wait_for(staying._send_heartbeats(PserverRegistered(**REGISTERED), stop), 1.5)
        said = [line["event"] for line in logs if "the coordinator does not answer" in line["event"]]
        assert (stop.is_set(), staying.exit_code, len(said)) == ((True, 1, 1) if exits else (False, 0, 0))


@pytest.mark.parametrize(
    ("changes", "is_local"),
    [
        ({}, True),
        ({"host": "10.0.0.7", "insecure": True}, True),
        ({"local_transport": False}, False),
        ({"http2": False}, False),
        ({"advertise_address": "http://proxy:7071"}, False),
        ({"tls_cert": "file", "tls_key": "file"}, False),
        ({"tls_cert": "file", "tls_key": "file", "tls_client_ca": "file"}, False),
    ],
)
def test_when_there_is_a_unix_socket(changes: dict[str, Any], is_local: bool, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    files = {name: tmp_path / "file" for name, value in changes.items() if value == "file"}
    assert PserverSettings(**{**changes, **files}).listens_locally is is_local
