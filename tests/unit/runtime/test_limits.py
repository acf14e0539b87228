"""Limits of concurrent requests, slow bodies, large messages and replies, and those of HTTP/1.1 that uvicorn lacks."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import Response
from starlette.types import Receive, Scope, Send

from ps_protocol.errors import PROBLEM_CONTENT_TYPE
from services.runtime import gate
from services.runtime.app import add_raw_route
from services.runtime.gate import Entry, Gate
from services.runtime.metrics import ServiceMetrics
from services.runtime.security import Guard

from .support import Sample, ask_raw, raw_connection, running

INCOMPLETE = b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\nx"


# ---------------------------------------------------------------------- slow bodies


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        (b"/raw/fine", b"408", b"slow_body"),
        (b"/greet/a", b"408", b"slow_body"),
        (b"/nowhere", b"404", b"not_found"),
    ],
)
async def test_a_body_that_does_not_come_is_waited_for_a_limited_time(path: bytes, status: bytes, code: bytes) -> None:
    async with running(Sample().make_app(), body_timeout_seconds=0.1) as server:
        answer = await ask_raw(server.address, INCOMPLETE % path)
    assert answer.startswith(b"HTTP/1.1 %b " % status)
    assert PROBLEM_CONTENT_TYPE.encode() in answer
    assert b'"code": "%b"' % code in answer


# ---------------------------------------------------------------------- too many requests


async def test_a_request_beyond_the_limit_is_refused() -> None:
    sample = Sample()
    async with running(sample.make_app(), max_requests=1) as server, httpx.AsyncClient() as client:
        slow = asyncio.create_task(client.get(f"{server.address}/slow"))
        await sample.slow_begun.wait()
        response = await client.post(f"{server.address}/raw/fine", content=b"12345")
        assert (response.status_code, response.json()["code"]) == (503, "overloaded")
        assert response.headers["retry-after"] == "1"
        assert response.headers["content-type"] == PROBLEM_CONTENT_TYPE
        async with raw_connection(server.address, INCOMPLETE % b"/raw/fine") as connection, asyncio.timeout(2):
            assert (await connection.read_line()).startswith(b"HTTP/1.1 503 ")  # its body is not waited for
        sample.slow_ends.set()
        assert (await slow).status_code == 200
        assert (await client.post(f"{server.address}/raw/fine", content=b"12345")).status_code == 200


async def test_reading_requests_get_half_of_the_limit() -> None:
    """A long poll occupies its place for half a minute, and a reader may send as many as there are places."""
    arrived: asyncio.Queue[str] = asyncio.Queue()
    ends = asyncio.Event()

    async def wait(scope: Scope, receive: Receive, send: Send) -> None:
        arrived.put_nowait(scope["path"])
        await ends.wait()
        await Response("well")(scope, receive, send)

    scopes: dict[tuple[str, str], Any] = {
        ("GET", "/values/{name}"): "read",
        ("GET", "/"): None,
        ("POST", "/beat"): "train",
    }
    table = {key: Entry(key[1], wait, scope) for key, scope in scopes.items()}
    limit = Gate(table, Guard(max_requests=4), ServiceMetrics("sample"))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(limit), base_url="http://service") as http:
        reading = [asyncio.create_task(http.get(path)) for path in ("/values/w", "/")]
        for _ in reading:
            await arrived.get()
        assert (await http.get("/values/w")).json()["code"] == "overloaded"
        beats = [asyncio.create_task(http.post("/beat")) for _ in range(2)]
        for _ in beats:
            await arrived.get()
        ends.set()
        assert [(await one).text for one in (*reading, *beats)] == ["well"] * 4
        assert (await http.get("/values/w")).text == "well"


async def test_a_slow_body_is_ended_in_favour_of_a_new_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "HURRIED_SECONDS", 0.05)
    async with (
        running(Sample().make_app(), max_requests=1) as server,
        httpx.AsyncClient() as client,
        raw_connection(server.address, INCOMPLETE % b"/raw/fine") as slow,
    ):
        async with asyncio.timeout(5):
            while (await client.get(f"{server.address}/healthz")).status_code == 503:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert (await slow.read_line()).startswith(b"HTTP/1.1 408 ")


# ---------------------------------------------------------------------- large messages


async def chunks(num_bytes: int) -> AsyncIterator[bytes]:
    for _ in range(num_bytes // 10):
        yield b"x" * 10


@pytest.mark.parametrize(
    ("limit", "body", "status", "code"),
    [
        ("app.MAX_MESSAGE_BYTES", lambda: b"x" * 200, 413, "body_too_large"),
        ("app.MAX_MESSAGE_BYTES", lambda: chunks(200), 413, "body_too_large"),  # without a Content-Length
        ("gate.MAX_MESSAGE_ITEMS", lambda: b"[" + b"[]," * 100 + b"[]]", 413, "body_too_large"),
        ("gate.MAX_MESSAGES_BYTES", lambda: b" " * 101, 503, "overloaded"),
    ],
)
async def test_a_message_beyond_a_limit_is_refused_and_no_longer_counts(
    limit: str, body: Any, status: int, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"services.runtime.{limit}", 100)
    async with (
        running(Sample().make_app()) as server,
        httpx.AsyncClient(base_url=server.address) as client,
    ):
        for _ in range(3):
            response = await client.post("/greet/a", content=body())
            assert (response.status_code, response.json()["code"]) == (status, code)
            assert (await client.post("/greet/a", json={"name": "b", "times": 1})).status_code == 200
        assert (await client.post("/raw/fine", content=b"x" * 200)).status_code == 200


# ---------------------------------------------------------------------- large replies


# ---------------------------------------------------------------------- HTTP/1.1


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
