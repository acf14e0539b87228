"""Limits of HTTP/1.1 that uvicorn lacks: on headers, connections, framing, and responses that are not read."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from services.runtime.app import add_raw_route

from .support import Sample, ask_raw, raw_connection, running

MIB = 1024 * 1024


GET = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = b"POST /raw/fine HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


# ---------------------------------------------------------------------- headers


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
        answer = await connection.read_all()
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b'"code": "slow_body"' in answer


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


async def test_too_many_headers_are_refused_although_they_are_short() -> None:
    async with running(Sample().make_app()) as server:
        answer = await ask_raw(server.address, GET + b"a:\r\n" * 100 + b"\r\n")
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert b'"expected": "<= 100 headers"' in answer


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


@pytest.mark.parametrize("framing", [b"Content-Length: 5\r\nTransfer-Encoding: chunked", b"Transfer-Encoding: gzip"])
async def test_a_body_whose_end_is_ambiguous_ends_the_connection(framing: bytes) -> None:
    """A proxy may find another end, so that what follows would be a smuggled request."""
    request = b"POST /raw/fine HTTP/1.1\r\nHost: localhost\r\n%b\r\n\r\n0\r\n\r\n" % framing
    async with running(Sample().make_app()) as server:
        for before in (b"", GET + b"\r\n"):
            answer = await ask_raw(server.address, before + request + GET + b"\r\n")
            answers = re.findall(rb"HTTP/1.1 (\d+)", answer)
            assert answers == [b"200"] * bool(before) + [b"400"]
            assert b'"code": "bad_request"' in answer


@pytest.mark.parametrize(
    ("following", "answers"),
    [(b"}\r\n\r\n", [b"200", b"400"]), (2 * (GET + b"\r\n"), 4 * [b"200"])],
    ids=["no request", "three requests"],
)
async def test_data_after_a_request_waits_for_its_response(following: bytes, answers: list[bytes]) -> None:
    sample = Sample()
    async with running(sample.make_app()) as server, raw_connection(server.address) as connection:
        connection.write(b"GET /slow HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await asyncio.wait_for(sample.slow_begun.wait(), 5)
        connection.write(following + GET + b"Connection: close\r\n\r\n")
        for _ in range(5):  # iterations of the loop, in which the server reads it
            await asyncio.sleep(0)
        sample.slow_ends.set()
        assert re.findall(rb"HTTP/1.1 (\d+)", await connection.read_all()) == answers


# ---------------------------------------------------------------------- large responses


async def test_a_response_that_is_not_read_is_held_back_and_aborted() -> None:
    num_taken = 0
    ended = asyncio.Event()

    async def send_parts(scope: Any, receive: Any, send: Any) -> None:
        nonlocal num_taken
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(50):
            await send({"type": "http.response.body", "body": bytes(MIB), "more_body": True})
            num_taken += MIB
        ended.set()

    app = Sample().make_app()
    add_raw_route(app, "/parts", send_parts, methods=["GET"], summary="In parts")
    async with running(app, body_timeout_seconds=1) as server, raw_connection(server.address) as connection:
        connection.writer.transport.pause_reading()  # type: ignore[attr-defined]
        connection.write(b"GET /parts HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await asyncio.sleep(0.5)
        assert 0 < num_taken <= 16 * MIB  # the kernel's buffers included
        await asyncio.wait_for(ended.wait(), 10)
