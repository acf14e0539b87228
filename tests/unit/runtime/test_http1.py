"""Limits of HTTP/1.1 that uvicorn lacks: on headers, connections, upgrades, and responses that are not read."""

from __future__ import annotations

import asyncio
import re
import socket
import struct
from typing import Any

import httpx
import pytest

from services.runtime import http1
from services.runtime.app import add_raw_route
from services.runtime.http1 import GuardedProtocol

from .support import Sample, ask_raw, raw_connection, running

MIB = 1024 * 1024
NUM_PARTS = 50
GET = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = b"POST /raw/fine HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


# ---------------------------------------------------------------------- headers


async def test_headers_that_do_not_come_in_time_are_refused() -> None:
    async with running(Sample().make_app(), header_timeout_seconds=0.2) as server:
        answer = await ask_raw(server.address, b"GET /healthz HTTP/1.1\r\nHost:")
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b'"code": "slow_body"' in answer


async def test_the_time_for_headers_begins_with_their_first_byte() -> None:
    async with (
        running(Sample().make_app(), header_timeout_seconds=0.2) as server,
        raw_connection(server.address) as connection,
    ):
        for _ in range(2):
            connection.write(GET + b"\r\n")
            assert await connection.read_line() == b"HTTP/1.1 200 OK\r\n"
            await asyncio.sleep(0.5)
            await connection.reader.readuntil(b"}")
        connection.write(b"GET ")
        assert (await connection.read_all()).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("part", [b"x" * 8192, b"X-A: b\r\n" * 1000], ids=["one long", "many"])
@pytest.mark.parametrize("begin", [GET + b"X-A: ", CHUNKED + b"0\r\nX-A: "], ids=["headers", "trailers"])
async def test_endless_headers_and_trailers_end_the_connection(begin: bytes, part: bytes) -> None:
    async with running(Sample().make_app()) as server, raw_connection(server.address, begin) as connection:
        answer = asyncio.create_task(connection.read_all())
        num_sent = 0
        while not answer.done() and num_sent < 100_000_000:
            connection.write(part)
            num_sent += len(part)
            try:
                await connection.writer.drain()
            except ConnectionError:
                break
            await asyncio.sleep(0)
        assert num_sent < 10_000_000
        answer.cancel()
        await asyncio.gather(answer, return_exceptions=True)


async def test_long_headers_and_a_few_trailers_are_accepted() -> None:
    async with running(Sample().make_app()) as server, raw_connection(server.address) as connection:
        connection.write(GET + b"X-A: " + b"x" * 60_000 + b"\r\n\r\n")
        assert await connection.read_line() == b"HTTP/1.1 200 OK\r\n"
        await connection.reader.readuntil(b"}")
        for _ in range(2):
            connection.write(CHUNKED + b"5\r\n12345\r\n0\r\nAuthorization: Bearer x\r\n\r\n")
            assert await connection.read_line() == b"HTTP/1.1 200 OK\r\n"
            await asyncio.wait_for(connection.reader.readuntil(b"5 HTTP/1.1\n"), 5)


# ---------------------------------------------------------------------- connections and invalid requests


async def test_a_connection_beyond_the_limit_is_refused() -> None:
    async with running(Sample().make_app(), max_connections=2) as server:
        async with raw_connection(server.address), raw_connection(server.address):
            answer = await ask_raw(server.address, b"")
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b"retry-after: 1" in answer
            assert b'"code": "overloaded"' in answer
        async with asyncio.timeout(5):
            while not answer.startswith(b"HTTP/1.1 200 "):
                answer = await ask_raw(server.address, GET + b"Connection: close\r\n\r\n")


@pytest.mark.parametrize(
    ("upgrade", "length", "is_split"),
    [
        (b"x", b"Content-Length: 42", False),
        (b"h2c", b"Transfer-Encoding: chunked", False),
        (b"websocket", b"Content-Length: 42", True),
    ],
)
async def test_a_request_for_an_upgrade_is_refused(upgrade: bytes, length: bytes, is_split: bool) -> None:
    request = b"POST /raw/fine HTTP/1.1\r\nHost: localhost\r\n%b\r\nConnection: upgrade\r\nUpgrade: %b\r\n\r\n"
    async with running(Sample().make_app()) as server, raw_connection(server.address) as connection:
        connection.write(request % (length, upgrade))
        if is_split:
            await connection.writer.drain()
            await asyncio.sleep(0)
        connection.write(GET + b"\r\n")  # as a body, or smuggled
        answer = await connection.read_all()
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b'"code": "bad_request"' in answer
        assert answer.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize(
    "bad", [GET + b"Connection: upgrade\r\nUpgrade: x\r\n\r\n", b"}"], ids=["upgrade", "no request"]
)
async def test_invalid_data_after_a_request_is_answered_after_it(bad: bytes) -> None:
    sample = Sample()
    async with running(sample.make_app()) as server, raw_connection(server.address) as connection:
        connection.write(b"GET /slow HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await asyncio.wait_for(sample.slow_begun.wait(), 5)
        connection.write(bad + GET + b"\r\n")
        for _ in range(5):  # iterations of the loop, in which the server reads it
            await asyncio.sleep(0)
        sample.slow_ends.set()
        assert re.findall(rb"HTTP/1.1 (\d+)", await connection.read_all()) == [b"200", b"400"]


# ---------------------------------------------------------------------- large responses


class Large:
    """Responses of 50 MiB, in parts and at once, and the number of bytes that the server has taken."""

    def __init__(self) -> None:
        self.num_taken = 0
        self.begun, self.ended = asyncio.Event(), asyncio.Event()
        self.app = Sample().make_app()
        add_raw_route(self.app, "/parts", self.send_parts, methods=["GET"], summary="In parts")
        add_raw_route(self.app, "/whole", self.send_whole, methods=["GET"], summary="At once")

    async def send_parts(self, scope: Any, receive: Any, send: Any) -> None:
        self.begun.set()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for i in range(NUM_PARTS):
            await send({"type": "http.response.body", "body": bytes(MIB), "more_body": i + 1 < NUM_PARTS})
            self.num_taken += MIB
        self.ended.set()

    async def send_whole(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": bytes(NUM_PARTS * MIB)})


async def test_a_response_that_is_not_read_is_held_back_and_aborted() -> None:
    large = Large()
    async with running(large.app, body_timeout_seconds=1) as server, raw_connection(server.address) as connection:
        connection.writer.transport.pause_reading()  # type: ignore[attr-defined]
        connection.write(b"GET /parts HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await asyncio.wait_for(large.begun.wait(), 5)
        await asyncio.sleep(0.3)
        assert large.num_taken <= 16 * MIB  # the kernel's buffers included
        await asyncio.wait_for(large.ended.wait(), 10)


async def test_a_response_in_one_part_waits_for_its_client_and_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
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

    monkeypatch.setattr("services.runtime.server.GuardedProtocol", Remembered)
    async with running(Large().app) as server:
        async with httpx.AsyncClient() as client:
            assert len((await client.get(f"{server.address}/whole")).content) == NUM_PARTS * MIB
        for path in (b"/whole", b"/healthz"):
            async with raw_connection(server.address, b"GET %b HTTP/1.1\r\nHost: localhost\r\n\r\n" % path) as client:
                raw = client.writer.get_extra_info("socket")
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                await client.read_line()
                connection = connections.pop()
                if path == b"/whole":
                    client.writer.transport.pause_reading()  # type: ignore[attr-defined]
                    async with asyncio.timeout(5):
                        while connection._write_timer is None:  # noqa: ASYNC110
                            await asyncio.sleep(0.01)
                    assert connection.transport.get_write_buffer_size() <= 2 * http1.PART_BYTES
                ended.clear()
                client.writer.transport.abort()  # with a reset
                await asyncio.wait_for(ended.wait(), 5)
                assert connection._write_timer is None
                assert connection.timeout_keep_alive_task is None
