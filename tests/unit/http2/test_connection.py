"""Both ends of a connection against h2: bodies of any size under any windows, settings, pings, and its end."""

from __future__ import annotations

import asyncio
from itertools import cycle
from typing import Any

import pytest
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    PingAckReceived,
    PingReceived,
    RemoteSettingsChanged,
    RequestReceived,
    ResponseReceived,
    StreamEnded,
    StreamReset,
)
from h2.settings import SettingCodes
from hpack import Encoder
from hyperframe.frame import ContinuationFrame, DataFrame, HeadersFrame, PingFrame, SettingsFrame
from hypothesis import given, settings
from hypothesis import strategies as st

from ps_http2 import connection as connection_module
from ps_http2 import frames
from ps_http2 import writer as writer_module
from ps_http2.frames import ErrorCode

from .support import ANSWER, REQUEST, End, Peer, call, error_of, feed, parse, serve


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a frame takes several writes."""
    monkeypatch.setattr(writer_module, "PART_BYTES", 256 * 1024)


SETTINGS = frames.pack_settings({})
PATTERN = bytes(range(251)) * 5000  # 1.2 MB in which no two places look alike for long

sizes = st.lists(st.sampled_from([1, 2, 7, 9, 10, 100, 5000, 16_393, 1 << 20]), min_size=1, max_size=8)
bodies = st.lists(st.sampled_from([0, 1, 9, 16_383, 16_384, 16_385, 65_535, 65_536, 200_000]), min_size=1, max_size=3)


def body_of(num_bytes: int, number: int) -> bytes:
    return PATTERN[number * 31 : number * 31 + num_bytes]


# ---------------------------------------------------------------------- reading


def recorded() -> bytes:
    """A client that uses all that is allowed: padding, CONTINUATION, trailers, streams in turns, frames of no kind."""
    encoder = Encoder()

    def block(headers: list[tuple[bytes, bytes]]) -> bytes:
        return bytes(encoder.encode(headers))

    first, second = block([*REQUEST, (b"x-long", b"x" * 3000)]), block(REQUEST)
    said = [
        SettingsFrame(0, {SettingsFrame.INITIAL_WINDOW_SIZE: 100_000}),
        HeadersFrame(1, first[:10]),
        ContinuationFrame(1, first[10:2000]),
        ContinuationFrame(1, first[2000:], flags=["END_HEADERS"]),
        HeadersFrame(3, second, flags=["END_HEADERS", "PADDED", "PRIORITY"], pad_length=17, depends_on=1),
        DataFrame(1, body_of(20_000, 1), flags=["PADDED"], pad_length=255),
        DataFrame(3, b"", flags=["PADDED"], pad_length=9),
        DataFrame(3, body_of(5, 3), flags=["PADDED"], pad_length=0),
        PingFrame(0, b"12345678"),
        DataFrame(1, body_of(50_000, 1)[20_000:]),
        DataFrame(3, body_of(5, 3), flags=["END_STREAM"]),
        DataFrame(1, b""),
        HeadersFrame(1, block([(b"x-trailer", b"1")]), flags=["END_HEADERS", "END_STREAM"]),
    ]
    return (
        b"".join(frame.serialize() for frame in said[:9])
        + frames.pack(0x42, 0xFF, 7, b"what?")
        + b"".join(frame.serialize() for frame in said[9:])
    )


RECORDED = recorded()


@given(sizes, st.sampled_from([0, 30_000, 100_000]))
@settings(max_examples=25, deadline=None)
def test_portions_mean_nothing(portions: list[int], landing_bytes: int) -> None:
    ours = End(stream_window=1 << 20)
    ours.landing_bytes = landing_bytes
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
    assert not ours.is_in_frame
    assert [type(frame).__name__ for frame in parse(transport.take())] == ["SettingsFrame", "PingFrame"]


@given(bodies, sizes, st.booleans(), st.sampled_from([0, 40_000, 200_000]), st.integers(0, 255))
@settings(max_examples=25, deadline=None)
def test_bodies_that_are_received(
    lengths: list[int], portions: list[int], pauses: bool, landing_bytes: int, padding: int
) -> None:
    ours, peer = serve(pauses=pauses)
    ours.landing_bytes = landing_bytes
    left = {1 + 2 * at: body_of(length, at) for at, length in enumerate(lengths)}
    wanted = dict(left)
    for number in left:
        peer.h2.send_headers(number, REQUEST)
    while left:
        for number, rest in [*left.items()]:
            most = min(peer.h2.local_flow_control_window(number), peer.h2.max_outbound_frame_size) - padding - 1
            piece = rest[: max(0, most)]
            assert piece or not rest, "no window is given back"
            left[number] = rest[len(piece) :]
            is_last = not left[number]
            peer.h2.send_data(number, piece, end_stream=is_last, pad_length=padding if piece else None)
            if is_last:
                del left[number]
        peer.run(cycle(portions))
    assert {number: sink.body for number, sink in ours.sinks.items()} == wanted
    assert all(stream.is_remote_closed for stream in ours.all_streams.values())


@given(
    bodies,
    st.booleans(),
    st.sampled_from([1, 100, 16_384, 65_535, 1 << 20]),
    st.sampled_from([16_384, 20_000, 1 << 20]),
    st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_bodies_that_are_sent(lengths: list[int], pauses: bool, window: int, frame_bytes: int, by_client: bool) -> None:
    if window == 1:
        lengths = [min(length, 300) for length in lengths]
    wanted = {1 + 2 * at: body_of(length, at) for at, length in enumerate(lengths)}
    limits: dict[int, int] = {SettingCodes.INITIAL_WINDOW_SIZE: window, SettingCodes.MAX_FRAME_SIZE: frame_bytes}
    if by_client:
        ours, peer = call(settings=limits, pauses=pauses)
        streams = {number: ours.ask() for number in wanted}
    else:
        server, peer = serve(settings=limits, pauses=pauses)
        for number in wanted:
            peer.h2.send_headers(number, REQUEST, end_stream=True)
        peer.run()
        streams = server.all_streams
        for stream in streams.values():
            stream.send_headers(ANSWER)
    for number, body in wanted.items():
        half = len(body) // 3
        streams[number].send_nowait(memoryview(body)[:half], end_stream=False)
        streams[number].send_nowait(memoryview(body)[half:])
    peer.run()
    assert {number: peer.body(number) for number in wanted} == wanted
    assert {event.stream_id for event in peer.of(StreamEnded)} == set(wanted)
    assert all(stream.is_local_closed for stream in streams.values())


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 255), st.integers(0, 5), st.binary(max_size=40))), sizes)
@settings(max_examples=50, deadline=None)
def test_whatever_comes_it_is_an_error_of_the_protocol_or_none(
    said: list[tuple[int, int, int, bytes]], portions: list[int]
) -> None:
    async def scenario() -> None:
        ours = End()
        transport = ours.connect()
        feed(ours, SETTINGS + b"".join(frames.pack(*each) for each in said), cycle(portions))
        parse(transport.take())

    asyncio.run(scenario())


@given(st.binary(max_size=300))
@settings(max_examples=50, deadline=None)
def test_headers_of_any_bytes(block: bytes) -> None:
    async def scenario() -> None:
        ours = End()
        ours.connect()
        flags = frames.END_HEADERS | frames.END_STREAM
        feed(ours, SETTINGS + frames.pack(frames.HEADERS, flags, 1, block))
        assert ours._transport.is_closing() or ours.all_streams[1].headers is not None

    asyncio.run(scenario())


def test_headers_of_several_frames_both_ways() -> None:
    ours, peer = serve()
    long = [(b"x-%d" % at, bytes([97 + at]) * 7000) for at in range(9)]
    peer.h2.send_headers(1, REQUEST + long, end_stream=True)
    peer.run()
    assert ours.all_streams[1].headers == REQUEST + long
    ours.all_streams[1].send_headers(ANSWER + long, end_stream=True)
    ours.pump()
    sent = bytes(peer.transport.written)
    assert [type(frame).__name__ for frame in parse(sent)] == ["HeadersFrame", "ContinuationFrame", "ContinuationFrame"]
    peer.run()
    [answer] = peer.of(ResponseReceived)
    assert answer.headers == ANSWER + long
    assert peer.of(StreamEnded)
    assert not ours.streams


def test_flags_of_continuation_that_mean_nothing_there() -> None:
    ours = End()
    ours.connect()
    block = Encoder().encode(REQUEST)
    every_flag = 0xFF
    head = frames.pack(frames.HEADERS, 0, 1, block[:3])
    feed(ours, SETTINGS + head + frames.pack(frames.CONTINUATION, every_flag, 1, block[3:]))
    assert ours.all_streams[1].headers == REQUEST
    assert not ours.all_streams[1].is_remote_closed


def test_trailers_end_a_body() -> None:
    ours, peer = serve()
    peer.h2.send_headers(1, REQUEST)
    peer.h2.send_data(1, b"12345")
    peer.h2.send_headers(1, [(b"x-sum", b"6")], end_stream=True)
    peer.run()
    assert (ours.sinks[1].body, ours.all_streams[1].is_remote_closed) == (b"12345", True)


# ---------------------------------------------------------------------- windows


def test_windows_of_a_body_that_is_larger_than_they_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_WINDOW", 2**17 - 1)
    monkeypatch.setattr(connection_module, "CONNECTION_WINDOW", 200_000)
    ours = End(stream_window=20_000)
    ours.keeps_windows_full = False  # type: ignore[misc]
    ours.landing_bytes = 1_000_000
    peer = Peer(ours, ours.connect())
    peer.run()
    peer.h2.send_headers(1, REQUEST)
    peer.run()
    ours.all_streams[1].raise_window(1_000_000)
    peer.run()
    assert peer.h2.local_flow_control_window(1) == 2**17 - 1
    rest = PATTERN[:1_000_000]
    while rest:
        count = min(len(rest), peer.h2.local_flow_control_window(1), peer.h2.max_outbound_frame_size)
        assert count, "no window is given back"
        peer.h2.send_data(1, rest[:count], end_stream=count == len(rest))
        rest = rest[count:]
        peer.run()
    assert ours.sinks[1].body == PATTERN[:1_000_000]
    assert 0 < peer.h2.outbound_flow_control_window <= 200_000


def test_our_view_of_the_windows_is_theirs() -> None:
    ours, peer = serve()
    peer.acknowledges = False
    peer.h2.send_headers(1, REQUEST)
    peer.h2.send_data(1, b"x" * 1000, pad_length=99)
    peer.run()
    stream = ours.all_streams[1]
    assert peer.h2.local_flow_control_window(1) == min(stream.receive_window, ours._receive_window)
    stream.send_headers(ANSWER)
    stream.send_nowait(b"x" * 30_000, end_stream=False)
    peer.run()
    assert peer.h2.remote_flow_control_window(1) == stream.send_window == ours._writer.window
    peer.h2.increment_flow_control_window(500, 1)
    peer.h2.increment_flow_control_window(700)
    peer.run()
    assert (stream.send_window, ours._writer.window) == (36_035, 36_235)


def test_a_smaller_window_in_the_middle_and_a_larger_one() -> None:
    ours, peer = serve()
    peer.acknowledges = False
    peer.h2.send_headers(1, REQUEST, end_stream=True)
    peer.run()
    stream = ours.all_streams[1]
    stream.send_headers(ANSWER)
    stream.send_nowait(PATTERN[:100_000])
    peer.run()
    assert len(peer.body(1)) == 65_535
    peer.h2.increment_flow_control_window(100_000)
    peer.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 1000})
    peer.run()
    assert (stream.send_window, len(peer.body(1))) == (1000 - 65_535, 65_535)
    peer.h2.increment_flow_control_window(64_535 + 10, 1)
    peer.run()
    assert len(peer.body(1)) == 65_545
    peer.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 65_535})
    peer.run()
    assert peer.body(1) == PATTERN[:100_000]


def test_a_stream_without_a_window_does_not_hold_up_the_others() -> None:
    ours, peer = serve()
    peer.acknowledges = False
    for number in (1, 3):
        peer.h2.send_headers(number, REQUEST, end_stream=True)
    peer.run()
    peer.h2.increment_flow_control_window(100_000)
    for stream in ours.all_streams.values():
        stream.send_headers(ANSWER)
        stream.send_nowait(PATTERN[: 70_000 if stream.stream_id == 1 else 1000])
    peer.run()
    assert (len(peer.body(1)), len(peer.body(3))) == (65_535, 1000)
    assert [event.stream_id for event in peer.of(StreamEnded)] == [3]
    assert ours.is_sending


# ---------------------------------------------------------------------- settings and pings


def test_frames_are_as_large_as_the_other_end_takes_now() -> None:
    ours, peer = serve(settings={SettingCodes.MAX_FRAME_SIZE: 40_000, SettingCodes.INITIAL_WINDOW_SIZE: 1 << 20})
    peer.h2.increment_flow_control_window(1 << 20)
    for number in (1, 3):
        peer.h2.send_headers(number, REQUEST, end_stream=True)
    peer.run()
    ours.all_streams[1].send_headers(ANSWER)
    ours.all_streams[1].send_nowait(PATTERN[:50_000])
    peer.run()
    peer.h2.update_settings({SettingCodes.MAX_FRAME_SIZE: 16_384})
    peer.run()
    ours.all_streams[3].send_headers(ANSWER)
    ours.all_streams[3].send_nowait(PATTERN[:20_000])
    peer.run()
    received = [len(event.data) for event in peer.of(DataReceived)]
    assert received == [40_000, 10_000, 16_384, 3616]


@pytest.mark.parametrize("size", [0, 100, 4096, 1 << 20])
def test_a_header_table_of_any_size(size: int) -> None:
    ours, peer = serve(settings={SettingCodes.HEADER_TABLE_SIZE: size})
    headers = [*ANSWER, (b"x-a", b"b" * 50), (b"x-c", b"d" * 50)]
    for number in (1, 3, 5):
        peer.h2.send_headers(number, REQUEST, end_stream=True)
        peer.run()
        if number == 5:
            peer.h2.update_settings({SettingCodes.HEADER_TABLE_SIZE: 0})
            peer.run()
        ours.all_streams[number].send_headers(headers, end_stream=True)
        ours.pump()
        peer.run()
    assert [event.headers for event in peer.of(ResponseReceived)] == [headers] * 3
    assert ours._encoder.header_table_size == 0


def test_settings_are_told_and_acknowledged() -> None:
    ours, peer = serve(MAX_CONCURRENT_STREAMS=7, settings={SettingCodes.MAX_CONCURRENT_STREAMS: 9})
    [told] = peer.of(RemoteSettingsChanged)
    assert told.changed_settings[SettingCodes.MAX_CONCURRENT_STREAMS].new_value == 7
    assert told.changed_settings[SettingCodes.MAX_FRAME_SIZE].new_value == 1 << 20
    assert ours.peer_max_streams == 9
    assert peer.h2.local_settings.max_concurrent_streams == 9, "ours was not acknowledged"


def test_pings_both_ways() -> None:
    ours, peer = serve()
    peer.h2.ping(b"12345678")
    peer.run()
    [answer] = peer.of(PingAckReceived)
    assert answer.ping_data == b"12345678"
    ours.ping()
    peer.run()
    assert peer.of(PingReceived)
    assert not peer.transport.is_closed


# ---------------------------------------------------------------------- who gives up


@pytest.mark.parametrize("num_written", [0, 1, 3])
def test_a_body_that_is_given_up_is_not_read_any_more(num_written: int) -> None:
    """The frame that has begun is finished with a copy; other streams go on."""
    ours, peer = serve(
        settings={SettingCodes.MAX_FRAME_SIZE: 600_000, SettingCodes.INITIAL_WINDOW_SIZE: 1 << 21}, pauses=True
    )
    peer.h2.increment_flow_control_window(1 << 21)
    for number in (1, 3):
        peer.h2.send_headers(number, REQUEST, end_stream=True)
    peer.run()
    body = bytearray(PATTERN[:1_000_000])
    stream = ours.all_streams[1]
    stream.send_headers(ANSWER)
    stream.send_nowait(memoryview(body))
    for _ in range(num_written):
        ours.resume_writing()
    stream.close()
    body[:] = bytes(len(body))
    assert not stream.outgoing
    peer.run()
    assert peer.body(1) == PATTERN[:600_000]
    [reset] = peer.of(StreamReset)
    assert (reset.stream_id, reset.error_code) == (1, ErrorCode.CANCEL)
    ours.all_streams[3].send_headers(ANSWER)
    ours.all_streams[3].send_nowait(b"12345")
    peer.run()
    assert peer.body(3) == b"12345"
    assert not ours.streams


@pytest.mark.parametrize("at", [0, 9, 10_000, 500_000])
def test_memory_that_is_given_back_is_not_written_any_more(at: int) -> None:
    ours = End(stream_window=1 << 20)
    ours.landing_bytes = 600_000
    transport = ours.connect()
    head = frames.pack(frames.HEADERS, frames.END_HEADERS, 1, Encoder().encode(REQUEST))
    data = frames.pack(frames.DATA, 0, 1, PATTERN[:600_000])
    feed(ours, SETTINGS + head)
    feed(ours, data[:at])
    ours.all_streams[1].close()
    memory = bytes(ours.sinks[1].memory)
    assert memory[: max(0, at - 9)] == PATTERN[: max(0, at - 9)]
    feed(ours, data[at:])
    assert bytes(ours.sinks[1].memory) == memory
    feed(ours, frames.pack(frames.PING, 0, 0, b"12345678"))
    assert isinstance(parse(transport.take())[-1], PingFrame)
    assert ours._receive_window == connection_module.CONNECTION_WINDOW - 600_000


def test_a_sink_that_refuses_ends_its_stream_alone() -> None:
    ours, peer = serve()
    for number in (1, 3):
        peer.h2.send_headers(number, REQUEST)
    peer.run()

    def refuse(data: Any) -> None:
        raise ValueError("not this")

    ours.sinks[1].feed = refuse  # type: ignore[method-assign]
    for number in (1, 3):
        peer.h2.send_data(number, b"12345", end_stream=True)
    peer.run()
    error = error_of(ours.all_streams[1])
    assert (error.code, str(error.__cause__)) == (ErrorCode.CANCEL, "not this")
    assert [event.stream_id for event in peer.of(StreamReset)] == [1]
    assert ours.sinks[3].body == b"12345"


def test_a_stream_that_the_other_end_resets() -> None:
    ours, peer = serve(pauses=True)
    peer.h2.send_headers(1, REQUEST, end_stream=True)
    peer.run()
    stream = ours.all_streams[1]
    stream.send_headers(ANSWER)
    stream.send_nowait(PATTERN)
    peer.h2.reset_stream(1, ErrorCode.CANCEL)
    feed(ours, peer.h2.data_to_send())
    assert (error_of(stream).code, ours.num_resets, ours.streams) == (ErrorCode.CANCEL, 1, {})
    assert not stream.outgoing


def test_a_client_cannot_end_a_stream_as_if_it_had_been_answered() -> None:
    """NO_ERROR is for servers that need no more of a body; from a client it is a reset like others."""
    ours, peer = serve()
    peer.h2.send_headers(1, REQUEST, end_stream=True)
    peer.h2.reset_stream(1, ErrorCode.NO_ERROR)
    peer.run()
    assert (error_of(ours.all_streams[1]).code, ours.num_resets) == (ErrorCode.NO_ERROR, 1)


def test_an_answer_before_the_body_was_sent() -> None:
    ours, peer = call()
    peer.acknowledges = False
    stream = ours.ask()
    stream.send_nowait(PATTERN)
    peer.run()
    peer.h2.send_headers(1, ANSWER)
    peer.h2.send_data(1, b"enough", end_stream=True)
    peer.h2.reset_stream(1, ErrorCode.NO_ERROR)
    peer.run()
    assert (stream.headers, ours.sinks[1].body, stream.is_remote_closed) == (ANSWER, b"enough", True)
    assert not stream.outgoing
    assert not ours.streams


@pytest.mark.parametrize("is_lost", [False, True])
def test_the_connection_is_lost(is_lost: bool) -> None:
    ours, peer = serve()
    peer.h2.send_headers(1, REQUEST)
    peer.run()
    ours.connection_lost(OSError("cable") if is_lost else None)
    assert error_of(ours.all_streams[1]).code == ErrorCode.CONNECT_ERROR
    assert ("cable" in str(error_of(ours.all_streams[1]))) == is_lost
    assert (ours.streams, ours.is_closing) == ({}, True)


# ---------------------------------------------------------------------- the end of a connection


@pytest.mark.parametrize("num_bytes", [0, 5, 200_000])
def test_going_away_when_all_is_answered(num_bytes: int) -> None:
    ours, peer = serve(pauses=True)
    peer.h2.send_headers(1, REQUEST, end_stream=True)
    peer.run()
    ours.go_away()
    stream = ours.all_streams[1]
    stream.send_headers(ANSWER)
    # h2 says nothing any more after a GOAWAY, so that there are no windows to wait for.
    stream.send_nowait(body_of(min(num_bytes, 60_000), 1))
    while not peer.transport.is_closed:
        ours.resume_writing()
    said = parse(peer.transport.take())
    [goaway] = [frame for frame in said if type(frame).__name__ == "GoAwayFrame"]
    assert (goaway.last_stream_id, goaway.error_code) == (1, ErrorCode.NO_ERROR)
    assert b"".join(frame.data for frame in said if isinstance(frame, DataFrame)) == body_of(min(num_bytes, 60_000), 1)
    assert "END_STREAM" in said[-1].flags


def test_going_away_with_nothing_to_do() -> None:
    ours, peer = serve()
    ours.go_away()
    peer.run()
    [end] = peer.of(ConnectionTerminated)
    assert (end.error_code, end.last_stream_id, peer.transport.is_closed) == (ErrorCode.NO_ERROR, 0, True)


def test_a_client_that_goes_away_has_looked_at_none_of_our_streams() -> None:
    ours, peer = call()
    ours.ask(end_stream=True)
    peer.run()
    ours.go_away()
    peer.run()
    [end] = peer.of(ConnectionTerminated)
    assert (end.last_stream_id, peer.transport.is_closed) == (0, False)


def test_the_other_end_goes_away() -> None:
    ours, peer = serve()
    peer.h2.send_headers(1, REQUEST, end_stream=True)
    peer.run()
    peer.h2.close_connection(last_stream_id=0)
    feed(ours, peer.h2.data_to_send())
    assert (ours.is_closing, peer.transport.is_closed) == (True, False)
    ours.all_streams[1].send_headers(ANSWER)
    ours.all_streams[1].send_nowait(b"12345")
    said = parse(peer.transport.take())
    assert said[-1].data == b"12345"
    assert peer.transport.is_closed


@pytest.mark.asyncio
@pytest.mark.parametrize("is_given_up", [False, True])
async def test_why_it_ends_is_never_said_within_a_frame(is_given_up: bool) -> None:
    ours, peer = serve(
        settings={SettingCodes.MAX_FRAME_SIZE: 1 << 20, SettingCodes.INITIAL_WINDOW_SIZE: 1 << 21}, pauses=True
    )
    peer.h2.increment_flow_control_window(1 << 21)
    peer.h2.send_headers(1, REQUEST, end_stream=True)
    peer.run()
    stream = ours.all_streams[1]
    stream.send_headers(ANSWER)
    stream.send_nowait(PATTERN[:1_000_000])
    ours.resume_writing()
    if is_given_up:
        stream.close()
    ours.abort(ErrorCode.ENHANCE_YOUR_CALM, "enough")
    sent = peer.transport.take()
    begin = sent.index(PATTERN[:1000])
    assert PATTERN.startswith(sent[begin:])
    assert peer.transport.is_closed
    assert ours.streams == {}


def test_it_says_who_it_is() -> None:
    ours, peer = serve()
    peer.h2.send_headers(1, REQUEST, end_stream=True)
    peer.h2.send_headers(3, REQUEST)
    peer.run()
    assert repr(ours) == f"<End [2 streams | {ours.received_bytes} bytes received]>"
    assert repr(ours.all_streams[1]) == "<Stream 1 [closed, open | 0 bytes received]>"
    assert not peer.of(RequestReceived)
