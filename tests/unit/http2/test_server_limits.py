"""Limits of the server's end under uvicorn: clients that are idle, send slowly, take nothing, or ask for too much."""

from __future__ import annotations

import asyncio

import pytest
import structlog
from h2.events import PingReceived, ResponseReceived, StreamReset
from h2.settings import SettingCodes

from ps_http2 import frames
from ps_http2 import server as http2_server
from ps_http2.frames import PREFACE, ErrorCode, pack, pack_number, pack_settings
from ps_http2.server import MAX_RESETS, MAX_STREAMS

from .conftest import LARGE, Served
from .sockets import GET, Caller, get, headers_frame, post, until

short_headers = pytest.mark.parametrize("settings", [{"header_timeout_seconds": 0.5}])
CLOSED = {SettingCodes.INITIAL_WINDOW_SIZE: 0}  # no response has a window


# ---------------------------------------------------------------------- idle connections and slow frames


@short_headers
@pytest.mark.parametrize(
    ("sent", "is_local"),
    [
        (b"", False),
        (b"", True),
        (PREFACE[:8], False),
        (PREFACE, False),
        (PREFACE + pack_settings({}) + pack(frames.PING, 0, 0, bytes(8)), True),
    ],
)
async def test_a_connection_without_a_request_is_closed(sent: bytes, is_local: bool, service: Served) -> None:
    async with await service.connect(is_local=is_local, greets=False) as caller:
        caller.writer.write(sent)
        answer = await asyncio.wait_for(caller.reader.read(), 5)
        assert not answer or sent.startswith(PREFACE[:3])


@short_headers
@pytest.mark.parametrize(
    ("begin", "continues"),
    [
        (frames.pack_frame_header(200, frames.HEADERS, frames.END_HEADERS, 3), True),
        (pack(frames.HEADERS, 0, 3) + frames.pack_frame_header(200, frames.CONTINUATION, 0, 3), True),
        (frames.pack_frame_header(600, frames.SETTINGS, 0, 0), True),
        (pack(frames.HEADERS, 0, 3), False),
    ],
    ids=["HEADERS", "CONTINUATION", "SETTINGS", "no end of headers"],
)
async def test_slow_frames_end_the_connection(begin: bytes, continues: bool, caller: Caller) -> None:
    await caller.status()
    caller.write(begin)
    ending = asyncio.create_task(caller.end())
    async with asyncio.timeout(5):
        while continues and not ending.done():
            caller.writer.write(b"\0")
            await asyncio.sleep(0.01)
    assert await ending == ErrorCode.ENHANCE_YOUR_CALM


@short_headers
async def test_pauses_between_requests_and_in_a_body_are_allowed(caller: Caller) -> None:
    await caller.status()
    await asyncio.sleep(0.5)
    number = caller.ask(post(b"/raw/fine"), end_stream=False)
    caller.write(frames.pack_frame_header(5, frames.DATA, frames.END_STREAM, number) + b"123")
    await asyncio.sleep(0.5)
    caller.write(b"45")
    assert await caller.body(number) == b"5 HTTP/2\n"


@short_headers
async def test_an_idle_connection_is_kept_while_it_answers_pings(
    service: Served, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http2_server, "PING_INTERVAL_SECONDS", 0.2)
    monkeypatch.setattr(http2_server, "PING_TIMEOUT_SECONDS", 0.3)
    assert await caller.status() == 200
    for _ in range(2):
        caller.events.clear()
        await caller.until(PingReceived)  # which h2 answers
    assert await caller.status() == 200
    await until(service.connections[0]._transport.is_closing)  # h2 reads nothing any more


# ---------------------------------------------------------------------- responses that are not taken


@pytest.mark.parametrize("settings", [{"body_timeout_seconds": 0.4}])
@pytest.mark.parametrize("how", ["no window", "a window of one byte", "a byte at a time", "unread", "unread, local"])
async def test_a_connection_that_takes_no_response_is_closed(how: str, service: Served) -> None:
    window = {"no window": 0, "a window of one byte": 1, "a byte at a time": 0}.get(how, frames.MAX_WINDOW)
    with structlog.testing.capture_logs() as logs:
        async with await service.connect(
            is_local="local" in how, settings={SettingCodes.INITIAL_WINDOW_SIZE: window}
        ) as caller:
            if "unread" in how:
                caller.writer.transport.pause_reading()  # type: ignore[attr-defined]
            for _ in range(5):
                caller.ask(get(b"/large"))
            async with asyncio.timeout(10):
                while len(service.ended) < 5:
                    if how == "a byte at a time" and not caller.writer.is_closing():
                        caller.write(pack_number(frames.WINDOW_UPDATE, 1, 1))
                    await asyncio.sleep(0.01)
            assert service.sent_bytes < LARGE / 4, "it is kept somewhere"
            assert service.connections[0]._transport.is_closing()
    clients = {line["client"] for line in logs if "does not take" in line["event"]}
    assert clients == {"a process on this host" if "local" in how else "127.0.0.1"}


@pytest.mark.parametrize("settings", [{"body_timeout_seconds": 1}])
async def test_streams_with_tiny_windows_are_reset_although_an_earlier_one_takes_all_that_is_sent(
    service: Served,
) -> None:
    """A helper keeps the connection's window empty, so that the others have windows of a byte and send nothing."""
    async with await service.connect(settings={SettingCodes.INITIAL_WINDOW_SIZE: 1}, widens=False) as caller:
        helper = caller.ask(get(b"/large"))
        caller.widen(LARGE, helper)
        await until(lambda: service.connections and service.connections[0].sent_bytes == frames.DEFAULT_WINDOW)
        numbers = [caller.ask(get(b"/large")) for _ in range(4)]
        async with asyncio.timeout(10):
            while len(service.ended) < 4:
                caller.widen(1000)
                await asyncio.sleep(0.01)
        assert not service.connections[0]._transport.is_closing()
        for number in numbers:
            assert await caller.reset_of(number) == ErrorCode.CANCEL
        caller.reset(helper)
        await until(lambda: len(service.ended) == 5)


@pytest.mark.parametrize("settings", [{"max_requests": 4}])
async def test_a_small_response_that_is_not_taken_does_not_count_as_a_request(service: Served, caller: Caller) -> None:
    async with await service.connect(settings=CLOSED) as slow:
        numbers = [slow.ask(get(b"/look")) for _ in range(4)]
        for number in numbers:
            await slow.until(ResponseReceived, number)
        assert await caller.status() == 200
        for number in numbers:
            slow.widen(1000, number)
        for number in numbers:
            assert await slow.body(number) == b"x"


@pytest.mark.parametrize("settings", [{"body_timeout_seconds": 0.6}])
async def test_a_slow_reader_that_continues_is_served(service: Served) -> None:
    async with await service.connect(settings=CLOSED) as caller:
        number = caller.ask(get(b"/large"))
        for _ in range(40):
            caller.widen(2000, number)
            await asyncio.sleep(0.03)
        assert not service.connections[0]._transport.is_closing()
        caller.reset(number)
        await until(lambda: service.ended)


# ---------------------------------------------------------------------- too many streams and frames


async def test_a_stream_beyond_the_limit_is_refused(service: Served, caller: Caller) -> None:
    for number in range(1, 2 * MAX_STREAMS + 3, 2):
        caller.h2.send_headers(number, get(b"/slow"), end_stream=True)
    caller.flush()
    assert await caller.reset_of(2 * MAX_STREAMS + 1) == ErrorCode.REFUSED_STREAM
    service.sample.slow_ends.set()
    assert await caller.body(2 * MAX_STREAMS - 1) == b'"slow"'
    assert len(caller.of(StreamReset)) == 1
    assert await caller.status() == 200


@pytest.mark.parametrize(
    ("headers", "breach"),
    [(get(b"/look"), pack_number(frames.RST_STREAM, 0x11223344, ErrorCode.CANCEL)), (GET[1:], b"")],
    ids=["reset", "a malformed request"],
)
async def test_too_many_unanswered_streams_end_the_connection(
    headers: list[tuple[bytes, bytes]], breach: bytes, service: Served, caller: Caller
) -> None:
    """Also if the client makes the server reset them."""
    sent = headers_frame(headers, 0x11223344, end_stream=True) + breach
    for number in range(1, 4 * MAX_RESETS, 2):
        caller.write(sent.replace(b"\x11\x22\x33\x44", number.to_bytes(4, "big")))
        await asyncio.sleep(0.001)
    await until(service.connections[0]._transport.is_closing)
    assert service.connections[0].highest_stream < 2 * MAX_RESETS + 200
    assert service.connections[0]._num_running <= MAX_STREAMS


async def test_streams_may_be_reset_between_answered_ones(service: Served, caller: Caller) -> None:
    service.sample.slow_ends.set()
    for _ in range(MAX_RESETS + 20):
        caller.reset(caller.ask(get(b"/slow")))
        assert await caller.status() == 200
    assert not service.connections[0]._transport.is_closing()


async def test_too_many_refused_streams_end_the_connection(
    service: Served, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ps_http2.connection.MAX_UNPRODUCTIVE_FRAMES", 200)
    for number in range(1, 1000, 2):
        caller.write(headers_frame(get(b"/slow"), number, end_stream=True))
    await until(service.connections[0]._transport.is_closing)
    assert service.connections[0].highest_stream == 2 * (MAX_STREAMS + 201) - 1


@pytest.mark.parametrize("settings", [{"max_connections": 2}])
async def test_connections_of_both_sockets_count(service: Served) -> None:
    async with await service.connect() as one, await service.connect(is_local=True) as two:
        assert [await one.status(), await two.status()] == [200, 200]
        async with await service.connect(is_local=True, greets=False) as third:
            answer = await asyncio.wait_for(third.reader.read(), 5)
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b"overloaded" in answer
