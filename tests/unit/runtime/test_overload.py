"""Too many requests, and bodies that do not come: refused, ended, and forgotten."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import pytest
from fastapi import HTTPException
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ps_protocol.errors import PROBLEM_CONTENT_TYPE
from services.runtime import limits
from services.runtime.limits import LimitRequests, Upload
from services.runtime.settings import RequestLimits

from .support import Running, Sample, running

pytestmark = pytest.mark.asyncio


async def begin_upload(server: Running, path: str, body: bytes = b"x") -> tuple[asyncio.StreamReader, Any]:
    """A request that announces more than it sends."""
    host, port = server.address.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n".encode() + body)
    return reader, writer


@pytest.mark.parametrize("path", ["/raw/fine", "/greet/a"])
async def test_a_body_that_does_not_come_is_answered(path: str) -> None:
    app = Sample().make_app(RequestLimits(body_timeout_seconds=0.1))
    async with running(app) as served:
        reader, writer = await begin_upload(served, path)
        answer = await asyncio.wait_for(reader.readuntil(b"}"), 5)
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert PROBLEM_CONTENT_TYPE.encode() in answer
    assert b'"code": "slow_body"' in answer


async def drip() -> dict[str, Any]:
    await asyncio.sleep(0.02)
    return {"type": "http.request", "body": b"x", "more_body": True}


async def receive_all(upload: Upload) -> None:
    for _ in range(50):
        await upload.receive()


async def test_a_byte_now_and_then_is_no_progress() -> None:
    upload = Upload(drip, timeout_seconds=0.1)
    with pytest.raises(HTTPException, match="408"):
        await receive_all(upload)
    assert 2 <= upload.num_bytes <= 10
    assert (await upload.receive())["type"] == "http.disconnect"


async def test_a_fast_enough_body_takes_its_time() -> None:
    async def rate() -> dict[str, Any]:
        await asyncio.sleep(0.02)
        return {"type": "http.request", "body": bytes(1000), "more_body": True}

    upload = Upload(rate, timeout_seconds=0.1)
    for _ in range(20):  # four times the time-out
        await upload.receive()


async def test_what_comes_after_the_body_may_take_any_time() -> None:
    """The wait for the client to go, which a long poll may do."""

    async def end() -> dict[str, Any]:
        await asyncio.sleep(0.05)
        return {"type": "http.request", "body": b"", "more_body": False}

    upload = Upload(end, timeout_seconds=0.01)
    upload.is_over = True
    await upload.receive()


async def test_one_request_too_many() -> None:
    sample = Sample()
    app = sample.make_app(RequestLimits(max_requests=1))
    async with running(app) as served, httpx.AsyncClient() as first, httpx.AsyncClient() as second:
        slow = asyncio.create_task(first.get(f"{served.address}/slow"))
        await sample.slow_begun.wait()
        response = await second.post(f"{served.address}/raw/fine", content=b"12345")
        assert (response.status_code, response.json()["code"]) == (503, "overloaded")
        assert response.headers["retry-after"] == "1"
        assert response.headers["content-type"] == PROBLEM_CONTENT_TYPE
        sample.slow_ends.set()
        assert (await slow).status_code == 200
        assert (await second.post(f"{served.address}/raw/fine", content=b"12345")).status_code == 200


async def test_those_who_look_leave_half_of_the_places_to_those_who_train() -> None:
    """A long poll holds its place for half a minute, and a reader may send as many as there are places."""
    arrived: asyncio.Queue[str] = asyncio.Queue()
    ends = asyncio.Event()

    async def wait(scope: Scope, receive: Receive, send: Send) -> None:
        arrived.put_nowait(scope["path"])
        await ends.wait()
        await Response("well")(scope, receive, send)

    app = LimitRequests(wait, RequestLimits(max_requests=4))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://service") as http:
        paths = ("/v1/parameters/w?after_version=9", "/dashboard/page.js")
        looking = [asyncio.create_task(http.get(path)) for path in paths]
        for _ in looking:
            await arrived.get()
        assert (await http.get("/v1/status")).json()["code"] == "overloaded"
        beats = [asyncio.create_task(http.post(f"/v1/pservers/{index}/heartbeat")) for index in range(2)]
        for _ in beats:
            await arrived.get()
        ends.set()
        assert [(await one).text for one in (*looking, *beats)] == ["well"] * 4
        assert (await http.get("/v1/status")).text == "well"


async def test_a_crawling_body_makes_room_for_a_new_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HURRIED_SECONDS", 0.05)
    app = Sample().make_app(RequestLimits(max_requests=1))
    async with running(app) as served, httpx.AsyncClient() as client:
        reader, writer = await begin_upload(served, "/raw/fine")
        async with asyncio.timeout(5):
            while (await client.get(f"{served.address}/healthz")).status_code == 503:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert (await asyncio.wait_for(reader.readline(), 5)).startswith(b"HTTP/1.1 408 ")
        writer.close()


async def test_a_request_that_comes_while_a_slow_one_times_out_is_served() -> None:
    """The loop handles received bytes before due timers; the slow request is about to end by itself then."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def never() -> Any:
        await asyncio.Event().wait()

    async def at_once() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        answers.append(message)

    answers: list[Any] = []
    good: list[asyncio.Task[None]] = []
    limit = LimitRequests(app, RequestLimits(max_requests=1, body_timeout_seconds=1.1))
    scope = {"type": "http", "path": "/v1/trainers", "method": "POST", "http_version": "1.1", "headers": []}
    loop = asyncio.get_running_loop()
    begin = loop.time()
    slow = asyncio.create_task(limit(scope, never, send))

    def come_late() -> None:
        time.sleep(0.2)  # beyond the time-out, which is handled in this turn of the loop, and felt in the next
        loop.call_soon(lambda: good.append(asyncio.create_task(limit(scope, at_once, send))))

    loop.call_at(begin + 1.05, come_late)
    with pytest.raises(HTTPException):
        await slow
    await asyncio.gather(*good)
    assert [answer["status"] for answer in answers] == [200]
