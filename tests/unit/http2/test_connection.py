"""A connection against h2: bodies under any windows, settings, pings, resets, its streams and its end."""

from __future__ import annotations

import asyncio
from itertools import cycle
from typing import Any

import pytest
from h2.events import (
    DataReceived,
    ResponseReceived,
    StreamEnded,
    StreamReset,
)
from h2.settings import SettingCodes
from hpack import Decoder, Encoder, HPACKError
from hyperframe.frame import ContinuationFrame, DataFrame, GoAwayFrame, HeadersFrame, PingFrame, SettingsFrame
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ps_http2 import asyncio_shell, frames
from ps_http2.asyncio_shell import AsyncStream, BodyReader
from ps_http2.frames import ErrorCode
from ps_http2.header_blocks import MAX_QUICK_BYTES, HeaderBlocks
from ps_http2.stream import Headers, Stream
from ps_http2.writer import FrameWriter

from .support import ANSWER, REQUEST, End, Peer, connect, feed, parse

SETTINGS = frames.pack_settings({})
PATTERN = bytes(range(251)) * 5000  # 1.2 MB without two places that look alike for long
WIDE = {SettingCodes.INITIAL_WINDOW_SIZE: 1 << 21, SettingCodes.MAX_FRAME_SIZE: 600_000}

portions_of_reads = st.lists(st.sampled_from([1, 2, 7, 9, 10, 100, 5000, 16_393, 1 << 20]), min_size=1, max_size=8)
lengths_of_bodies = st.lists(
    st.sampled_from([0, 1, 9, 16_383, 16_384, 16_385, 65_535, 65_536, 200_000]), min_size=1, max_size=3
)


def body_of(num_bytes: int, number: int) -> bytes:
    return PATTERN[number * 31 : number * 31 + num_bytes]


# ---------------------------------------------------------------------- receiving and sending


def record() -> bytes:
    """Return what a client may send: padding, CONTINUATION, trailers, interleaved streams, frames of unknown type."""
    encoder = Encoder()
    first, second = encoder.encode([*REQUEST, (b"x-long", b"x" * 3000)]), encoder.encode(REQUEST)
    sent = [
        SettingsFrame(0, {SettingsFrame.INITIAL_WINDOW_SIZE: 100_000}).serialize(),
        HeadersFrame(1, first[:10]).serialize(),
        ContinuationFrame(1, first[10:2000]).serialize(),
        frames.pack(frames.CONTINUATION, 0xFF, 1, first[2000:]),  # END_STREAM means nothing here
        HeadersFrame(3, second, flags=["END_HEADERS", "PADDED", "PRIORITY"], pad_length=17, depends_on=1).serialize(),
        DataFrame(1, body_of(20_000, 1), flags=["PADDED"], pad_length=255).serialize(),
        DataFrame(3, b"", flags=["PADDED"], pad_length=9).serialize(),
        DataFrame(3, body_of(5, 3), flags=["PADDED"], pad_length=0).serialize(),
        PingFrame(0, b"12345678").serialize(),
        frames.pack(0x42, 0xFF, 7, b"unknown"),
        DataFrame(1, body_of(50_000, 1)[20_000:]).serialize(),
        DataFrame(3, body_of(5, 3), flags=["END_STREAM"]).serialize(),
        DataFrame(1, b"").serialize(),
        HeadersFrame(1, encoder.encode([(b"x-trailer", b"1")]), flags=["END_HEADERS", "END_STREAM"]).serialize(),
    ]
    return b"".join(sent)


RECORDED = record()


@given(portions_of_reads, st.sampled_from([0, 30_000, 100_000]))
@settings(max_examples=25, deadline=None)
def test_received_frames_do_not_depend_on_the_portions_of_reads(portions: list[int], sink_bytes: int) -> None:
    ours = End(stream_window=1 << 20, sink_bytes=sink_bytes)
    transport = ours.connect()
    transport.take()
    feed(ours, RECORDED, cycle(portions))
    assert [stream.is_remote_closed for stream in ours.all_streams.values()] == [True, True]
    assert ours.sinks[1].body == body_of(50_000, 1)
    assert ours.sinks[3].body == body_of(5, 3) * 2
    assert ours.all_streams[1].headers == [*REQUEST, (b"x-long", b"x" * 3000)]
    assert ours.all_streams[3].headers == REQUEST
    assert ours.all_streams[1].send_window == 100_000
    assert ours.all_streams[1].receive_window == (1 << 20) - 50_000 - 256  # padding counts, and its length
    assert not ours._reader.is_in_frame
    assert [type(frame).__name__ for frame in parse(transport.take())] == ["SettingsFrame", "PingFrame"]


@given(lengths_of_bodies, portions_of_reads, st.booleans(), st.sampled_from([0, 40_000, 200_000]), st.integers(0, 255))
@settings(max_examples=25, deadline=None)
def test_bodies_are_received(
    lengths: list[int], portions: list[int], pauses: bool, sink_bytes: int, padding: int
) -> None:
    ours, peer = connect(pauses=pauses, sink_bytes=sink_bytes)
    wanted = {1 + 2 * at: body_of(length, at) for at, length in enumerate(lengths)}
    left = dict(wanted)
    peer.request(*left, end_stream=False)
    while left:
        for number, rest in [*left.items()]:
            most = min(peer.h2.local_flow_control_window(number), peer.h2.max_outbound_frame_size) - padding - 1
            part = rest[: max(0, most)]
            assert part or not rest, "the window is not restored"
            left[number] = rest[len(part) :]
            peer.h2.send_data(number, part, end_stream=not left[number], pad_length=padding if part else None)
            if not left[number]:
                del left[number]
        peer.run(cycle(portions))
    assert {number: sink.body for number, sink in ours.sinks.items()} == wanted
    assert all(stream.is_remote_closed for stream in ours.all_streams.values())


@given(
    lengths_of_bodies,
    st.booleans(),
    st.sampled_from([1, 100, 16_384, 65_535, 1 << 20]),
    st.sampled_from([16_384, 20_000, 1 << 20]),
)
@settings(max_examples=25, deadline=None)
def test_bodies_are_sent(lengths: list[int], pauses: bool, window: int, frame_bytes: int) -> None:
    if window == 1:
        lengths = [min(length, 300) for length in lengths]
    wanted = {1 + 2 * at: body_of(length, at) for at, length in enumerate(lengths)}
    limits = {SettingCodes.INITIAL_WINDOW_SIZE: window, SettingCodes.MAX_FRAME_SIZE: frame_bytes}
    ours, peer = connect(settings=limits, pauses=pauses)
    peer.request(*wanted)
    streams = ours.all_streams
    for stream in streams.values():
        stream.send_headers(ANSWER)
    for number, body in wanted.items():
        view, third, half = memoryview(body), len(body) // 3, len(body) // 2
        streams[number].send_nowait(view[:third], end_stream=False)
        streams[number].send_nowait(view[third:half], view[half:])
    peer.run()
    assert {number: peer.body_of(number) for number in wanted} == wanted
    assert {event.stream_id for event in peer.of(StreamEnded)} == set(wanted)
    assert all(stream.is_local_closed for stream in streams.values())


@given(
    st.lists(st.sampled_from([1, 9, 16_384, 65_536, 200_000]), min_size=1, max_size=6),
    portions_of_reads,
    st.sampled_from([16_384, 100_000, 1 << 20]),
)
@settings(max_examples=100, deadline=None)
def test_any_part_of_what_is_to_be_written_may_be_taken(lengths: list[int], taken: list[int], frame_bytes: int) -> None:
    stream = Stream(End(), 1, send_window=1 << 21, receive_window=0)
    parts = [body_of(length, at) for at, length in enumerate(lengths)]
    stream.outgoing += map(memoryview, parts)
    stream.ends_with_outgoing = True
    sent: list[tuple[int, bool]] = []

    def frame_sent(_: Stream, num_bytes: int, end_stream: bool) -> None:
        assert not writer.is_in_frame
        sent.append((num_bytes, end_stream))
        stream.is_local_closed = end_stream

    writer = FrameWriter({1: stream}, frame_sent)
    writer.window, writer.frame_bytes = 1 << 21, frame_bytes
    written, portions = bytearray(), cycle(taken)
    while offered := b"".join(writer.next_parts()):
        portion = offered[: next(portions)]
        written += portion
        writer.advance(len(portion))
    data = parse(bytes(written))
    assert b"".join(frame.data for frame in data) == b"".join(parts)
    assert [(len(frame.data), "END_STREAM" in frame.flags) for frame in data] == sent
    assert all(num_bytes == frame_bytes for num_bytes, _ in sent[:-1]), "each frame is as long as the peer allows"


@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 255), st.integers(0, 5), st.binary(max_size=300))),
    portions_of_reads,
)
@settings(max_examples=100, deadline=None)
async def test_any_frames_raise_no_other_error_than_one_of_the_protocol(
    sent: list[tuple[int, int, int, bytes]], portions: list[int]
) -> None:
    ours = End()
    transport = ours.connect()
    feed(ours, SETTINGS + b"".join(frames.pack(*each) for each in sent), cycle(portions))
    parse(transport.take())


def test_headers_may_take_several_frames() -> None:
    ours, peer = connect()
    long = [(b"x-%d" % at, bytes([97 + at]) * 7000) for at in range(9)]
    [stream] = peer.request(1)
    stream.send_headers(ANSWER + long, end_stream=True)
    ours.pump()
    sent = parse(bytes(peer.transport.written))
    assert [type(frame).__name__ for frame in sent] == ["HeadersFrame", *["ContinuationFrame"] * 3]
    peer.run()
    assert [event.headers for event in peer.of(ResponseReceived)] == [ANSWER + long]
    assert peer.of(StreamEnded)


# ---------------------------------------------------------------------- windows


def test_the_initial_window_may_change_in_the_middle_of_a_body() -> None:
    _, peer = connect()
    peer.acknowledges = False
    [stream] = peer.request(1)
    stream.send_headers(ANSWER)
    stream.send_nowait(PATTERN[:100_000])
    peer.run()
    assert len(peer.body_of(1)) == 65_535
    peer.h2.increment_flow_control_window(100_000)
    peer.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 1000})
    peer.run()
    assert (stream.send_window, len(peer.body_of(1))) == (1000 - 65_535, 65_535)
    peer.h2.increment_flow_control_window(64_535 + 10, 1)
    peer.run()
    assert len(peer.body_of(1)) == 65_545
    peer.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 65_535})
    peer.run()
    assert peer.body_of(1) == PATTERN[:100_000]


# ---------------------------------------------------------------------- settings and pings


BODY = PATTERN[:500_000]  # one frame


def open_stream(*, end_stream: bool = False, **options: Any) -> tuple[AsyncStream, Peer]:
    """Return a requested stream of a server, and its peer, whose connection has a large window."""
    _, peer = connect(**options)
    peer.h2.increment_flow_control_window(1 << 21)
    [stream] = peer.request(1, end_stream=end_stream)
    return stream, peer


async def start(coroutine: Any) -> asyncio.Task[Any]:
    """Run a coroutine in a task until it waits."""
    task = asyncio.create_task(coroutine)
    await asyncio.sleep(0)
    return task


# ---------------------------------------------------------------------- reading a body


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> tuple[BodyReader, Peer]:
    """Return the reader of a body that has not arrived, and the peer that sends it."""
    monkeypatch.setattr(End, "keeps_windows_full", False)
    stream, peer = open_stream()
    stream.sink = reader = BodyReader(stream)
    return reader, peer


async def test_a_cancelled_reader_no_longer_writes_to_its_buffer(received: tuple[BodyReader, Peer]) -> None:
    reader, peer = received
    buffer = bytearray(10)
    reading = await start(reader.read_into(memoryview(buffer), 5))
    reading.cancel()
    await asyncio.wait([reading])
    peer.send(b"12345", end_stream=True)
    assert buffer == bytes(10)
    assert await reader.read() == (b"12345", False)


# ---------------------------------------------------------------------- sending a body


async def test_sending_returns_when_all_is_taken_and_releases_the_body() -> None:
    stream, peer = open_stream(pauses=True, settings=WIDE)
    stream.send_headers(ANSWER)
    body = bytearray(BODY)
    sending = await start(stream.send(memoryview(body)))
    assert not sending.done(), "the transport has not taken it"
    peer.run()
    await sending
    body.clear()  # which raises BufferError while the memory is borrowed
    await stream.send(b"", end_stream=True)
    peer.run()
    assert peer.body_of(1) == BODY
    assert peer.of(StreamEnded)


async def test_a_cancelled_sender_resets_the_stream_and_releases_its_body() -> None:
    stream, peer = open_stream(pauses=True, settings=WIDE)
    stream.send_headers(ANSWER)
    body = bytearray(BODY)
    sending = await start(stream.send(memoryview(body)))
    sending.cancel()
    await asyncio.wait([sending])
    body[:] = bytes(len(body))
    peer.run()
    assert b"".join(event.data for event in peer.of(DataReceived)) == BODY
    assert [event.error_code for event in peer.of(StreamReset)] == [ErrorCode.CANCEL]


# ---------------------------------------------------------------------- ends of streams


@pytest.mark.parametrize("num_written", [0, 1, 3])
def test_a_closed_stream_no_longer_reads_its_body(num_written: int) -> None:
    """A frame that has begun is completed from a copy; other streams continue."""
    ours, peer = connect(settings=WIDE, pauses=True)
    peer.h2.increment_flow_control_window(1 << 21)
    stream, other = peer.request(1, 3)
    body = bytearray(PATTERN[:1_000_000])
    for sending, part in ((stream, memoryview(body)), (other, b"12345")):
        sending.send_headers(ANSWER)
        sending.send_nowait(part)
    for _ in range(num_written):
        ours.resume_writing()
    stream.close()
    body[:] = bytes(len(body))
    peer.run()
    assert peer.body_of(1) == PATTERN[:600_000]
    assert [(event.stream_id, event.error_code) for event in peer.of(StreamReset)] == [(1, ErrorCode.CANCEL)]
    assert peer.body_of(3) == b"12345"
    assert not ours.streams


# ---------------------------------------------------------------------- ends of the connection


@pytest.mark.parametrize("num_bytes", [0, 5, 60_000])
def test_going_away_waits_for_open_streams(num_bytes: int) -> None:
    ours, peer = connect(pauses=True)
    [stream] = peer.request(1)
    ours.go_away()
    stream.send_headers(ANSWER)
    stream.send_nowait(body_of(num_bytes, 1))
    while not peer.transport.is_closed:
        ours.resume_writing()
    sent = parse(peer.transport.take())  # h2 would send no window updates after a GOAWAY
    [goaway] = [frame for frame in sent if isinstance(frame, GoAwayFrame)]
    assert (goaway.last_stream_id, goaway.error_code) == (1, ErrorCode.NO_ERROR)
    assert b"".join(frame.data for frame in sent if isinstance(frame, DataFrame)) == body_of(num_bytes, 1)
    assert "END_STREAM" in sent[-1].flags


@pytest.mark.parametrize("is_stream_closed", [False, True])
async def test_no_goaway_is_written_within_a_data_frame(is_stream_closed: bool) -> None:
    ours, peer = connect(settings={**WIDE, SettingCodes.MAX_FRAME_SIZE: 1 << 20}, pauses=True)
    peer.h2.increment_flow_control_window(1 << 21)
    [stream] = peer.request(1)
    stream.send_headers(ANSWER)
    stream.send_nowait(PATTERN[:1_000_000])
    ours.resume_writing()
    if is_stream_closed:
        stream.close()
    ours.abort(ErrorCode.ENHANCE_YOUR_CALM, "enough")
    sent = peer.transport.take()
    assert PATTERN.startswith(sent[sent.index(PATTERN[:1000]) :])
    assert peer.transport.is_closed
    assert ours.streams == {}


async def test_a_connection_that_does_not_close_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asyncio_shell, "CLOSE_SECONDS", 0.01)
    ours = End()
    transport = ours.connect()
    aborted = asyncio.Event()
    monkeypatch.setattr(transport, "abort", aborted.set)
    feed(ours, frames.pack(frames.PING, 0, 0, bytes(8)))  # instead of SETTINGS
    await asyncio.wait_for(aborted.wait(), 5)
    assert asyncio.all_tasks() == {asyncio.current_task()}


# ---------------------------------------------------------------------- header blocks beside hpack


LIMIT = 64 * 1024

names = st.sampled_from([b":method", b":path", b"content-type", b"a", b"x" * 130])
values = st.sampled_from([b"", b"GET", b"/", b"b" * 126, b"b" * 127, b"b" * 300]) | st.binary(max_size=20)
header_lists = st.lists(st.tuples(names, values), max_size=8)


@given(st.lists(header_lists, max_size=4))
def test_hpack_decodes_our_blocks_and_so_do_we(sent: list[Headers]) -> None:
    ours, theirs = HeaderBlocks(LIMIT), Decoder(max_header_list_size=LIMIT)
    theirs.max_allowed_table_size = 0
    for headers in sent:
        block = ours.encode(headers)
        assert list(theirs.decode(block, raw=True)) == headers
        assert ours.decode(block) == headers


@given(st.lists(st.tuples(header_lists, st.booleans()), max_size=6))
def test_blocks_of_another_encoder_may_come_between_ours(sent: list[tuple[Headers, bool]]) -> None:
    """Theirs use the dynamic table and Huffman's code."""
    ours, theirs, receiver = HeaderBlocks(LIMIT), Encoder(), HeaderBlocks(LIMIT)
    ours.encode([])
    for headers, is_theirs in sent:
        block = theirs.encode(headers) if is_theirs else ours.encode(headers)
        assert receiver.decode(block) == headers


@example(
    b"\x10\x01a\x81\x1f" + b"\x10\x01a\x7c" + b"b" * 124
)  # `a` in Huffman's code, and as much as its first byte says
@given(st.binary(max_size=40) | st.lists(header_lists, max_size=2).map(lambda lists: b"".join(map(cut, lists))))
def test_any_bytes_are_decoded_or_refused_as_by_hpack(block: bytes) -> None:
    def decode(decoder: Decoder | HeaderBlocks) -> object:
        try:
            return list(decoder.decode(block, raw=True) if isinstance(decoder, Decoder) else decoder.decode(block))
        except HPACKError as error:
            return type(error)

    assert decode(HeaderBlocks(LIMIT)) == decode(Decoder(max_header_list_size=LIMIT))


def cut(headers: Headers) -> bytes:
    blocks = HeaderBlocks(LIMIT)
    blocks.encode([])
    return blocks.encode(headers)[:-1]


def test_no_quick_block_exceeds_the_limit_of_a_header_list() -> None:
    fields = [HeaderBlocks(LIMIT).decode(bytes([0x80 | index]))[0] for index in range(1, 62)]
    assert MAX_QUICK_BYTES * max(32 + len(name) + len(value) for name, value in fields) < LIMIT
