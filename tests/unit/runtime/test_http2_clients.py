"""HTTP/2 of uvicorn's, with clients that are not ours."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, ResponseReceived
from starlette.responses import Response

from ps_http2.asgi import receive_into
from services.runtime.app import add_raw_route
from services.runtime.logs import configure_logs
from services.runtime.settings import RequestLimits

from .support import Running, Sample, running

pytestmark = pytest.mark.asyncio

MIB = 1024 * 1024
GET = [(":method", "GET"), (":scheme", "http"), (":authority", "localhost")]


async def connect(server: Running) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, H2Connection]:
    host, port = server.address.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    http2 = H2Connection(H2Configuration(client_side=True))
    http2.initiate_connection()
    return reader, writer, http2


async def test_who_opens_its_window_little_by_little_gets_all_of_a_large_reply() -> None:
    """More updates than there may be frames that bring nothing."""
    num_bytes = 96 * MIB
    app = Sample().make_app()

    async def reply(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(num_bytes // MIB):
            await send({"type": "http.response.body", "body": bytes(MIB), "more_body": True})
        await send({"type": "http.response.body"})

    add_raw_route(app, "/large", reply, methods=["GET"], summary="Much")
    async with running(app) as server:
        reader, writer, http2 = await connect(server)
        http2.send_headers(1, [*GET, (":path", "/large")], end_stream=True)
        received = num_updates = 0
        while received < num_bytes:
            writer.write(http2.data_to_send())
            data = await asyncio.wait_for(reader.read(MIB), 5)
            assert data, "cut off"
            for event in http2.receive_data(data):
                if isinstance(event, DataReceived) and event.flow_controlled_length:
                    received += len(event.data)
                    if received < num_bytes:
                        http2.increment_flow_control_window(event.flow_controlled_length)
                        http2.increment_flow_control_window(event.flow_controlled_length, 1)
                        num_updates += 2
        writer.close()
    assert received == num_bytes
    assert num_updates > 10_000


async def test_who_has_gone_before_the_answer_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("sample", "json")
    sample = Sample()
    async with running(sample.make_app()) as server:
        _, writer, http2 = await connect(server)
        http2.send_headers(1, [*GET, (":path", "/slow")], end_stream=True)
        writer.write(http2.data_to_send())
        await asyncio.wait_for(sample.slow_begun.wait(), 5)
        http2.reset_stream(1)
        writer.write(http2.data_to_send())
        await asyncio.sleep(0.1)
        sample.slow_ends.set()
        await asyncio.sleep(0.1)
        writer.close()
    assert '"level": "error"' not in capsys.readouterr().err


async def test_a_body_that_comes_steadily_may_take_longer_than_one_that_stands_still() -> None:
    """Although it lands in the application's own memory, which hears of it now and then."""
    num_bytes = 20 * 1000
    app = Sample().make_app(RequestLimits(body_timeout_seconds=0.4))
    received = 0

    async def take(scope: Any, receive: Any, send: Any) -> None:
        nonlocal received
        buffer, has_more = memoryview(bytearray(num_bytes)), True
        while has_more:
            count, has_more = await receive_into(buffer[received:], scope, receive)
            received += count
        await Response()(scope, receive, send)

    add_raw_route(app, "/take", take, methods=["POST"], summary="Take it")
    async with running(app, body_timeout_seconds=0.4) as server:
        reader, writer, http2 = await connect(server)
        head = [(":method", "POST"), *GET[1:], (":path", "/take"), ("content-length", str(num_bytes))]
        http2.send_headers(1, head)
        for number in range(20):
            http2.send_data(1, bytes(1000), end_stream=number == 19)
            writer.write(http2.data_to_send())
            await asyncio.sleep(0.05)
        answers: list[Any] = []
        while not answers:
            events = http2.receive_data(await asyncio.wait_for(reader.read(MIB), 5))
            answers += [event.headers for event in events if isinstance(event, ResponseReceived)]
        writer.close()
    assert (b":status", b"200") in answers[0]
    assert received == num_bytes


class Part(bytearray):
    """With weak references."""


async def test_what_was_to_be_sent_to_who_has_gone_is_let_go_at_once() -> None:
    """Not only when garbage is looked for: it is large."""
    parts: list[weakref.ref[Part]] = []
    begun, done = asyncio.Event(), asyncio.Event()
    app = Sample().make_app()

    async def reply(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(3):
            part = Part(MIB)
            parts.append(weakref.ref(part))
            begun.set()
            await send({"type": "http.response.body", "body": part, "more_body": True})
        done.set()

    add_raw_route(app, "/large", reply, methods=["GET"], summary="Much")
    gc.disable()
    try:
        async with running(app) as server:
            _, writer, http2 = await connect(server)
            http2.send_headers(1, [*GET, (":path", "/large")], end_stream=True)
            writer.write(http2.data_to_send())
            await asyncio.wait_for(begun.wait(), 5)
            writer.close()
            await asyncio.wait_for(done.wait(), 5)
            await asyncio.sleep(0.1)
            assert [part() for part in parts] == [None] * 3
    finally:
        gc.enable()
