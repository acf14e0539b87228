"""A pserver between registrations and runs: what it restores and reports, how it stops, and the memory it releases."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog
from prometheus_client import CollectorRegistry

from ps_protocol.consistency import Consistency
from ps_protocol.errors import Conflict, NotReady, TryAgain, Unauthenticated
from ps_protocol.membership import Freeze, PserverRegistered, WantCheckpoint
from services.pserver.durable.snapshot_writer import Publisher
from services.pserver.registration import Registration
from services.pserver.settings import PserverSettings
from services.pserver.shard.shard import Shard

from .oracle import make_options
from .support import Bench, bench, hold, make_pserver


async def test_a_change_of_members_waits_for_a_run_that_is_being_opened(tmp_path, monkeypatch):
    async with bench(state_dir=tmp_path, durability="log") as b:
        await b.play_round(1)
        install = b.install.model_copy(update={"restore": 1, "number": 2})
        await b.pserver.open_folder(0)
        is_open, may_go_on = hold(monkeypatch, b.pserver.disk, "open_run", after=True)
        installing = asyncio.create_task(b.pserver.install_run(install))
        await asyncio.to_thread(is_open.wait, 10)
        freezing = asyncio.create_task(b.freeze(3))
        asking = asyncio.create_task(b.pserver.find_restorable(install.run))
        await asyncio.sleep(0.05)
        assert not freezing.done()
        may_go_on.set()
        frozen, ranges = await asyncio.gather(freezing, asking)
        await installing
        assert frozen.applied == 1
        assert ranges == [(0, 1)]


async def test_a_late_installation_does_not_restore_a_held_run(tmp_path: Path) -> None:
    async with bench(state_dir=tmp_path, durability="log") as b:
        await b.play_round(1)
        await b.pserver.open_folder(0)
        late = b.install.model_copy(update={"restore": 1, "number": 2})
        assert (await b.freeze(3)).applied == 1
        with pytest.raises(Conflict, match="is over"):
            await b.pserver.install_run(late)
        with pytest.raises(NotReady):
            assert b.pserver.run
        await b.pserver.install_run(late.model_copy(update={"number": 3}))
        assert b.run.round == 1


async def test_a_pserver_that_has_not_read_its_folder_answers_try_again(tmp_path: Path) -> None:
    async with bench(state_dir=tmp_path, durability="log") as b:
        await b.play_round(1)
    next_life = make_pserver(tmp_path, b.compute, CollectorRegistry())
    freeze = Freeze(run=b.install.run, attempt=0, number=2)
    for ask in (next_life.freeze(freeze), next_life.find_restorable(b.install.run)):
        with pytest.raises(TryAgain, match="has not opened its state folder") as refusal:
            await ask
        assert not isinstance(refusal.value, NotReady)  # which is what one says that holds nothing
    await next_life.open_folder(0)
    assert (await next_life.freeze(freeze)).applied == 1


ADAM = [make_options("Adam", lr=0.01)]


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The number of other shards whenever one is made; what only the cyclic collector would release stays."""
    gc.collect()
    gc.disable()
    shards: weakref.WeakSet[Shard] = weakref.WeakSet()
    counts = []
    init = Shard.__init__

    def watched(self: Shard, *arguments: Any) -> None:
        deadline = time.monotonic() + 2
        while shards and time.monotonic() < deadline:  # a thread may be about to forget what it has worked on
            time.sleep(0.001)
        counts.append(len(shards))
        init(self, *arguments)
        shards.add(self)

    monkeypatch.setattr(Shard, "__init__", watched)
    yield counts
    gc.enable()


async def train(pserver: Bench) -> None:
    for round_ in (1, 2):
        if not pserver.install.consistency.is_async:
            await pserver.play_round(round_)
            continue
        await pserver.get(0, round_ - 1)
        await pserver.push(0, round_)
        await pserver.get(0, round_)


@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"max_delay": 1},
        {"mode": "async", "compensation": "dc"},
        *({"mode": "async", "read_consistency": read} for read in ("none", "block", "shard")),
    ],
)
async def test_the_next_run_begins_with_nothing_of_the_one_before(rules: dict[str, Any], alive: list[int]) -> None:
    async with bench(1, optimizer="Adam", groups=ADAM, consistency=Consistency(**rules)) as pserver:
        await train(pserver)
        pserver.install = await pserver.install_next_run()
        await pserver.upload_initial()
    assert alive == [0, 0]


REGISTERED = {"index": 0, "incarnation": 1, "lease_seconds": 0.03}
HEARTBEAT_REPLY = {"complete": [], "notice": "", "stop": False, "exit_code": 0}


@asynccontextmanager
async def registration_of(answer: Any, folder: Path, *, exits: bool = False, **settings: Any) -> AsyncIterator[Any]:
    """A pserver that serves a run, and its registration with a coordinator that gives these answers."""
    async with (
        bench(state_dir=folder, **settings) as one,
        httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http,
    ):
        one.pserver.address = "http://pserver:1"
        yield one, Registration(one.pserver, PserverSettings(state_dir=folder, exit_when_done=exits), http, no_follower)


def no_follower(_: int) -> Any:
    pytest.fail("this pserver remains one")


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
            await asyncio.wait_for(staying.run(stop), 10)
        assert (stop.is_set(), answers, staying.exit_code) == (True, [], 0)
        hints = ["its address begins with https:" in line["reason"] for line in logs if "waiting for" in line["event"]]
        assert hints == [False, False, False, True, False]  # a page is an answer
        await one.install_next_run()


async def test_a_storage_that_hangs_does_not_keep_a_pserver_from_stopping(tmp_path, monkeypatch):
    is_let_go, stop = threading.Event(), asyncio.Event()
    stop.set()
    async with registration_of(lambda _: httpx.Response(404), tmp_path) as (one, staying):
        await one.play_round(1)
        await one.wait_until_published()
        monkeypatch.setattr(Publisher, "_copy", lambda *_: is_let_go.wait(20))
        await one.pserver.want_checkpoint(WantCheckpoint(run=one.install.run, round=1))
        await asyncio.wait_for(staying.run(stop), 5)
        assert not is_let_go.is_set()
        is_let_go.set()
        await one.wait_until_published()


@pytest.mark.parametrize("exits", [True, False])
async def test_a_pserver_whose_coordinator_does_not_come_back_exits(tmp_path: Path, exits: bool) -> None:
    stop = asyncio.Event()

    def answer(request: httpx.Request) -> httpx.Response:
        if not request.url.path.endswith("heartbeat"):
            return httpx.Response(200, json=REGISTERED)
        raise httpx.ConnectError("refused")

    async with registration_of(answer, tmp_path, exits=exits, patience_seconds=0.3) as (one, staying):
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
