"""The polled client: its thread may be away between calls, and it connects without an event loop."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from h2.events import RequestReceived, StreamEnded

from ps_config.certificates import TlsFiles
from ps_http2 import client_connection, frames, polled_client
from ps_http2.client_connection import SINK_EXTENSION
from ps_http2.frames import ErrorCode, pack
from ps_http2.local_sockets import local_name
from ps_http2.polled_client import PolledTransport

from .shells import PolledInThread
from .sockets import OK, Talker, answering, data_frame, headers_frame, in_turn, serving, until
from .support import Collector


async def use(work: Callable[[httpx.Client], Any], tls: TlsFiles = TlsFiles()) -> Any:  # noqa: B008 - frozen
    """Run work with a client on another thread."""

    def run() -> Any:
        with httpx.Client(transport=PolledTransport(tls), trust_env=False, timeout=5) as client:
            return work(client)

    return await asyncio.to_thread(run)


async def test_a_connection_that_ended_while_the_thread_was_away_is_replaced() -> None:
    is_away, has_ended = threading.Semaphore(0), threading.Semaphore(0)

    async def serve(talker: Talker) -> None:
        await talker.until(StreamEnded)
        talker.writer.write(headers_frame(OK) + data_frame(b"fine", end_stream=True))
        await asyncio.to_thread(is_away.acquire, timeout=5)
        talker.writer.write(pack(frames.PING, 0, 0, bytes(8)))  # more to read than the end
        talker.writer.close()
        await talker.writer.wait_closed()
        has_ended.release()

    def work(client: httpx.Client) -> list[bytes]:
        contents = []
        for _ in range(3):
            contents.append(client.get(address).content)
            is_away.release()
            assert has_ended.acquire(timeout=5)
        return contents

    async with serving(serve) as address:
        assert await use(work) == [b"fine"] * 3


@pytest.mark.skipif(sys.platform != "linux", reason="abstract Unix sockets need Linux")
async def test_what_a_peer_sent_before_it_closed_is_read_although_it_takes_no_more(local: socket.socket) -> None:
    has_ended = threading.Event()

    async def answer_once(talker: Talker) -> None:
        await talker.until(StreamEnded)
        talker.writer.write(headers_frame(OK) + data_frame(b"fine", end_stream=True))
        talker.writer.close()
        await talker.writer.wait_closed()
        has_ended.set()

    def work() -> bytes:
        transport = PolledTransport()
        call = transport.begin("GET", "http://127.0.0.1", [], local=local_name(local))
        assert has_ended.wait(5)
        [origin] = transport._origins.values()
        assert origin._connection is not None
        origin._connection.ping()
        while not call.is_done:
            transport.wait(5)
        transport.close()
        return call.finish().read()

    async with serving(answer_once, local=local):
        assert await asyncio.to_thread(work) == b"fine"


async def test_an_answer_that_a_new_call_receives_ends_the_next_wait() -> None:
    has_asked, is_away, has_answered = threading.Event(), threading.Event(), threading.Event()

    async def answer_first(talker: Talker) -> None:
        await talker.until(StreamEnded)
        has_asked.set()
        await asyncio.to_thread(is_away.wait, 5)
        talker.writer.write(headers_frame(OK) + data_frame(b"fine", end_stream=True))
        await talker.writer.drain()
        has_answered.set()
        while await talker.hear():
            pass

    def work() -> None:
        transport = PolledTransport()
        first = transport.begin("GET", address, [])
        while not has_asked.is_set():
            transport.wait(0.01)
        is_away.set()
        assert has_answered.wait(5)
        transport.begin("GET", address, [])
        begun = time.monotonic()
        transport.wait(3.0)
        assert first.is_done
        assert time.monotonic() - begun < 1.0
        transport.close()

    async with serving(answer_first) as address:
        await asyncio.to_thread(work)


async def test_closing_the_transport_ends_open_calls() -> None:
    async def silent(talker: Talker) -> None:
        while await talker.hear():
            pass

    async with serving(silent) as address:
        transport = PolledInThread()
        asking = asyncio.create_task(transport.handle_async_request(httpx.Request("GET", address)))
        await until(lambda: any(origin._connections for origin in transport._origins.values()))
        await transport.aclose()
        with pytest.raises(httpx.TransportError, match="lost"):
            await asyncio.wait_for(asking, 5)


async def test_calls_on_a_replaced_connection_end_with_a_server_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (client_connection, polled_client):
        monkeypatch.setattr(module, "PING_SECONDS", 0.05)

    async def go_away(talker: Talker) -> None:
        await talker.until(RequestReceived)
        talker.writer.write(frames.pack_goaway(1, ErrorCode.NO_ERROR, ""))
        await asyncio.sleep(5)

    transport = PolledInThread()
    async with (
        serving(in_turn([go_away, answering()])) as address,
        httpx.AsyncClient(transport=transport) as client,
    ):
        first = asyncio.create_task(client.get(address))
        await until(lambda: any(one.is_closing for o in transport._origins.values() for one in o._connections))
        assert (await client.get(address)).content == b"fine"
        with pytest.raises(httpx.ReadError, match="sent nothing"):
            await asyncio.wait_for(first, 2)


async def test_an_address_of_an_unknown_family_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(host: str, port: int, **_: Any) -> list[Any]:
        return [(family, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port)) for family in (99, socket.AF_INET)]

    monkeypatch.setattr(polled_client.socket, "getaddrinfo", resolve)
    async with serving(answering()) as address:
        assert (await use(lambda client: client.get(address))).content == b"fine"


async def test_files_of_tls_that_cannot_be_read_are_a_connect_error(tmp_path: Path) -> None:
    async with serving(answering()) as address:
        with pytest.raises(httpx.ConnectError, match="missing"):
            await use(lambda client: client.get(address.replace("http:", "https:")), TlsFiles(tmp_path / "missing"))


async def test_an_interrupt_while_bytes_move_loses_the_connection() -> None:
    class Interrupted(Collector):
        def feed(self, data: memoryview) -> None:
            raise KeyboardInterrupt

    connections = [answering(), answering()]

    def work(client: httpx.Client) -> bytes:
        with pytest.raises(KeyboardInterrupt):
            client.get(address, extensions={SINK_EXTENSION: Interrupted()})
        return client.get(address).content

    async with serving(in_turn(connections)) as address:
        assert await use(work) == b"fine"
    assert not connections
