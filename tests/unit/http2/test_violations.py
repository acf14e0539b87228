"""After a violation, the stream or the connection ends with the error code that RFC 9113 names."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from hpack import Encoder
from hyperframe.frame import GoAwayFrame, RstStreamFrame

from ps_http2 import connection as connection_module
from ps_http2 import frames
from ps_http2.connection import CONNECTION_WINDOW
from ps_http2.frames import ErrorCode, pack, pack_number, pack_settings
from ps_http2.reader import MAX_FRAME_BYTES

from .support import ANSWER, REQUEST, ClientEnd, End, FakeTransport, feed, parse

pytestmark = pytest.mark.asyncio

COMPRESSION_ERROR = ErrorCode.COMPRESSION_ERROR
ENHANCE_YOUR_CALM = ErrorCode.ENHANCE_YOUR_CALM
FLOW_CONTROL_ERROR = ErrorCode.FLOW_CONTROL_ERROR
FRAME_SIZE_ERROR = ErrorCode.FRAME_SIZE_ERROR
PROTOCOL_ERROR = ErrorCode.PROTOCOL_ERROR
STREAM_CLOSED = ErrorCode.STREAM_CLOSED
END = frames.END_STREAM
WHOLE = frames.END_HEADERS
SETTINGS = pack_settings({})
# Without a dynamic table, so that a block can be said again.
BLOCK = b"".join([b"\x00\x07:method\x04POST", b"\x00\x07:scheme\x04http", b"\x00\x05:path\x01/"])
HEADERS = pack(frames.HEADERS, WHOLE, 1, BLOCK)
OVER = pack(frames.HEADERS, WHOLE | END, 1, BLOCK)
LARGEST = frames.MAX_WINDOW

OF_THE_CONNECTION = {
    "no settings at first": (HEADERS, PROTOCOL_ERROR),
    "data of an idle stream": (SETTINGS + pack(frames.DATA, 0, 1, b"x"), PROTOCOL_ERROR),
    "data of stream 0": (SETTINGS + pack(frames.DATA, 0, 0, b"x"), PROTOCOL_ERROR),
    "reset of an idle stream": (SETTINGS + pack_number(frames.RST_STREAM, 1, 8), PROTOCOL_ERROR),
    "reset of stream 0": (SETTINGS + pack_number(frames.RST_STREAM, 0, 8), PROTOCOL_ERROR),
    "reset of 3 bytes": (SETTINGS + HEADERS + pack(frames.RST_STREAM, 0, 1, b"123"), FRAME_SIZE_ERROR),
    "window of an idle stream": (SETTINGS + pack_number(frames.WINDOW_UPDATE, 1, 8), PROTOCOL_ERROR),
    "window that does not grow": (SETTINGS + pack_number(frames.WINDOW_UPDATE, 0, 0), PROTOCOL_ERROR),
    "window of 5 bytes": (SETTINGS + pack(frames.WINDOW_UPDATE, 0, 0, b"12345"), FRAME_SIZE_ERROR),
    "window that is too large": (
        SETTINGS + pack_number(frames.WINDOW_UPDATE, 0, LARGEST),
        FLOW_CONTROL_ERROR,
    ),
    "initial window that is too large": (pack_settings({4: LARGEST + 1}), FLOW_CONTROL_ERROR),
    "initial window that makes one too large": (
        SETTINGS + HEADERS + pack_number(frames.WINDOW_UPDATE, 1, 1000) + pack_settings({4: LARGEST}),
        FLOW_CONTROL_ERROR,
    ),
    "frames that are too small": (pack_settings({5: 16_383}), PROTOCOL_ERROR),
    "frames that are too large": (pack_settings({5: 1 << 24}), PROTOCOL_ERROR),
    "push of 2": (pack_settings({2: 2}), PROTOCOL_ERROR),
    "settings of 5 bytes": (pack(frames.SETTINGS, 0, 0, b"12345"), FRAME_SIZE_ERROR),
    "settings of a stream": (pack(frames.SETTINGS, 0, 1), PROTOCOL_ERROR),
    "settings that acknowledge with content": (
        SETTINGS + pack(frames.SETTINGS, 1, 0, bytes(6)),
        FRAME_SIZE_ERROR,
    ),
    "ping of 7 bytes": (SETTINGS + pack(frames.PING, 0, 0, b"1234567"), FRAME_SIZE_ERROR),
    "ping of a stream": (SETTINGS + pack(frames.PING, 0, 1, b"12345678"), PROTOCOL_ERROR),
    "goaway of a stream": (SETTINGS + pack(frames.GOAWAY, 0, 1, bytes(8)), PROTOCOL_ERROR),
    "goaway of 7 bytes": (SETTINGS + pack(frames.GOAWAY, 0, 0, bytes(7)), FRAME_SIZE_ERROR),
    "priority of stream 0": (SETTINGS + pack(frames.PRIORITY, 0, 0, bytes(5)), PROTOCOL_ERROR),
    "promise": (SETTINGS + HEADERS + pack(frames.PUSH_PROMISE, WHOLE, 1, bytes(4) + BLOCK), PROTOCOL_ERROR),
    "frame that is too large": (
        SETTINGS + frames.pack_frame_header(MAX_FRAME_BYTES + 1, 0, 0, 1),
        FRAME_SIZE_ERROR,
    ),
    "data with more padding than payload": (
        SETTINGS + HEADERS + pack(frames.DATA, frames.PADDED, 1, b"\x03ab"),
        PROTOCOL_ERROR,
    ),
    "headers with more padding than payload": (
        SETTINGS + pack(frames.HEADERS, WHOLE | frames.PADDED, 1, b"\xff" + BLOCK),
        PROTOCOL_ERROR,
    ),
    "headers without their padding's length": (
        SETTINGS + pack(frames.HEADERS, WHOLE | frames.PADDED, 1),
        FRAME_SIZE_ERROR,
    ),
    "headers too short for a priority": (
        SETTINGS + pack(frames.HEADERS, WHOLE | frames.HAS_PRIORITY, 1, b"1234"),
        PROTOCOL_ERROR,
    ),
    "headers that are none": (
        SETTINGS + pack(frames.HEADERS, WHOLE, 1, b"\xff\xff\xff\xff"),
        COMPRESSION_ERROR,
    ),
    "continuation of nothing": (SETTINGS + pack(frames.CONTINUATION, WHOLE, 1, BLOCK), PROTOCOL_ERROR),
    "continuation of another stream": (
        SETTINGS + pack(frames.HEADERS, 0, 1, BLOCK) + pack(frames.CONTINUATION, WHOLE, 3),
        PROTOCOL_ERROR,
    ),
    "something within headers": (
        SETTINGS + pack(frames.HEADERS, 0, 1, BLOCK) + pack(frames.PING, 0, 0, bytes(8)),
        PROTOCOL_ERROR,
    ),
    "more data than the window": (
        SETTINGS + HEADERS + pack(frames.DATA, 0, 1, bytes(65_536)),
        FLOW_CONTROL_ERROR,
    ),
    "headers in more frames than needed": (
        SETTINGS + pack(frames.HEADERS, 0, 1, BLOCK) + 17 * pack(frames.CONTINUATION, 0, 1),
        ENHANCE_YOUR_CALM,
    ),
    "headers without an end": (
        SETTINGS + pack(frames.HEADERS, 0, 1, BLOCK) + 5 * pack(frames.CONTINUATION, 0, 1, bytes(16_384)),
        ENHANCE_YOUR_CALM,
    ),
    "headers in one huge frame": (
        SETTINGS + frames.pack_frame_header(65_537, frames.HEADERS, WHOLE, 1),
        ENHANCE_YOUR_CALM,
    ),
    "headers that are larger than they look": (
        # One header of 4,000 bytes in the table, and 20 times one byte that names it.
        SETTINGS + pack(frames.HEADERS, WHOLE, 1, b"\x40\x01a\x7f\xa1\x1e" + b"x" * 4000 + b"\xbe" * 20),
        COMPRESSION_ERROR,
    ),
}

OF_THE_STREAM = {
    "data behind the end": (OVER + pack(frames.DATA, 0, 1, b"x"), STREAM_CLOSED),
    "headers behind the end": (OVER + HEADERS, STREAM_CLOSED),
    "trailers that are no end": (HEADERS + HEADERS, PROTOCOL_ERROR),
    "window that does not grow": (HEADERS + pack_number(frames.WINDOW_UPDATE, 1, 0), PROTOCOL_ERROR),
    "window that is too large": (HEADERS + pack_number(frames.WINDOW_UPDATE, 1, LARGEST), FLOW_CONTROL_ERROR),
}


def length_of(num_bytes: int) -> bytes:
    text = b"%d" % num_bytes
    return pack(frames.HEADERS, WHOLE, 1, BLOCK + b"\x00\x0econtent-length" + bytes([len(text)]) + text)


OF_THE_STREAM |= {
    "body that is too short": (length_of(6) + pack(frames.DATA, END, 1, b"12345"), PROTOCOL_ERROR),
    "body that is too long": (length_of(4) + pack(frames.DATA, 0, 1, b"12345"), PROTOCOL_ERROR),
    "body that is too short for its trailers": (
        length_of(4) + pack(frames.HEADERS, WHOLE | END, 1, BLOCK),
        PROTOCOL_ERROR,
    ),
    "no body": (length_of(4)[:4] + bytes([WHOLE | END]) + length_of(4)[5:], PROTOCOL_ERROR),
}


def connect(end: Callable[[], End] = End) -> tuple[End, FakeTransport]:
    ours = end()
    transport = ours.connect()
    transport.take()
    return ours, transport


@pytest.mark.parametrize(("said", "code"), OF_THE_CONNECTION.values(), ids=OF_THE_CONNECTION)
@pytest.mark.parametrize("portion", [1 << 20, 1])
async def test_the_connection_ends(said: bytes, code: ErrorCode, portion: int) -> None:
    ours, transport = connect()
    feed(ours, said, [portion] * len(said))
    *_, last = parse(transport.take())
    assert isinstance(last, GoAwayFrame)
    assert last.error_code == code
    assert (transport.is_closed, ours.streams) == (True, {})


@pytest.mark.parametrize(("said", "code"), OF_THE_STREAM.values(), ids=OF_THE_STREAM)
async def test_the_stream_ends_and_no_other(said: bytes, code: ErrorCode) -> None:
    ours, transport = connect()
    feed(ours, SETTINGS + said)
    resets = [frame for frame in parse(transport.take()) if isinstance(frame, RstStreamFrame)]
    assert [(frame.stream_id, frame.error_code) for frame in resets] == [(1, code)]
    assert ours.num_resets == 1, "otherwise a peer could make us reset streams without a limit"
    third = pack(frames.HEADERS, WHOLE, 3, BLOCK)
    feed(ours, third + pack(frames.DATA, END, 3, b"12345"))
    assert ours.sinks[3].body == b"12345"
    assert [*ours.streams] == [3]


async def test_frames_that_are_allowed_although_they_look_strange() -> None:
    ours, transport = connect()
    reserved = 1 << 31
    window = pack(frames.WINDOW_UPDATE, 0, 0, (reserved | 5).to_bytes(4, "big"))
    push_off, unknown = pack_settings({frames.ENABLE_PUSH: 0}), pack_settings({0x99: 7})
    priority = pack(frames.PRIORITY, 0, 9, bytes(5))
    late = pack_number(frames.RST_STREAM, 1, 8) + pack(frames.DATA, 0, 1, b"x") + pack_number(8, 1, 5)
    trailers = pack(frames.HEADERS, WHOLE | END, 1, BLOCK)
    feed(ours, push_off + unknown + window + priority + HEADERS + late + late + trailers)
    assert not transport.is_closed
    assert ours._writer.window == frames.DEFAULT_WINDOW + 5
    assert ours.num_resets == 1


@pytest.mark.parametrize("portion", [1 << 20, 1000])
@pytest.mark.parametrize("num_bytes", [0, 1, 70_000, MAX_FRAME_BYTES])
async def test_kinds_of_frames_that_are_not_known(num_bytes: int, portion: int) -> None:
    ours, transport = connect()
    feed(ours, SETTINGS + HEADERS)
    strange = pack(0x77, 0xFF, 1, bytes(num_bytes))
    body = b"".join([strange + pack(frames.DATA, END if is_last else 0, 1, b"12345") for is_last in (False, True)])
    feed(ours, strange[:-1], [portion] * len(strange))
    assert ours.is_in_frame
    feed(ours, strange[-1:])
    assert not ours.is_in_frame
    feed(ours, body, [portion] * len(body))
    assert ours.sinks[1].body == b"1234512345"
    assert not transport.is_closed


@pytest.mark.parametrize(
    "frame",
    [
        pack(frames.PING, frames.ACK, 0, bytes(8)),
        pack(frames.SETTINGS, frames.ACK, 0),
        pack(frames.PRIORITY, 0, 5, bytes(5)),
        pack(frames.DATA, 0, 1),
        pack(frames.DATA, frames.PADDED, 1, b"\0"),
        pack(frames.DATA, 0, 3, b"x"),
        pack_number(frames.WINDOW_UPDATE, 1, 1),
        pack_number(frames.RST_STREAM, 3, 1),
        pack(frames.HEADERS, WHOLE | END, 3, BLOCK),
        pack(0x77, 0, 0, b"x"),
    ],
    ids=[
        "pings",
        "settings",
        "priorities",
        "no data",
        "padding",
        "late data",
        "windows",
        "resets",
        "late headers",
        "?",
    ],
)
async def test_too_many_frames_that_bring_nothing(frame: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "MAX_UNPRODUCTIVE_FRAMES", 100)
    ours, transport = connect()
    feed(ours, SETTINGS + pack(frames.HEADERS, WHOLE, 1, BLOCK) + pack(frames.HEADERS, WHOLE, 3, BLOCK))
    feed(ours, pack_number(frames.RST_STREAM, 3, 8))
    feed(ours, frame * 90)
    feed(ours, pack(frames.DATA, 0, 1, b"x"))
    feed(ours, frame * 100)
    assert not transport.is_closed
    feed(ours, frame)
    assert transport.is_closed
    assert parse(transport.take())[-1].error_code == ENHANCE_YOUR_CALM


@pytest.mark.parametrize("num_bytes", [100, 2500])
async def test_windows_of_a_large_answer_bring_something(num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients with small windows say for every few KiB that they have room."""
    monkeypatch.setattr(connection_module, "MAX_UNPRODUCTIVE_FRAMES", 100)
    ours, transport = connect()
    feed(ours, SETTINGS + OVER)
    stream = ours.streams[1]
    stream.send_headers(ANSWER)
    stream.send_nowait(bytes(1_000_000))
    while not stream.is_closed and not transport.is_closed:
        feed(ours, pack_number(frames.WINDOW_UPDATE, 1, num_bytes) + pack_number(frames.WINDOW_UPDATE, 0, num_bytes))
        transport.take()
    assert not transport.is_closed
    assert stream.is_closed


async def test_but_not_if_they_are_tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "MAX_UNPRODUCTIVE_FRAMES", 100)
    ours, transport = connect()
    feed(ours, SETTINGS + OVER + pack_number(frames.WINDOW_UPDATE, 0, 1_000_000))
    ours.streams[1].send_headers(ANSWER)
    ours.streams[1].send_nowait(bytes(1_000_000))
    for _ in range(110):
        feed(ours, pack_number(frames.WINDOW_UPDATE, 1, 1))
    assert transport.is_closed


@pytest.mark.parametrize("frame", [pack(frames.PING, 0, 0, bytes(8)), SETTINGS])
async def test_answers_that_are_not_read(frame: bytes) -> None:
    ours, transport = connect()
    ours.pause_writing()
    feed(ours, SETTINGS)
    for _ in range(1000):
        feed(ours, frame * 30 + pack(frames.HEADERS, WHOLE, ours.highest_stream + 2 or 1, BLOCK))
        if transport.is_closed:
            break
    assert transport.is_closed
    assert len(transport.written) <= connection_module.MAX_UNSENT_CONTROL_BYTES + 1000
    assert not ours._writer.num_queued


async def test_windows_of_the_connection_count_padding_and_streams_that_are_over() -> None:
    ours, transport = connect()
    feed(ours, SETTINGS + OVER)
    ours.streams[1].close()
    transport.take()
    late = pack(frames.DATA, frames.PADDED, 1, b"\xff" + bytes(MAX_FRAME_BYTES - 1))
    for _ in range(CONNECTION_WINDOW // 2 // MAX_FRAME_BYTES):
        feed(ours, late)
    assert not transport.written
    feed(ours, late)
    [update] = parse(transport.take())
    assert (update.stream_id, update.window_increment) == (0, CONNECTION_WINDOW // 2 + MAX_FRAME_BYTES)


async def test_a_server_that_breaks_the_protocol() -> None:
    for said, code in (
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", None),
        (SETTINGS + pack(frames.HEADERS, WHOLE, 2, Encoder().encode(ANSWER)), PROTOCOL_ERROR),
        (SETTINGS + pack(frames.HEADERS, WHOLE, 3, Encoder().encode(ANSWER)), PROTOCOL_ERROR),
        (SETTINGS + pack(frames.DATA, 0, 1, b"x"), PROTOCOL_ERROR),
        (
            SETTINGS + pack(frames.PUSH_PROMISE, WHOLE, 1, b"\0\0\0\2" + Encoder().encode(REQUEST)),
            PROTOCOL_ERROR,
        ),
    ):
        ours, transport = connect(ClientEnd)
        assert isinstance(ours, ClientEnd)
        stream = ours.ask()
        transport.take()
        feed(ours, said)
        assert transport.is_closed
        assert stream.error is not None
        assert code is None or parse(transport.take())[-1].error_code == code


async def test_nothing_is_left_running(monkeypatch: pytest.MonkeyPatch) -> None:
    """A timer ends a connection that does not close by itself; nothing else is left."""
    monkeypatch.setattr(connection_module, "CLOSE_SECONDS", 0.01)
    ours, transport = connect()
    aborted = asyncio.Event()
    transport.abort = aborted.set  # type: ignore[method-assign]
    feed(ours, HEADERS)
    await asyncio.wait_for(aborted.wait(), 5)
    assert asyncio.all_tasks() == {asyncio.current_task()}
