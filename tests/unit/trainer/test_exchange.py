"""Requests of trainers over both versions of HTTP, and the work that they are part of."""

from __future__ import annotations

import asyncio
import itertools
import math
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
import trustme
from h2.events import DataReceived, RequestReceived, StreamReset

from ps_config.certificates import TlsFiles
from ps_config.control_client import make_blocking_client
from ps_config.tokens import TokenPair
from ps_http2 import client_connection, polled_client
from ps_protocol.errors import Unreachable
from services.runtime import server as server_module
from services.runtime.app import add_raw_route
from trainer_client.client.coordinator_client import CoordinatorClient
from trainer_client.client.settings import read_settings
from trainer_client.transport.exchange import Exchange
from trainer_client.transport.http1 import CHUNK_BYTES
from trainer_client.transport.work import Work, pause, together

from ..http2.sockets import Talker, serving
from ..protocol.test_access import NEW, OLD, Authority, put
from ..runtime.support import Running, Sample, running
from .driving import THREADS, exchange_on

T = TypeVar("T")


async def run(exchange: Exchange, work: Work[T]) -> T:
    """Run work on a thread, beside the loop of the servers."""
    return await asyncio.wait_for(asyncio.to_thread(exchange.run, work), 10)


@pytest.fixture(params=THREADS)
def exchange(request: pytest.FixtureRequest) -> Iterator[Exchange]:
    with exchange_on(request.param) as exchange:
        yield exchange


# ---------------------------------------------------------------- work


def test_the_first_error_gives_up_the_other_work(exchange: Exchange) -> None:
    ended = []

    def fail() -> Work[None]:
        yield from pause(0.01)
        raise ValueError("it failed")

    def wait_for_ever() -> Work[None]:
        try:
            while True:
                yield math.inf
        finally:
            ended.append(True)

    with pytest.raises(ValueError, match="it failed"):
        exchange.run(together([wait_for_ever(), fail(), wait_for_ever()]))
    assert len(ended) == 2
    alone = exchange.start(wait_for_ever())
    exchange.run(pause(0.0))  # it has begun
    exchange.give_up(alone)
    assert len(ended) == 3
    exchange.give_up(alone)  # again


def test_another_thread_wakes_work(exchange: Exchange) -> None:
    is_there = threading.Event()

    def wait() -> Work[None]:
        while not is_there.is_set():
            yield math.inf

    def arrive() -> None:
        is_there.set()
        exchange.wake()

    timer = threading.Timer(0.05, arrive)
    timer.start()
    exchange.run(wait())
    timer.join()


@pytest.mark.parametrize("exchange", ["caller"], indirect=True)
def test_an_interrupt_at_any_place_of_a_wait_gives_the_work_up(exchange: Exchange) -> None:
    before = sys.gettrace()
    for num_events in itertools.count():
        events = itertools.count()

        def interrupt(*_: object, events: Iterator[int] = events, place: int = num_events) -> Any:
            if next(events) == place:
                raise KeyboardInterrupt
            return interrupt

        started = exchange.start(pause(0.01))
        sys.settrace(interrupt)
        try:
            exchange.wait(started)
            break
        except KeyboardInterrupt:
            sys.settrace(before)
            exchange.give_up(started)
        finally:
            sys.settrace(before)
        assert exchange.run(together([pause(0.0)])) == [None]
        assert started.is_done
    assert num_events > 10


# ---------------------------------------------------------------- requests


class Service:
    """A service that accepts one token, and answers when the headers are received, as services do."""

    def __init__(self, valid: str) -> None:
        self.valid = valid
        self.seen: list[str] = []
        self.talker: Talker

    def answer(self, authorization: str) -> int:
        self.seen.append(authorization)
        return 200 if authorization == f"Bearer {self.valid}" else 401

    async def serve(self, talker: Talker) -> None:
        self.talker = talker
        talker.acknowledges = False  # the body of a refused request is not read
        num_before = len(self.seen)
        while await talker.hear():
            for event in talker.of(RequestReceived)[len(self.seen) - num_before :]:
                assert event.headers is not None
                status = self.answer(dict(event.headers).get(b"authorization", b"").decode())
                talker.h2.send_headers(event.stream_id, [(b":status", b"%d" % status)])
                talker.h2.send_data(event.stream_id, b"fine" if status == 200 else b"who?", end_stream=True)
            talker.flush()

    @asynccontextmanager
    async def exchanging(self, file: Path) -> AsyncIterator[tuple[Exchange, str]]:
        async with serving(self.serve) as address:
            exchange = Exchange(TlsFiles(), TokenPair(file))
            try:
                yield exchange, address
            finally:
                await asyncio.to_thread(exchange.close)


@pytest.mark.parametrize(
    ("valid", "previous", "status", "sent"),
    [
        (NEW, OLD, 200, [NEW]),
        (OLD, OLD, 200, [NEW, OLD]),  # the service does not know the new one yet
        (OLD, None, 401, [NEW]),
        ("neither", OLD, 401, [NEW, OLD]),
    ],
)
async def test_the_previous_token_is_sent_if_the_new_one_is_refused(
    valid: str, previous: str | None, status: int, sent: list[str], tmp_path: Path
) -> None:
    put(tmp_path / "train", NEW)
    if previous:
        put(tmp_path / "train.previous", previous)
    service = Service(valid)
    async with service.exchanging(tmp_path / "train") as (exchange, url):
        response = await run(exchange, exchange.send("GET", url, {"x-a": "b"}))
    assert (response.status_code, response.content) == (status, b"fine" if status == 200 else b"who?")
    if status != 200:
        assert response.request.url == url
    assert service.seen == [f"Bearer {token}" for token in sent]


async def test_the_refused_request_is_reset_so_that_its_body_may_change(tmp_path: Path) -> None:
    put(tmp_path / "train", NEW)
    put(tmp_path / "train.previous", OLD)
    service = Service(OLD)
    async with service.exchanging(tmp_path / "train") as (exchange, url):
        body = bytearray(200_000)
        response = await run(exchange, exchange.send("POST", url, {}, body=(memoryview(body),)))
        assert response.content == b"fine"
        body[:] = b"x" * len(body)
        talker = service.talker
        talker.h2.increment_flow_control_window(1_000_000)
        talker.flush()
        for number in (1, 3):
            async with asyncio.timeout(5):
                while not talker.of(StreamReset, number):
                    await run(exchange, pause(0.01))
        assert not any(b"x" in event.data for event in talker.of(DataReceived))


# ---------------------------------------------------------------- HTTP/1.1


async def echo(scope: Any, receive: Any, send: Any) -> None:
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message["body"], message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": memoryview(body)})


@asynccontextmanager
async def exchanging(tokens: TokenPair | None = None, **settings: Any) -> AsyncIterator[tuple[Exchange, str]]:
    app = Sample().make_app()
    add_raw_route(app, "/echo", echo, methods=["POST"], summary="Echo the body")
    exchange = Exchange(TlsFiles(), tokens)
    async with running(app, **settings) as service:
        try:
            yield exchange, service.address
        finally:
            await asyncio.to_thread(exchange.close)


class Portions:
    """A sink that keeps what it is fed."""

    def __init__(self, on_feed: Callable[[], None] = lambda: None) -> None:
        self.fed: list[bytes] = []
        self._on_feed = on_feed

    def get_buffer(self) -> memoryview:
        return memoryview(b"")

    def buffer_updated(self, num_bytes: int) -> None:
        raise NotImplementedError

    def feed(self, data: memoryview) -> None:
        self.fed.append(bytes(data))
        self._on_feed()


@pytest.mark.parametrize("sizes", [(), (0,), (1,), (5, 0, CHUNK_BYTES, 3 * CHUNK_BYTES + 7)])
async def test_a_body_is_sent_and_received_in_portions(sizes: tuple[int, ...]) -> None:
    parts = [memoryview(bytes([number + 1]) * size) for number, size in enumerate(sizes)]
    sink = Portions()
    async with exchanging() as (exchange, url):
        sent = exchange.send("POST", f"{url}/echo", {"x-a": "b"}, body=parts, sink=sink, http2=False)
        response = await run(exchange, sent)
    assert (response.status_code, response.http_version) == (200, "HTTP/1.1")
    assert b"".join(sink.fed) == b"".join(parts)
    assert len(sink.fed) > 1 or sum(sizes) < CHUNK_BYTES


async def test_a_call_that_was_given_up_neither_reads_nor_writes_its_memory() -> None:
    body = [memoryview(bytes(CHUNK_BYTES))] * 8
    fed = threading.Event()
    sink = Portions(fed.set)
    async with exchanging() as (exchange, url):
        started = exchange.start(exchange.send("POST", f"{url}/echo", {}, body=body, sink=sink, http2=False))
        exchange.make_progress()
        assert await asyncio.to_thread(fed.wait, 5)
        await asyncio.to_thread(exchange.give_up, started)
        num_fed = len(sink.fed)
        response = await run(exchange, exchange.send("POST", f"{url}/echo", {}, body=body[:1], http2=False))
        assert len(response.content) == CHUNK_BYTES
        assert len(sink.fed) == num_fed < 8 * CHUNK_BYTES


async def test_a_call_that_an_interrupt_ends_while_it_begins_reads_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    body, start, sink = bytearray(b"1" * 8 * CHUNK_BYTES), threading.Thread.start, Portions()
    threads: list[threading.Thread] = []

    def start_and_interrupt(thread: threading.Thread) -> None:
        threads.append(thread)
        start(thread)
        raise KeyboardInterrupt

    async with exchanging() as (exchange, url):
        work = exchange.send("POST", f"{url}/echo", {}, body=[memoryview(body)], sink=sink, http2=False)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start_and_interrupt)
            with pytest.raises(KeyboardInterrupt):
                exchange.run(work)
        body[:] = b"2" * len(body)
        await asyncio.to_thread(threads[0].join, 10)
        assert b"2" not in b"".join(sink.fed)


async def test_the_previous_token_is_sent_with_the_whole_body_again(tmp_path: Path) -> None:
    (tmp_path / "tokens").mkdir()
    put(tmp_path / "tokens" / "admin", OLD)
    put(tmp_path / "admin", NEW)
    put(tmp_path / "admin.previous", OLD)
    async with exchanging(TokenPair(tmp_path / "admin"), tokens_dir=tmp_path / "tokens") as (exchange, url):
        body = (memoryview(b"12"), memoryview(b"345"))
        response = await run(exchange, exchange.send("POST", f"{url}/echo", {}, body=body, http2=False))
    assert (response.status_code, response.content) == (200, b"12345")


# ---------------------------------------------------------------- certificates


def serve(authority: Authority) -> AbstractAsyncContextManager[Running]:
    files = authority.issue("service")
    return running(Sample().make_app(), tls_client_ca=files.ca, tls_cert=files.cert, tls_key=files.key)


@pytest.mark.parametrize("http2", [True, False])
async def test_a_replaced_authority_is_read_from_its_files(
    http2: bool, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (client_connection, polled_client):
        monkeypatch.setattr(module, "PING_SECONDS", 0.05)
    monkeypatch.setattr(server_module, "GRACE_SECONDS", 0.2)  # idle clients keep their connections open
    client = authority.issue("client")
    exchange = Exchange(client, None)

    async def send(service: Running) -> httpx.Response:
        url, body = f"{service.address}/raw/fine", (memoryview(b"12345"),)
        return await run(exchange, exchange.send("POST", url, {}, body=body, http2=http2))

    with make_blocking_client(client, None) as control:

        async def post(service: Running) -> httpx.Response:
            return await asyncio.to_thread(control.post, f"{service.address}/raw/fine", content=b"12345")

        async with serve(authority) as service:
            assert (await send(service)).text == f"5 HTTP/{'2' if http2 else '1.1'}\n"
            assert (await post(service)).text == "5 HTTP/1.1\n"
            authority.issue("client", only_cert=True)  # its key is not there yet
            await asyncio.sleep(0.1)
            assert (await send(service)).status_code == 200
        authority.authority = trustme.CA()
        authority.__post_init__()
        authority.issue("client")
        async with serve(authority) as service:
            assert (await send(service)).status_code == 200
            assert (await post(service)).status_code == 200
    exchange.close()


async def test_a_coordinator_with_an_untrusted_certificate_is_given_up_at_once(
    authority: Authority, tmp_path: Path
) -> None:
    issued, other = authority.issue("service"), Authority(tmp_path / "other")
    async with (
        running(Sample().make_app(), tls_cert=issued.cert, tls_key=issued.key) as service,
        asyncio.timeout(30),
    ):
        with make_blocking_client(TlsFiles(other.ca), None) as control:
            client = CoordinatorClient(read_settings(coordinator=service.address, retry_seconds=600), control)
            with pytest.raises(Unreachable, match=r"is not trusted .*unable to get local issuer.* set GRADPOST_TLS_CA"):
                await asyncio.to_thread(client.join, None)
