"""Limits that uvicorn lacks: on headers without an end, silent connections, and clients that do not receive."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from ps_http2 import asgi
from services.runtime.app import add_raw_route

from .support import Running, Sample, running

pytestmark = pytest.mark.asyncio


async def connect(server: Running) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = server.address.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


async def read_all(reader: asyncio.StreamReader) -> bytes:
    return await asyncio.wait_for(reader.read(), 5)


async def test_headers_that_do_not_come() -> None:
    async with running(Sample().make_app(), header_timeout_seconds=0.2) as server:
        silent, begun = await connect(server), await connect(server)
        begun[1].write(b"GET /healthz HTTP/1.1\r\nHost:")
        answer = await read_all(begun[0])
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b'"code": "slow_body"' in answer
        assert await read_all(silent[0]) == b""
        for _, writer in (silent, begun):
            writer.close()


async def test_an_idle_connection_is_not_cut_off_by_the_time_for_headers() -> None:
    async with running(Sample().make_app(), header_timeout_seconds=0.2) as server:
        reader, writer = await connect(server)
        for _ in range(2):
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert await asyncio.wait_for(reader.readline(), 5) == b"HTTP/1.1 200 OK\r\n"
            await asyncio.sleep(0.5)
            await reader.readuntil(b"}")
        writer.write(b"GET ")  # now it begins
        assert (await read_all(reader)).startswith(b"HTTP/1.1 408 ")
        writer.close()


@pytest.mark.parametrize("part", [b"x" * 8192, b"X-A: b\r\n" * 1000], ids=["one long header", "many headers"])
async def test_headers_without_an_end(part: bytes) -> None:
    async with running(Sample().make_app()) as server:
        reader, writer = await connect(server)
        writer.write(b"GET /healthz HTTP/1.1\r\nX-A: ")
        answer = asyncio.create_task(read_all(reader))
        num_sent = 0
        while not answer.done() and num_sent < 100_000_000:
            writer.write(part)
            num_sent += len(part)
            try:
                await writer.drain()
            except ConnectionError:
                break
            await asyncio.sleep(0)
        assert num_sent < 10_000_000
        answer.cancel()
        await asyncio.gather(answer, return_exceptions=True)
        writer.close()
        reader, writer = await connect(server)
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-A: " + b"x" * 60_000 + b"\r\n\r\n")
        assert await asyncio.wait_for(reader.readline(), 5) == b"HTTP/1.1 200 OK\r\n"
        writer.close()


async def test_one_connection_too_many() -> None:
    async with running(Sample().make_app(), max_connections=2) as server:
        kept = [await connect(server) for _ in range(2)]
        reader, writer = await connect(server)
        answer = await read_all(reader)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1" in answer
        assert b'"code": "overloaded"' in answer
        kept.pop()[1].close()
        async with asyncio.timeout(5):
            while not answer.startswith(b"HTTP/1.1 200 "):
                again, other = await connect(server)
                other.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                answer = await read_all(again)
                other.close()
        for _, each in (*kept, (reader, writer)):
            each.close()


async def test_the_rest_of_a_refused_body_cannot_go_on_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asgi, "DISCARD_SECONDS", 0.1)
    async with running(Sample().make_app()) as server:
        reader, writer = await connect(server)
        writer.write(b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\nx")
        assert (await read_all(reader)).startswith(b"HTTP/1.1 404 ")
        writer.close()


async def test_a_reply_that_nobody_takes() -> None:
    ended = asyncio.Event()

    async def large(scope: Any, receive: Any, send: Any) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for _ in range(100):
                await send({"type": "http.response.body", "body": bytes(1_000_000), "more_body": True})
            await send({"type": "http.response.body"})
        finally:
            ended.set()

    app = Sample().make_app()
    add_raw_route(app, "/large", large, methods=["GET"], summary="Much")
    async with running(app, body_timeout_seconds=0.2) as server:
        _, writer = await connect(server)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await asyncio.wait_for(ended.wait(), 5)
        writer.close()


@pytest.mark.parametrize("part", [b"x" * 8192, b"X-A: b\r\n" * 1000], ids=["one long trailer", "many trailers"])
async def test_trailers_without_an_end(part: bytes) -> None:
    async with running(Sample().make_app()) as server:
        reader, writer = await connect(server)
        writer.write(b"POST /raw/fine HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX-A: ")
        answer = asyncio.create_task(reader.read())
        num_sent = 0
        while not answer.done() and num_sent < 100_000_000:
            writer.write(part)
            num_sent += len(part)
            try:
                await writer.drain()
            except ConnectionError:
                break
            await asyncio.sleep(0)
        assert num_sent < 10_000_000
        await asyncio.gather(answer, return_exceptions=True)
        writer.close()


async def test_a_few_trailers_are_passed_over() -> None:
    async with running(Sample().make_app()) as server:
        reader, writer = await connect(server)
        head = b"POST /raw/fine HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        for _ in range(2):
            writer.write(head + b"5\r\n12345\r\n0\r\nAuthorization: Bearer x\r\n\r\n")
            assert await asyncio.wait_for(reader.readline(), 5) == b"HTTP/1.1 200 OK\r\n"
            await asyncio.wait_for(reader.readuntil(b"5 HTTP/1.1\n"), 5)
        writer.close()


@pytest.mark.parametrize("upgrade", [b"x", b"h2c", b"websocket"])
@pytest.mark.parametrize("length", [b"Content-Length: 42", b"Transfer-Encoding: chunked"])
@pytest.mark.parametrize("segments", [1, 2])
async def test_a_request_that_asks_for_an_upgrade_is_refused(upgrade: bytes, length: bytes, segments: int) -> None:
    head = b"POST /raw/fine HTTP/1.1\r\nHost: localhost\r\n%b\r\nConnection: upgrade\r\nUpgrade: %b\r\n\r\n"
    smuggled = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    async with running(Sample().make_app()) as server:
        reader, writer = await connect(server)
        for part in [head % (length, upgrade) + smuggled] if segments == 1 else [head % (length, upgrade), smuggled]:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)
        answer = await read_all(reader)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b'"code": "bad_request"' in answer
        assert answer.count(b"HTTP/1.1 ") == 1
        writer.close()


@pytest.mark.parametrize(
    "bad",
    [b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n", b"}"],
    ids=["upgrade", "no request"],
)
async def test_what_is_wrong_behind_an_unanswered_request_is_answered_after_it(bad: bytes) -> None:
    sample = Sample()
    async with running(sample.make_app()) as server:
        reader, writer = await connect(server)
        writer.write(b"GET /slow HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await asyncio.wait_for(sample.slow_begun.wait(), 5)
        writer.write(bad + b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        for _ in range(5):  # turns of the loop, in which the server reads it
            await asyncio.sleep(0)
        sample.slow_ends.set()
        assert re.findall(rb"HTTP/1.1 (\d+)", await read_all(reader)) == [b"200", b"400"]
        writer.close()
