"""Both ends of a connection without sockets: ours on a transport that records, and h2's as the other one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from itertools import repeat
from typing import Any

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, Event
from hyperframe.frame import Frame

from ps_http2 import frames
from ps_http2.connection import Connection
from ps_http2.frames import PREFACE, ErrorCode
from ps_http2.stream import Headers, Stream, StreamResetError, content_length

REQUEST = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/"), (b":authority", b"here")]
ANSWER = [(b":status", b"200")]


class FakeTransport(asyncio.Transport):
    """Records what is written. With `pauses` it takes one write at a time, as a full socket does."""

    def __init__(self, *, pauses: bool = False) -> None:
        super().__init__()
        self.written = bytearray()
        self.protocol: Connection
        self.is_closed = False
        self.pauses = pauses

    def write(self, data: Any) -> None:
        assert not self.is_closed, "asyncio would drop this"
        self.written += data
        if self.pauses:
            self.protocol.pause_writing()

    def take(self) -> bytes:
        """Return the bytes written since the last call."""
        data, self.written = bytes(self.written), bytearray()
        return data

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        assert (high, low) == (1, 0)

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed


class Collector:
    """A sink of so many bytes; what comes behind them, or all of it if there are none, is fed."""

    def __init__(self, num_bytes: int = 0) -> None:
        self.memory = bytearray(num_bytes)
        self.num_landed = 0
        self.fed = bytearray()

    @property
    def body(self) -> bytes:
        return bytes(self.memory[: self.num_landed] + self.fed)

    def get_buffer(self) -> memoryview:
        return memoryview(self.memory)[self.num_landed :]

    def buffer_updated(self, num_bytes: int) -> None:
        self.num_landed += num_bytes

    def feed(self, data: memoryview) -> None:
        count = min(len(data), len(self.memory) - self.num_landed)
        self.memory[self.num_landed : self.num_landed + count] = data[:count]
        self.num_landed += count
        self.fed += data[count:]


class End(Connection):
    """The least that a child says; remembers what it was told."""

    preface = b""
    keeps_windows_full = True

    def __init__(self, stream_window: int = frames.DEFAULT_WINDOW, **settings: int) -> None:
        super().__init__({getattr(frames, name): value for name, value in settings.items()}, stream_window)
        self.all_streams: dict[int, Stream] = {}
        self.sinks: dict[int, Collector] = {}
        self.num_resets = 0
        self.landing_bytes = 0  # of a sink

    def connect(self, *, pauses: bool = False) -> FakeTransport:
        transport = FakeTransport(pauses=pauses)
        transport.protocol = self
        self.connection_made(transport)
        return transport

    def begin(self, stream: Stream) -> Stream:
        self.sinks[stream.stream_id] = Collector(self.landing_bytes)
        stream.sink = self.sinks[stream.stream_id]
        self.all_streams[stream.stream_id] = stream
        return stream

    def stream_requested(self, number: int) -> Stream | None:
        if number <= self.highest_stream:
            self.count_unproductive_frame()
            return None
        return self.begin(self.new_stream(number))

    def headers_received(self, stream: Stream, headers: Headers) -> None:
        stream.headers = headers
        try:
            stream.expected_bytes = content_length(headers)
        except ValueError as error:
            self.stream_error(stream, ErrorCode.PROTOCOL_ERROR, str(error))

    def stream_aborted(self, stream: Stream) -> None:
        self.num_resets += 1


class ClientEnd(End):
    """Do so while beginning streams."""

    preface = PREFACE

    def ask(self, headers: Headers | None = None, *, end_stream: bool = False) -> Stream:
        stream = self.begin(self.new_stream(self.highest_stream + 2 if self.highest_stream else 1))
        self.streams[stream.stream_id] = stream
        stream.send_headers(headers or REQUEST, end_stream=end_stream)
        self.pump()
        return stream

    def stream_requested(self, number: int) -> Stream | None:
        self.check_not_idle(number)
        return None


def feed(connection: Connection, data: bytes, sizes: Iterable[int] = repeat(1 << 20)) -> None:
    """Let bytes come from the socket in portions of these sizes."""
    rest, portions = memoryview(data), iter(sizes)
    while len(rest) and not connection._transport.is_closing():
        room = connection.get_buffer(-1)
        assert len(room), "asyncio would fail"
        count = min(len(room), len(rest), next(portions))
        room[:count] = rest[:count]
        connection.buffer_updated(count)
        rest = rest[count:]


def parse(data: bytes) -> list[Frame]:
    """Whole frames, as hyperframe sees them."""
    found, rest = [], memoryview(data.removeprefix(PREFACE))
    while len(rest):
        frame, length = Frame.parse_frame_header(rest[:9])
        assert len(rest) >= 9 + length, "a frame that is not whole"
        frame.parse_body(rest[9 : 9 + length])
        found.append(frame)
        rest = rest[9 + length :]
    return found


class Peer:
    """An h2 peer of one of our connections. It raises if we violate the protocol."""

    def __init__(self, ours: End, transport: FakeTransport, *, settings: dict[int, int] | None = None) -> None:
        self.ours, self.transport = ours, transport
        self.is_client = not isinstance(ours, ClientEnd)
        self.h2 = H2Connection(
            H2Configuration(client_side=self.is_client, header_encoding=None, validate_inbound_headers=False)
        )
        self.events: list[Event] = []
        self.h2.initiate_connection()
        self.acknowledges = True  # gives back windows as soon as they are used
        if settings:
            self.h2.update_settings(settings)

    def run(self, sizes: Iterable[int] = repeat(1 << 20)) -> list[Event]:
        """Let both talk until neither has anything to say; returns what h2 has heard."""
        before, portions = len(self.events), iter(sizes)
        while self._talk(portions):
            pass
        return self.events[before:]

    def _talk(self, sizes: Iterator[int]) -> bool:
        to_us = self.h2.data_to_send()
        feed(self.ours, to_us.removeprefix(PREFACE), sizes)
        if self.transport.pauses and not self.transport.is_closed:
            self.ours.resume_writing()
        from_us = self.transport.take()
        if from_us:
            for event in self.h2.receive_data(from_us):
                self.events.append(event)
                if self.acknowledges and isinstance(event, DataReceived) and event.flow_controlled_length:
                    self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        return bool(to_us or from_us)

    def body(self, number: int) -> bytes:
        """Return the resulting events."""
        return b"".join(e.data for e in self.events if isinstance(e, DataReceived) and e.stream_id == number)

    def of(self, kind: type[Event]) -> list[Any]:
        """Return the received events of one kind."""
        return [event for event in self.events if isinstance(event, kind)]


def serve(*, settings: dict[int, int] | None = None, pauses: bool = False, **own: Any) -> tuple[End, Peer]:
    """A server of ours, and h2's client behind its preface."""
    ours = End(**own)
    peer = Peer(ours, ours.connect(pauses=pauses), settings=settings)
    peer.run()
    return ours, peer


def call(*, settings: dict[int, int] | None = None, pauses: bool = False, **own: Any) -> tuple[ClientEnd, Peer]:
    """A client of ours, and h2's server."""
    ours = ClientEnd(**own)
    peer = Peer(ours, ours.connect(pauses=pauses), settings=settings)
    peer.run()
    return ours, peer


def error_of(stream: Stream) -> StreamResetError:
    """Why it has ended."""
    assert stream.error is not None
    return stream.error
