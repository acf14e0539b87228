"""One stream as those see it who wait: bodies that are sent, asked for, and given up."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest
from h2.events import DataReceived, StreamEnded, StreamReset
from h2.settings import SettingCodes

from ps_http2 import writer as writer_module
from ps_http2.frames import ErrorCode
from ps_http2.stream import MIN_WINDOW_BYTES, BodyReader, Stream, StreamResetError

from .support import ANSWER, REQUEST, End, FakeTransport, Peer, call, serve

pytestmark = pytest.mark.asyncio

WIDE: dict[int, int] = {SettingCodes.INITIAL_WINDOW_SIZE: 1 << 20, SettingCodes.MAX_FRAME_SIZE: 1 << 20}


def asked(*, pauses: bool = False, settings: dict[int, int] | None = None) -> tuple[Stream, BodyReader, Peer]:
    """A request whose body has not arrived, and its reader."""
    ours, peer = serve(pauses=pauses, settings=settings)
    ours.keeps_windows_full = False  # type: ignore[misc]
    peer.h2.increment_flow_control_window(1 << 20)
    peer.h2.send_headers(1, REQUEST)
    peer.run()
    stream = ours.all_streams[1]
    stream.sink = inbox = BodyReader(stream)
    return stream, inbox, peer


async def test_a_body_lands_in_a_buffer() -> None:
    _, inbox, peer = asked()
    buffer = bytearray(300_000)
    filling = asyncio.create_task(inbox.read_into(memoryview(buffer), 5))
    await asyncio.sleep(0)
    peer.run()
    assert peer.h2.local_flow_control_window(1) == 300_000
    for _ in range(30):
        peer.h2.send_data(1, b"0123456789" * 1000)
        peer.run()
    peer.h2.end_stream(1)
    peer.run()
    assert await filling == (300_000, False)
    assert buffer == b"0123456789" * 30_000


async def test_what_came_before_it_was_asked_for_is_there_too() -> None:
    _, inbox, peer = asked()
    peer.h2.send_data(1, b"12345")
    peer.h2.send_data(1, b"678")
    peer.run()
    buffer = bytearray(4)
    assert await inbox.read_into(memoryview(buffer), 5) == (4, True)
    assert await inbox.read() == (b"5678", True)
    peer.h2.send_data(1, b"9", end_stream=True)
    peer.run()
    assert (buffer, await inbox.read(), await inbox.read()) == (b"1234", (b"9", False), (b"", False))


async def test_a_part_of_it_after_some_time() -> None:
    _, inbox, peer = asked()
    buffer = bytearray(10)
    peer.h2.send_data(1, b"123")
    peer.run()
    assert await asyncio.wait_for(inbox.read_into(memoryview(buffer), 0.01), 5) == (3, True)
    assert buffer[:3] == b"123"


async def test_a_part_of_it_even_if_nothing_came_at_first() -> None:
    """Otherwise a late reader would seem stalled until the whole body has arrived."""
    _, inbox, peer = asked()
    buffer = bytearray(10)
    filling = asyncio.create_task(inbox.read_into(memoryview(buffer), 0.02))
    await asyncio.sleep(0.05)
    assert not filling.done()
    peer.h2.send_data(1, b"123")
    peer.run()
    assert await asyncio.wait_for(filling, 5) == (3, True)


async def test_a_fill_that_is_cancelled_gives_the_buffer_back() -> None:
    _, inbox, peer = asked()
    buffer = bytearray(10)
    filling = asyncio.create_task(inbox.read_into(memoryview(buffer), 5))
    await asyncio.sleep(0)
    filling.cancel()
    await asyncio.gather(filling, return_exceptions=True)
    peer.h2.send_data(1, b"12345", end_stream=True)
    peer.run()
    assert buffer == bytes(10)
    assert await inbox.read() == (b"12345", False)


async def test_who_asks_for_pieces_gets_a_window_for_some_of_them() -> None:
    stream, inbox, peer = asked()
    peer.h2.send_data(1, bytes(10_000))
    peer.run()
    assert await inbox.read() == (bytes(10_000), True)
    asking = asyncio.create_task(inbox.read())
    await asyncio.sleep(0)
    peer.run()
    assert peer.h2.local_flow_control_window(1) == stream.receive_window == MIN_WINDOW_BYTES
    peer.h2.end_stream(1)
    peer.run()
    assert await asking == (b"", False)


async def test_who_waits_hears_of_a_reset() -> None:
    _, inbox, peer = asked()
    waiting = [asyncio.create_task(each) for each in (inbox.read(), inbox.read_into(memoryview(bytearray(5)), 5))]
    await asyncio.sleep(0)
    peer.h2.reset_stream(1, ErrorCode.INTERNAL_ERROR)
    peer.run()
    for each in waiting:
        with pytest.raises(StreamResetError, match="INTERNAL_ERROR"):
            await each


async def test_sending_returns_when_all_is_taken() -> None:
    stream, _, peer = asked(pauses=True, settings=WIDE)
    stream.send_headers(ANSWER)
    body = bytearray(b"0123456789" * 60_000)
    sending = asyncio.create_task(stream.send(memoryview(body)))
    await asyncio.sleep(0)
    assert not sending.done(), "the transport has not taken it"
    peer.run()
    await sending
    body[:] = bytes(len(body))
    await stream.send(b"", end_stream=True)
    peer.run()
    assert peer.body(1) == b"0123456789" * 60_000
    assert peer.of(StreamEnded)


async def test_sending_that_is_cancelled_gives_the_body_back() -> None:
    stream, _, peer = asked(pauses=True, settings=WIDE)
    stream.send_headers(ANSWER)
    body = bytearray(b"0123456789" * 60_000)
    sending = asyncio.create_task(stream.send(memoryview(body)))
    await asyncio.sleep(0)
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    body[:] = bytes(len(body))
    peer.run()
    assert b"".join(event.data for event in peer.of(DataReceived)) == b"0123456789" * 60_000
    assert [event.error_code for event in peer.of(StreamReset)] == [ErrorCode.CANCEL]


async def test_sending_to_one_who_has_gone() -> None:
    stream, _, peer = asked(pauses=True, settings=WIDE)
    stream.send_headers(ANSWER)
    sending = asyncio.create_task(stream.send(bytes(600_000), end_stream=True))
    await asyncio.sleep(0)
    peer.h2.reset_stream(1, ErrorCode.CANCEL)
    peer.run()
    with pytest.raises(StreamResetError, match="CANCEL"):
        await sending
    with pytest.raises(StreamResetError, match="CANCEL"):
        await stream.send(b"more")
    stream.close()
    assert len(peer.of(StreamReset)) == 0, "it was over"


async def test_a_stream_that_is_over_takes_nothing() -> None:
    """Otherwise the sender would wait without a limit."""
    ours, peer = serve()
    peer.h2.send_headers(1, REQUEST, end_stream=True)
    peer.run()
    stream = ours.all_streams[1]
    stream.send_headers(ANSWER)
    await stream.send(b"12345", end_stream=True)
    with pytest.raises(StreamResetError, match="ended"):
        await asyncio.wait_for(stream.send(b"more"), 5)


class KeepingTransport(FakeTransport):
    """Takes a few bytes of each write, and keeps the rest of it as it is: as asyncio does from Python 3.12 on."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = []

    def write(self, data: Any) -> None:
        self.written += data[:10]
        if len(data) > 10:
            self.kept.append(data[10:])
            self.protocol.pause_writing()

    def go_on(self) -> None:
        kept, self.kept = self.kept, []
        for each in kept:
            self.written += each
        self.protocol.resume_writing()


@pytest.mark.parametrize("is_given_up", [False, True])
async def test_a_transport_that_keeps_views(is_given_up: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "KEEPS_VIEWS", True)
    ours = End()
    transport = KeepingTransport()
    transport.protocol = ours
    ours.connection_made(transport)
    transport.go_on()
    peer = Peer(ours, transport, settings=WIDE)
    peer.run()
    transport.go_on()
    peer.run()
    peer.h2.increment_flow_control_window(1 << 20)
    peer.h2.send_headers(1, REQUEST, end_stream=True)
    peer.run()
    stream = ours.all_streams[1]
    stream.send_headers(ANSWER)
    body = bytearray(b"0123456789" * 60_000)
    sending = asyncio.create_task(stream.send(memoryview(body), end_stream=not is_given_up))
    await asyncio.sleep(0)
    if is_given_up:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        body[:] = bytes(len(body))
    while transport.kept:
        transport.go_on()
        if sending.done():
            body[:] = bytes(len(body))
        peer.run()
    assert peer.body(1) == b"0123456789" * 60_000
    await asyncio.gather(sending, return_exceptions=True)


async def test_which_transports_do() -> None:
    assert (sys.version_info >= (3, 12)) == writer_module.KEEPS_VIEWS


async def test_a_client_whose_body_is_lent() -> None:
    ours, peer = call(pauses=True, settings=WIDE)
    stream = ours.ask()
    body = bytearray(b"0123456789" * 60_000)
    stream.send_nowait(memoryview(body))
    stream.close()
    body.clear()  # which is not allowed while the memory is borrowed
    peer.run()
    assert [event.error_code for event in peer.of(StreamReset)] in ([ErrorCode.CANCEL], [])
    assert not ours.streams
