"""The client's end: requests and responses of the httpx transport, its connections, TLS and Unix sockets."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from h2.events import DataReceived, RequestReceived, StreamEnded, StreamReset
from h2.settings import SettingCodes

from ps_http2 import frames
from ps_http2.client_connection import BODY_EXTENSION, SINK_EXTENSION
from ps_http2.frames import ErrorCode, pack

from .sockets import OK, Talker, answering, ask, data_frame, headers_frame, serving, writing
from .support import Collector

# ---------------------------------------------------------------------- requests and responses


async def test_a_request_has_the_headers_of_http2(client: httpx.AsyncClient) -> None:
    seen: list[Any] = []

    async def serve(talker: Talker) -> None:
        await talker.until(StreamEnded)
        seen.extend([talker.of(RequestReceived)[0].headers, await talker.body(1)])
        talker.writer.write(headers_frame(OK) + data_frame(b"fine", end_stream=True))

    async with serving(serve) as address:
        response = await client.post(f"{address}/a?b=c", content=b"12345", headers={"X-Upper": "Case"})
    assert (response.status_code, response.content, response.extensions["http_version"]) == (200, b"fine", b"HTTP/2")
    headers, body = seen
    authority = address.removeprefix("http://").encode()
    assert headers[:4] == [
        (b":method", b"POST"), (b":scheme", b"http"), (b":authority", authority), (b":path", b"/a?b=c"),
    ]  # fmt: skip
    assert {(b"content-length", b"5"), (b"x-upper", b"Case")} <= set(headers)
    assert not {name for name, _ in headers} & {b"host", b"connection", b"transfer-encoding"}
    assert body == b"12345"


@pytest.mark.parametrize("num_bytes", [0, 1, 65_535, 65_536, 3_000_000])
async def test_bodies_of_any_size_are_sent_and_received(num_bytes: int, client: httpx.AsyncClient) -> None:
    body = bytes(range(250)) * (num_bytes // 250) + b"x" * (num_bytes % 250)

    async def echo(talker: Talker) -> None:
        rest = await talker.body(1)
        talker.h2.send_headers(1, OK)
        while rest:
            count = min(len(rest), talker.h2.local_flow_control_window(1), talker.h2.max_outbound_frame_size)
            talker.h2.send_data(1, rest[:count])
            rest = rest[count:]
        talker.h2.end_stream(1)
        talker.flush()
        await talker.hear()

    sink = Collector(num_bytes)
    async with serving(echo) as address:
        extensions = {BODY_EXTENSION: (memoryview(body),), SINK_EXTENSION: sink}
        response = await ask(client, address, "POST", **extensions)
    assert response.content == b""
    assert sink.body == body


async def test_only_a_body_with_status_200_goes_to_the_sink(client: httpx.AsyncClient) -> None:
    sink = Collector(100)
    async with serving(answering(b"problem", [(b":status", b"409")])) as address:
        response = await ask(client, address, **{SINK_EXTENSION: sink})
    assert (response.status_code, response.content, sink.body) == (409, b"problem", b"")


async def test_interim_responses_and_trailers_are_ignored(client: httpx.AsyncClient) -> None:
    interim = [headers_frame([(b":status", status), (b"link", b"x")]) for status in (b"100", b"103")]
    trailers = headers_frame([(b"x-trailer", b"1")], end_stream=True)
    async with serving(writing(*interim, headers_frame(OK), data_frame(b"fine"), trailers)) as address:
        response = await ask(client, address)
    assert (response.status_code, response.content) == (200, b"fine")
    assert "link" not in response.headers


async def test_a_response_may_come_before_the_body_is_sent(client: httpx.AsyncClient) -> None:
    reset = pack(frames.RST_STREAM, 0, 1, bytes(4))
    refusal = headers_frame([(b":status", b"413")]), data_frame(b"too much", end_stream=True), reset

    async def serve(talker: Talker) -> None:
        talker.acknowledges = False
        await writing(*refusal)(talker)

    async with serving(serve) as address:
        response = await ask(client, address, "POST", **{BODY_EXTENSION: (memoryview(bytearray(10_000_000)),)})
        assert (response.status_code, response.content) == (413, b"too much")


async def test_requests_beyond_the_servers_limit_wait(client: httpx.AsyncClient) -> None:
    """The server answers two requests at a time; h2 raises an error if there are more."""

    async def answer_pairs(talker: Talker) -> None:
        for numbers in [(1,), (3, 5), (7, 9), (11, 13)]:
            for number in numbers:
                await talker.until(StreamEnded, number)
            for number in numbers:
                talker.h2.send_headers(number, OK, end_stream=True)
            talker.flush()
        await talker.end()

    async with serving(answer_pairs, settings={SettingCodes.MAX_CONCURRENT_STREAMS: 2}) as address:
        await ask(client, address)  # and its settings are known
        responses = await asyncio.gather(*(ask(client, address) for _ in range(6)))
        assert [response.status_code for response in responses] == [200] * 6


# ---------------------------------------------------------------------- errors


def with_length(length: bytes) -> bytes:
    return headers_frame([*OK, (b"content-length", length)])


BROKEN = {
    "no status": [headers_frame([(b"x-a", b"b")])],
    "two statuses": [headers_frame(OK + OK)],
    "a malformed status": [headers_frame([(b":status", b"2x0")])],
    "nothing after 1xx": [headers_frame([(b":status", b"103")], end_stream=True)],
    "too short": [with_length(b"10"), data_frame(b"x", end_stream=True)],
    "too long": [with_length(b"1"), data_frame(b"12", end_stream=True)],
    "no body": [with_length(b"1"), data_frame(b"", end_stream=True)],
    "a malformed length": [with_length(b"x"), data_frame(b"12", end_stream=True)],
    "HTTP/1.1": [b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n"],
    "reset": [pack(frames.RST_STREAM, 0, 1, bytes([0, 0, 0, 2]))],
    "reset in the middle": [headers_frame(OK), data_frame(b"x"), pack(frames.RST_STREAM, 0, 1, bytes(4))],
    "end": [],
    "end in the middle": [headers_frame(OK), data_frame(b"x")],
    "GOAWAY in the middle": [headers_frame(OK), frames.pack_goaway(0, ErrorCode.NO_ERROR, "")],
}


@pytest.mark.parametrize("answer", BROKEN.values(), ids=BROKEN)
async def test_a_broken_response_is_a_transport_error(answer: list[bytes], client: httpx.AsyncClient) -> None:
    for extensions in ({}, {SINK_EXTENSION: Collector(100)}):
        async with serving(writing(*answer, stays=False)) as address:
            with pytest.raises(httpx.TransportError) as raised:
                await ask(client, address, **extensions)
            assert str(raised.value.request.url).rstrip("/") == address


@pytest.mark.parametrize(
    "answer",
    [
        pack(frames.RST_STREAM, 0, 1, bytes([0, 0, 0, ErrorCode.REFUSED_STREAM])),
        frames.pack_goaway(0, ErrorCode.NO_ERROR, ""),
    ],
)
async def test_an_unprocessed_request_is_a_connect_error(answer: bytes, client: httpx.AsyncClient) -> None:
    async with serving(writing(answer)) as address:
        with pytest.raises(httpx.ConnectError):
            await ask(client, address)


@pytest.mark.parametrize("is_answered", [False, True])
async def test_a_cancelled_request_releases_its_body_and_its_sink(is_answered: bool, client: httpx.AsyncClient) -> None:
    begun = asyncio.Event()
    reset: list[Any] = []

    async def serve(talker: Talker) -> None:
        talker.acknowledges = False
        await talker.until(DataReceived, 1)
        if is_answered:
            talker.writer.write(headers_frame(OK) + data_frame(b"x" * 50))
        begun.set()
        reset.append(await talker.until(StreamReset, 1))
        talker.writer.write((b"" if is_answered else headers_frame(OK)) + data_frame(b"y" * 50))  # was on its way
        await talker.until(StreamEnded, 3)
        talker.h2.send_headers(3, OK, end_stream=True)
        talker.flush()
        await talker.hear()

    async with serving(serve) as address:
        sink, body = Collector(100), bytearray(10_000_000)
        extensions = {BODY_EXTENSION: [memoryview(body)], SINK_EXTENSION: sink}
        asking = asyncio.create_task(ask(client, address, "POST", **extensions))
        await begun.wait()
        await asyncio.sleep(0.05)
        asking.cancel()
        await asyncio.wait([asking])
        extensions[BODY_EXTENSION][0].release()
        body.clear()  # which raises BufferError while the memory is borrowed
        assert (await ask(client, address)).status_code == 200  # over the same connection
        assert bytes(sink.memory) == (b"x" * 50 if is_answered else bytes(50)) + bytes(50)
        assert reset[0].error_code == ErrorCode.CANCEL
