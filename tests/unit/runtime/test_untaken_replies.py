"""A reply waits for its client, and is given up if the client does not read it."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any

import httpx
import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.settings import SettingCodes, Settings

from services.runtime import http1
from services.runtime.app import add_raw_route
from services.runtime.http1 import GuardedProtocol

from .support import Running, Sample, running, trainer_client

pytestmark = pytest.mark.asyncio

MIB = 1024 * 1024
NUM_CHUNKS = 50
NUM_STREAMS = 20


class Large:
    """A reply of 50 MiB, and how much of it was given to the server."""

    def __init__(self) -> None:
        self.num_given = 0
        self.num_running = 0
        self.app = Sample().make_app()
        add_raw_route(self.app, "/large", self.reply, methods=["GET"], summary="Much")

    async def reply(self, scope: Any, receive: Any, send: Any) -> None:
        self.num_running += 1
        headers = [(b"content-length", b"%d" % (NUM_CHUNKS * MIB))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for i in range(NUM_CHUNKS):
            await send({"type": "http.response.body", "body": bytes(MIB), "more_body": i + 1 < NUM_CHUNKS})
            self.num_given += MIB
        self.num_running -= 1


async def open_connection(server: Running) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = server.address.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


async def ask_without_a_window(server: Running) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await open_connection(server)
    http2 = H2Connection(H2Configuration(client_side=True))
    http2.local_settings = Settings(client=True, initial_values={SettingCodes.INITIAL_WINDOW_SIZE: 0})
    http2.initiate_connection()
    headers = [(":method", "GET"), (":path", "/large"), (":scheme", "http"), (":authority", "localhost")]
    for i in range(NUM_STREAMS):
        http2.send_headers(2 * i + 1, headers, end_stream=True)
    writer.write(http2.data_to_send())
    return reader, writer


async def ask_and_read_nothing(server: Running) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await open_connection(server)
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    writer.write(b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n")
    return reader, writer


@pytest.mark.parametrize("ask", [ask_without_a_window, ask_and_read_nothing])
async def test_a_reply_that_is_not_taken_waits_here_and_is_given_up(ask: Any) -> None:
    large = Large()
    async with running(large.app, body_timeout_seconds=1) as service:
        _reader, writer = await ask(service)
        async with asyncio.timeout(5):
            while not large.num_running:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        assert large.num_given <= 16 * MIB  # the kernels' buffers included
        async with asyncio.timeout(10):
            while large.num_running:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        writer.close()


@pytest.mark.parametrize("make_client", [trainer_client, httpx.AsyncClient])
async def test_who_reads_gets_all_of_it(make_client: Any) -> None:
    large = Large()
    async with running(large.app) as service, make_client() as client:
        for _ in range(3):
            assert len((await client.get(f"{service.address}/large")).content) == NUM_CHUNKS * MIB


@pytest.mark.parametrize("start", [b"", b"PRI * HT", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"])
async def test_a_connection_that_says_nothing_is_cut_off(start: bytes) -> None:
    async with running(Sample().make_app(), header_timeout_seconds=0.4) as service:
        reader, writer = await open_connection(service)
        writer.write(start)
        answer = await asyncio.wait_for(reader.read(), 5)  # to the end
        assert not answer or start.endswith(b"SM\r\n\r\n")
        writer.close()


async def test_a_reply_in_one_part_waits_for_its_client_and_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The transport copies two parts at most, and no timer keeps a connection in memory once it has ended."""
    connections: list[GuardedProtocol] = []
    ended = asyncio.Event()

    class Remembered(GuardedProtocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            connections.append(self)

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            ended.set()

    async def whole(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": bytes(NUM_CHUNKS * MIB)})

    monkeypatch.setattr(http1, "GuardedProtocol", Remembered)
    app = Sample().make_app()
    add_raw_route(app, "/whole", whole, methods=["GET"], summary="Much")
    async with running(app) as service:
        for path in (b"/whole", b"/healthz"):
            reader, writer = await open_connection(service)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.write(b"GET %b HTTP/1.1\r\nHost: localhost\r\n\r\n" % path)
            await asyncio.wait_for(reader.readline(), 5)
            connection = connections.pop()
            if path == b"/whole":
                writer.transport.pause_reading()  # type: ignore[attr-defined]
                async with asyncio.timeout(5):
                    while connection._write_timer is None:  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
                assert connection.transport.get_write_buffer_size() <= 2 * http1.PART_BYTES
            ended.clear()
            writer.transport.abort()  # with a reset
            await asyncio.wait_for(ended.wait(), 5)
            assert connection._write_timer is None
            assert connection.timeout_keep_alive_task is None
