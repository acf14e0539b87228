"""One stream: bodies that are sent, received, and given up by either end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from h2.events import DataReceived, StreamEnded, StreamReset
from h2.settings import SettingCodes
from hpack import Encoder
from hyperframe.frame import PingFrame

from ps_http2 import connection as connection_module
from ps_http2 import frames
from ps_http2 import writer as writer_module
from ps_http2.asyncio_shell import AsyncStream, BodyReader
from ps_http2.frames import ErrorCode
from ps_http2.stream import StreamResetError

from .support import ANSWER, REQUEST, End, FakeTransport, Peer, connect, feed, parse

WIDE = {SettingCodes.INITIAL_WINDOW_SIZE: 1 << 21, SettingCodes.MAX_FRAME_SIZE: 600_000}
SETTINGS = frames.pack_settings({})
PATTERN = bytes(range(251)) * 5000  # 1.2 MB without two places that look alike for long
BODY = PATTERN[:500_000]  # one frame


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a large frame take several writes."""
    monkeypatch.setattr(writer_module, "PART_BYTES", 256 * 1024)


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


async def test_the_memory_of_a_sent_body_is_free() -> None:
    stream, peer = open_stream(settings=WIDE)
    body = bytearray(BODY)
    stream.send_headers(ANSWER)
    stream.send_nowait(body, end_stream=False)
    peer.run()
    assert peer.body_of(1) == BODY
    body.clear()  # which raises BufferError while the memory is borrowed


# ---------------------------------------------------------------------- reading a body


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> tuple[BodyReader, Peer]:
    """Return the reader of a body that has not arrived, and the peer that sends it."""
    monkeypatch.setattr(End, "keeps_windows_full", False)
    stream, peer = open_stream()
    stream.sink = reader = BodyReader(stream)
    return reader, peer


async def test_a_body_is_received_into_a_buffer(received: tuple[BodyReader, Peer]) -> None:
    reader, peer = received
    buffer = bytearray(300_000)
    reading = await start(reader.read_into(memoryview(buffer), 5))
    peer.run()
    assert peer.h2.local_flow_control_window(1) == 300_000
    for _ in range(30):
        peer.send(b"0123456789" * 1000)
    peer.send(b"", end_stream=True)
    assert await reading == (300_000, False)
    assert buffer == b"0123456789" * 30_000


async def test_a_full_buffer_ends_the_wait_before_the_body_ends(received: tuple[BodyReader, Peer]) -> None:
    reader, peer = received
    reading = await start(reader.read_into(memoryview(bytearray(4)), 5))
    peer.send(b"0123")  # a small frame arrives with its header
    assert await asyncio.wait_for(reading, 1) == (4, True)


async def test_bytes_that_came_before_the_reader_are_read_first(received: tuple[BodyReader, Peer]) -> None:
    reader, peer = received
    peer.send(b"12345")
    peer.send(b"678")
    buffer = bytearray(4)
    assert await reader.read_into(memoryview(buffer), 5) == (4, True)
    assert await reader.read() == (b"5678", True)
    peer.send(b"9", end_stream=True)
    assert (buffer, await reader.read(), await reader.read()) == (b"1234", (b"9", False), (b"", False))


@pytest.mark.parametrize("is_late", [False, True])
async def test_a_slow_body_is_returned_in_parts(is_late: bool, received: tuple[BodyReader, Peer]) -> None:
    """Also if nothing came at first: otherwise it would seem stalled until all of it has arrived."""
    reader, peer = received
    buffer = bytearray(10)
    if not is_late:
        peer.send(b"123")
    reading = await start(reader.read_into(memoryview(buffer), 0.02))
    if is_late:
        await asyncio.sleep(0.05)
        assert not reading.done()
        peer.send(b"123")
    assert await asyncio.wait_for(reading, 5) == (3, True)
    assert buffer[:3] == b"123"


async def test_a_cancelled_reader_no_longer_writes_to_its_buffer(received: tuple[BodyReader, Peer]) -> None:
    reader, peer = received
    buffer = bytearray(10)
    reading = await start(reader.read_into(memoryview(buffer), 5))
    reading.cancel()
    await asyncio.wait([reading])
    peer.send(b"12345", end_stream=True)
    assert buffer == bytes(10)
    assert await reader.read() == (b"12345", False)


async def test_a_reset_is_raised_in_all_waiting_tasks(received: tuple[BodyReader, Peer]) -> None:
    reader, peer = received
    waiting = [await start(each) for each in (reader.read(), reader.read_into(memoryview(bytearray(5)), 5))]
    peer.h2.reset_stream(1, ErrorCode.INTERNAL_ERROR)
    peer.run()
    for each in waiting:
        with pytest.raises(StreamResetError, match="INTERNAL_ERROR"):
            await each


# ---------------------------------------------------------------------- sending a body


async def test_sending_returns_when_all_is_taken() -> None:
    stream, peer = open_stream(pauses=True, settings=WIDE)
    stream.send_headers(ANSWER)
    body = bytearray(BODY)
    sending = await start(stream.send(memoryview(body)))
    assert not sending.done(), "the transport has not taken it"
    peer.run()
    await sending
    body[:] = bytes(len(body))
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


async def test_sending_on_a_reset_stream_raises() -> None:
    stream, peer = open_stream(pauses=True, settings=WIDE)
    stream.send_headers(ANSWER)
    sending = await start(stream.send(BODY, end_stream=True))
    peer.h2.reset_stream(1, ErrorCode.CANCEL)
    peer.run()
    for sent in (sending, stream.send(b"more")):
        with pytest.raises(StreamResetError, match="CANCEL"):
            await sent
    stream.close()
    assert not peer.of(StreamReset), "it was closed already"


class KeepingTransport(FakeTransport):
    """Takes a few bytes of each write, and keeps a view of the rest, as asyncio does from Python 3.12 on."""

    kept: Any = b""

    def write(self, data: Any) -> None:
        assert not len(self.kept)
        self.written += data[:10]
        self.kept = data[10:]
        if len(self.kept):
            self.protocol.pause_writing()

    def write_kept(self) -> bool:
        kept, self.kept = self.kept, b""
        self.written += kept
        self.protocol.resume_writing()
        return len(kept) > 0


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_a_transport_may_keep_views(is_cancelled: bool) -> None:
    ours = End()
    transport = KeepingTransport(ours)
    ours.connection_made(transport)
    while transport.write_kept():
        pass
    peer = Peer(ours, transport, settings=WIDE)
    while transport.write_kept():
        peer.run()
    peer.h2.increment_flow_control_window(1 << 20)
    [stream] = peer.request(1)
    stream.send_headers(ANSWER)
    body = bytearray(BODY)
    sending = await start(stream.send(memoryview(body), end_stream=not is_cancelled))
    if is_cancelled:
        sending.cancel()
        await asyncio.wait([sending])
    while not sending.done() or len(transport.kept):
        if sending.done():
            body[:] = bytes(len(body))
        transport.write_kept()
        peer.run()
        await asyncio.sleep(0)
    assert peer.body_of(1) == BODY


# ---------------------------------------------------------------------- ends of streams


@pytest.mark.parametrize("num_written", [0, 1, 3])
def test_a_closed_stream_no_longer_reads_its_body(num_written: int) -> None:
    """A frame that has begun is completed from a copy; other streams continue."""
    ours, peer = connect(settings=WIDE, pauses=True)
    peer.h2.increment_flow_control_window(1 << 21)
    stream, other = peer.request(1, 3)
    body = bytearray(PATTERN[:1_000_000])
    stream.send_headers(ANSWER)
    stream.send_nowait(memoryview(body))
    for _ in range(num_written):
        ours.resume_writing()
    stream.close()
    body[:] = bytes(len(body))
    assert not stream.outgoing
    peer.run()
    assert peer.body_of(1) == PATTERN[:600_000]
    assert [(event.stream_id, event.error_code) for event in peer.of(StreamReset)] == [(1, ErrorCode.CANCEL)]
    other.send_headers(ANSWER)
    other.send_nowait(b"12345")
    peer.run()
    assert peer.body_of(3) == b"12345"
    assert not ours.streams


@pytest.mark.parametrize("at", [0, 9, 10_000, 500_000])
def test_a_closed_stream_no_longer_writes_to_its_sink(at: int) -> None:
    ours = End(stream_window=1 << 20, sink_bytes=600_000)
    transport = ours.connect()
    data = frames.pack(frames.DATA, 0, 1, PATTERN[:600_000])
    feed(ours, SETTINGS + frames.pack(frames.HEADERS, frames.END_HEADERS, 1, Encoder().encode(REQUEST)))
    feed(ours, data[:at])
    ours.all_streams[1].close()
    memory = bytes(ours.sinks[1].memory)
    assert memory[: max(0, at - 9)] == PATTERN[: max(0, at - 9)]
    feed(ours, data[at:])
    assert bytes(ours.sinks[1].memory) == memory
    feed(ours, frames.pack(frames.PING, 0, 0, b"12345678"))
    assert isinstance(parse(transport.take())[-1], PingFrame)
    assert ours._receive_window == connection_module.CONNECTION_WINDOW - 600_000
