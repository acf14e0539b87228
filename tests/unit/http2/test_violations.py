"""After a violation, the stream or the connection ends with the error code that RFC 9113 names."""

from __future__ import annotations

import struct

import pytest
from hyperframe.frame import GoAwayFrame, RstStreamFrame

from ps_http2 import connection as connection_module
from ps_http2 import frames
from ps_http2.connection import CONNECTION_WINDOW
from ps_http2.frames import END_HEADERS, END_STREAM, ErrorCode, pack, pack_number, pack_settings
from ps_http2.reader import MAX_FRAME_BYTES

from .support import ANSWER, End, FakeTransport, feed, parse

COMPRESSION_ERROR = ErrorCode.COMPRESSION_ERROR
ENHANCE_YOUR_CALM = ErrorCode.ENHANCE_YOUR_CALM
FLOW_CONTROL_ERROR = ErrorCode.FLOW_CONTROL_ERROR
FRAME_SIZE_ERROR = ErrorCode.FRAME_SIZE_ERROR
PROTOCOL_ERROR = ErrorCode.PROTOCOL_ERROR
STREAM_CLOSED = ErrorCode.STREAM_CLOSED
SETTINGS = pack_settings({})
# Without a dynamic table, so that a block can be repeated.
BLOCK = b"\x00\x07:method\x04POST\x00\x07:scheme\x04http\x00\x05:path\x01/"
HEADERS = pack(frames.HEADERS, END_HEADERS, 1, BLOCK)
UNFINISHED = pack(frames.HEADERS, 0, 1, BLOCK)
COMPLETE = pack(frames.HEADERS, END_HEADERS | END_STREAM, 1, BLOCK)


def announcing(num_bytes: int, flags: int = END_HEADERS) -> bytes:
    """Return HEADERS with a Content-Length of one digit."""
    return pack(frames.HEADERS, flags, 1, BLOCK + b"\x00\x0econtent-length\x01%d" % num_bytes)


def trailers(name: bytes) -> bytes:
    block = b"\x00" + bytes([len(name)]) + name + b"\x01x"
    return pack(frames.HEADERS, END_HEADERS | END_STREAM, 1, block)


CONNECTION_ERRORS = {
    "data of an idle stream": (pack(frames.DATA, 0, 1, b"x"), PROTOCOL_ERROR),
    "data of stream 0": (pack(frames.DATA, 0, 0, b"x"), PROTOCOL_ERROR),
    "reset of an idle stream": (pack_number(frames.RST_STREAM, 1, 8), PROTOCOL_ERROR),
    "reset of stream 0": (pack_number(frames.RST_STREAM, 0, 8), PROTOCOL_ERROR),
    "reset of 3 bytes": (HEADERS + pack(frames.RST_STREAM, 0, 1, b"123"), FRAME_SIZE_ERROR),
    "window of an idle stream": (pack_number(frames.WINDOW_UPDATE, 1, 8), PROTOCOL_ERROR),
    "window that does not grow": (pack_number(frames.WINDOW_UPDATE, 0, 0), PROTOCOL_ERROR),
    "window of 5 bytes": (pack(frames.WINDOW_UPDATE, 0, 0, b"12345"), FRAME_SIZE_ERROR),
    "window that is too large": (pack_number(frames.WINDOW_UPDATE, 0, frames.MAX_WINDOW), FLOW_CONTROL_ERROR),
    "initial window that is too large": (pack_settings({4: frames.MAX_WINDOW + 1}), FLOW_CONTROL_ERROR),
    "initial window that makes one too large": (
        HEADERS + pack_number(frames.WINDOW_UPDATE, 1, 1000) + pack_settings({4: frames.MAX_WINDOW}),
        FLOW_CONTROL_ERROR,
    ),
    "frames that are too small": (pack_settings({5: 16_383}), PROTOCOL_ERROR),
    "frames that are too large": (pack_settings({5: 1 << 24}), PROTOCOL_ERROR),
    "push of 2": (pack_settings({2: 2}), PROTOCOL_ERROR),
    "settings of 5 bytes": (pack(frames.SETTINGS, 0, 0, b"12345"), FRAME_SIZE_ERROR),
    "settings of a stream": (pack(frames.SETTINGS, 0, 1), PROTOCOL_ERROR),
    "settings that acknowledge with content": (pack(frames.SETTINGS, 1, 0, bytes(6)), FRAME_SIZE_ERROR),
    "ping of 7 bytes": (pack(frames.PING, 0, 0, b"1234567"), FRAME_SIZE_ERROR),
    "ping of a stream": (pack(frames.PING, 0, 1, b"12345678"), PROTOCOL_ERROR),
    "goaway of a stream": (pack(frames.GOAWAY, 0, 1, bytes(8)), PROTOCOL_ERROR),
    "goaway of 7 bytes": (pack(frames.GOAWAY, 0, 0, bytes(7)), FRAME_SIZE_ERROR),
    "priority of stream 0": (pack(frames.PRIORITY, 0, 0, bytes(5)), PROTOCOL_ERROR),
    "promise": (HEADERS + pack(frames.PUSH_PROMISE, END_HEADERS, 1, bytes(4) + BLOCK), PROTOCOL_ERROR),
    "frame that is too large": (frames.pack_frame_header(MAX_FRAME_BYTES + 1, 0, 0, 1), FRAME_SIZE_ERROR),
    "data with more padding than payload": (HEADERS + pack(frames.DATA, frames.PADDED, 1, b"\x03ab"), PROTOCOL_ERROR),
    "headers with more padding than payload": (
        pack(frames.HEADERS, END_HEADERS | frames.PADDED, 1, b"\xff" + BLOCK),
        PROTOCOL_ERROR,
    ),
    "headers without their padding's length": (pack(frames.HEADERS, END_HEADERS | frames.PADDED, 1), FRAME_SIZE_ERROR),
    "headers too short for a priority": (
        pack(frames.HEADERS, END_HEADERS | frames.HAS_PRIORITY, 1, b"1234"),
        PROTOCOL_ERROR,
    ),
    "headers that are none": (pack(frames.HEADERS, END_HEADERS, 1, b"\xff\xff\xff\xff"), COMPRESSION_ERROR),
    "continuation of nothing": (pack(frames.CONTINUATION, END_HEADERS, 1, BLOCK), PROTOCOL_ERROR),
    "continuation of another stream": (UNFINISHED + pack(frames.CONTINUATION, END_HEADERS, 3), PROTOCOL_ERROR),
    "something within headers": (UNFINISHED + pack(frames.PING, 0, 0, bytes(8)), PROTOCOL_ERROR),
    "more data than the window": (HEADERS + pack(frames.DATA, 0, 1, bytes(65_536)), FLOW_CONTROL_ERROR),
    "headers in more frames than needed": (UNFINISHED + 17 * pack(frames.CONTINUATION, 0, 1), ENHANCE_YOUR_CALM),
    "headers without an end": (UNFINISHED + 5 * pack(frames.CONTINUATION, 0, 1, bytes(16_384)), ENHANCE_YOUR_CALM),
    "too many headers": (pack(frames.HEADERS, END_HEADERS, 1, b"\x93" * 101), ENHANCE_YOUR_CALM),
    "headers in one huge frame": (frames.pack_frame_header(65_537, frames.HEADERS, END_HEADERS, 1), ENHANCE_YOUR_CALM),
    "headers that are larger than they look": (
        # One header of 4,000 bytes in the table, and 20 times one byte that names it.
        pack(frames.HEADERS, END_HEADERS, 1, b"\x40\x01a\x7f\xa1\x1e" + b"x" * 4000 + b"\xbe" * 20),
        COMPRESSION_ERROR,
    ),
}

STREAM_ERRORS = {
    "data after the end": (COMPLETE + pack(frames.DATA, 0, 1, b"x"), STREAM_CLOSED),
    "headers after the end": (COMPLETE + HEADERS, STREAM_CLOSED),
    "trailers that are no end": (HEADERS + HEADERS, PROTOCOL_ERROR),
    "window that does not grow": (HEADERS + pack_number(frames.WINDOW_UPDATE, 1, 0), PROTOCOL_ERROR),
    "window that is too large": (HEADERS + pack_number(frames.WINDOW_UPDATE, 1, frames.MAX_WINDOW), FLOW_CONTROL_ERROR),
    "short body": (announcing(6) + pack(frames.DATA, END_STREAM, 1, b"12345"), PROTOCOL_ERROR),
    "long body": (announcing(4) + pack(frames.DATA, 0, 1, b"12345"), PROTOCOL_ERROR),
    "short body before trailers": (announcing(4) + trailers(b"a"), PROTOCOL_ERROR),
    "trailers with a pseudo header": (HEADERS + trailers(b":path"), PROTOCOL_ERROR),
    "trailers with an uppercase name": (HEADERS + trailers(b"A"), PROTOCOL_ERROR),
    "trailers with an empty name": (HEADERS + trailers(b""), PROTOCOL_ERROR),
    "no body": (announcing(4, END_HEADERS | END_STREAM), PROTOCOL_ERROR),
}

USELESS = {
    "PING": pack(frames.PING, frames.ACK, 0, bytes(8)),
    "SETTINGS": pack(frames.SETTINGS, frames.ACK, 0),
    "PRIORITY": pack(frames.PRIORITY, 0, 5, bytes(5)),
    "empty DATA": pack(frames.DATA, 0, 1),
    "padding": pack(frames.DATA, frames.PADDED, 1, b"\0"),
    "late DATA": pack(frames.DATA, 0, 3, b"x"),
    "WINDOW_UPDATE": pack_number(frames.WINDOW_UPDATE, 1, 1),
    "GOAWAY": pack(frames.GOAWAY, 0, 0, bytes(8)),
    "late RST_STREAM": pack_number(frames.RST_STREAM, 3, 1),
    "late HEADERS": pack(frames.HEADERS, END_HEADERS | END_STREAM, 3, BLOCK),
    "unknown": pack(0x77, 0, 0, b"x"),
}


def accept() -> tuple[End, FakeTransport]:
    ours = End()
    transport = ours.connect()
    transport.take()
    return ours, transport


@pytest.mark.parametrize(("sent", "code"), CONNECTION_ERRORS.values(), ids=CONNECTION_ERRORS)
@pytest.mark.parametrize("portion", [1 << 20, 1])
async def test_the_connection_ends(sent: bytes, code: ErrorCode, portion: int) -> None:
    ours, transport = accept()
    feed(ours, SETTINGS)
    transport.take()
    after = pack(frames.HEADERS, END_HEADERS, 99, BLOCK)  # also in the same read
    feed(ours, sent + after, [portion] * len(sent + after))
    assert 99 not in ours.all_streams
    *_, last = parse(transport.take())
    assert isinstance(last, GoAwayFrame)
    assert last.error_code == code
    assert (transport.is_closed, ours.streams) == (True, {})


async def test_the_first_frame_is_settings() -> None:
    ours, transport = accept()
    feed(ours, HEADERS)
    assert (transport.is_closed, parse(transport.take())[-1].error_code) == (True, PROTOCOL_ERROR)


@pytest.mark.parametrize(("sent", "code"), STREAM_ERRORS.values(), ids=STREAM_ERRORS)
async def test_the_stream_ends_and_no_other(sent: bytes, code: ErrorCode) -> None:
    ours, transport = accept()
    feed(ours, SETTINGS + sent)
    resets = [frame for frame in parse(transport.take()) if isinstance(frame, RstStreamFrame)]
    assert [(frame.stream_id, frame.error_code) for frame in resets] == [(1, code)]
    assert ours.num_resets == 1, "otherwise a peer could make us reset streams without a limit"
    feed(ours, pack(frames.HEADERS, END_HEADERS, 3, BLOCK) + pack(frames.DATA, END_STREAM, 3, b"12345"))
    assert ours.sinks[3].body == b"12345"
    assert [*ours.streams] == [3]


async def test_unusual_frames_are_allowed() -> None:
    ours, transport = accept()
    reserved = 1 << 31
    window = pack(frames.WINDOW_UPDATE, 0, 0, (reserved | 5).to_bytes(4, "big"))
    unusual = pack_settings({frames.ENABLE_PUSH: 0}) + pack_settings({0x99: 7}) + pack(frames.PRIORITY, 0, 9, bytes(5))
    late = pack_number(frames.RST_STREAM, 1, 8) + pack(frames.DATA, 0, 1, b"x") + pack_number(8, 1, 5)
    feed(ours, unusual + window + HEADERS + late + late + COMPLETE)
    assert not transport.is_closed
    assert ours._writer.window == frames.DEFAULT_WINDOW + 5
    assert ours.num_resets == 1


@pytest.mark.parametrize("portion", [1 << 20, 1000])
@pytest.mark.parametrize("num_bytes", [0, 1, 70_000, MAX_FRAME_BYTES])
async def test_frames_of_unknown_types_are_skipped(num_bytes: int, portion: int) -> None:
    ours, transport = accept()
    unknown = pack(0x77, 0xFF, 1, bytes(num_bytes))
    body = b"".join([unknown + pack(frames.DATA, flags, 1, b"12345") for flags in (0, END_STREAM)])
    feed(ours, SETTINGS + HEADERS)
    feed(ours, body, [portion] * len(body))
    assert ours.sinks[1].body == b"1234512345"
    assert not transport.is_closed


@pytest.mark.parametrize("frame", USELESS.values(), ids=USELESS)
async def test_too_many_useless_frames_in_a_row_end_the_connection(
    frame: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "MAX_UNPRODUCTIVE_FRAMES", 100)
    ours, transport = accept()
    feed(ours, SETTINGS + HEADERS + pack(frames.HEADERS, END_HEADERS, 3, BLOCK))
    feed(ours, pack_number(frames.RST_STREAM, 3, 8))
    feed(ours, frame * 90 + pack(frames.DATA, 0, 1, b"x") + frame * 100)
    assert not transport.is_closed
    feed(ours, frame)
    assert transport.is_closed
    assert parse(transport.take())[-1].error_code == ENHANCE_YOUR_CALM


async def test_rare_pings_and_the_rest_of_a_large_body_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "MAX_UNPRODUCTIVE_FRAMES", 100)
    ours, transport = accept()
    feed(ours, SETTINGS + HEADERS + pack_number(frames.RST_STREAM, 1, 8) + pack(frames.DATA, 0, 1, bytes(64)) * 200)
    monkeypatch.setattr(connection_module, "UNPRODUCTIVE_SECONDS", 0)
    feed(ours, USELESS["PING"] * 500)
    assert not transport.is_closed


async def test_only_the_last_value_of_a_repeated_setting_is_applied() -> None:
    ours, _ = accept()
    feed(ours, SETTINGS + HEADERS)
    twice = struct.pack(">HIHI", frames.INITIAL_WINDOW_SIZE, frames.MAX_WINDOW, frames.INITIAL_WINDOW_SIZE, 0)
    ours.streams[1].send_window += 5
    feed(ours, pack(frames.SETTINGS, 0, 0, twice * 5000))
    assert ours.streams[1].send_window == 5


@pytest.mark.parametrize(("num_bytes", "is_allowed"), [(1, False), (100, True), (2500, True)])
async def test_small_windows_for_a_large_response_are_useful_and_tiny_ones_are_not(
    num_bytes: int, is_allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients with small windows send an update for every few KiB."""
    monkeypatch.setattr(connection_module, "MAX_UNPRODUCTIVE_FRAMES", 100)
    ours, transport = accept()
    feed(ours, SETTINGS + COMPLETE)
    stream = ours.streams[1]
    stream.send_headers(ANSWER)
    stream.send_nowait(bytes(1_000_000))
    while not stream.is_closed and not transport.is_closed:
        feed(ours, pack_number(frames.WINDOW_UPDATE, 1, num_bytes) + pack_number(frames.WINDOW_UPDATE, 0, num_bytes))
        transport.take()
    assert transport.is_closed != is_allowed


@pytest.mark.parametrize("frame", [pack(frames.PING, 0, 0, bytes(8)), SETTINGS])
async def test_unread_acknowledgements_are_bounded(frame: bytes) -> None:
    ours, transport = accept()
    ours.pause_writing()
    feed(ours, SETTINGS)
    for number in range(1, 2001, 2):
        feed(ours, frame * 30 + pack(frames.HEADERS, END_HEADERS, number, BLOCK))
    assert transport.is_closed
    assert len(transport.written) <= connection_module.MAX_UNSENT_CONTROL_BYTES + 1000
    assert not ours._writer.num_queued


async def test_the_connections_window_counts_padding_and_closed_streams() -> None:
    ours, transport = accept()
    feed(ours, SETTINGS + COMPLETE)
    ours.streams[1].close()
    transport.take()
    late = pack(frames.DATA, frames.PADDED, 1, b"\xff" + bytes(MAX_FRAME_BYTES - 1))
    for _ in range(CONNECTION_WINDOW // 2 // MAX_FRAME_BYTES):
        feed(ours, late)
    assert not transport.written
    feed(ours, late)
    [update] = parse(transport.take())
    assert (update.stream_id, update.window_increment) == (0, CONNECTION_WINDOW // 2 + MAX_FRAME_BYTES)
