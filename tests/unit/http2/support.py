"""Both ends of a connection without sockets: ours on a transport that records, and h2's as the other one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from itertools import repeat
from typing import Any, TypeVar

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, Event
from hyperframe.frame import Frame

from ps_http2 import frames
from ps_http2.asyncio_shell import AsyncConnection, AsyncStream
from ps_http2.frames import PREFACE, ErrorCode
from ps_http2.stream import Headers, Stream, content_length

E = TypeVar("E", bound=Event)

REQUEST = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/"), (b":authority", b"here")]
ANSWER = [(b":status", b"200")]


class FakeTransport(asyncio.Transport):
    """Records what is written. With `pauses` it takes one write at a time, as a full socket does."""

    def __init__(self, protocol: AsyncConnection, *, pauses: bool = False) -> None:
        super().__init__()
        self.written = bytearray()
        self.protocol = protocol
        self.is_closed = False
        self.pauses = pauses

    def write(self, data: Any) -> None:
        assert not self.is_closed, "asyncio would drop this"
        assert isinstance(data, bytes), "asyncio may keep a view, whose memory changes"
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

    abort = close

    def is_closing(self) -> bool:
        return self.is_closed


class Collector:
    """A sink with memory for so many bytes; later ones are fed."""

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


class End(AsyncConnection):
    """A server's end that accepts each stream with a Collector of `sink_bytes`, and keeps its streams and sinks."""

    preface = b""
    keeps_windows_full = True

    def __init__(self, stream_window: int = frames.DEFAULT_WINDOW, sink_bytes: int = 0, **settings: int) -> None:
        super().__init__({getattr(frames, name): value for name, value in settings.items()}, stream_window)
        self.all_streams: dict[int, AsyncStream] = {}
        self.sinks: dict[int, Collector] = {}
        self.num_resets = 0
        self.sink_bytes = sink_bytes

    def connect(self, *, pauses: bool = False) -> FakeTransport:
        transport = FakeTransport(self, pauses=pauses)
        self.connection_made(transport)
        return transport

    def accept(self, stream: Stream) -> Stream:
        assert isinstance(stream, AsyncStream)
        stream.sink = self.sinks[stream.stream_id] = Collector(self.sink_bytes)
        self.all_streams[stream.stream_id] = stream
        return stream

    def stream_requested(self, number: int) -> Stream | None:
        if number <= self.highest_stream:
            self.count_unproductive_frame()
            return None
        return self.accept(self.new_stream(number))

    def headers_received(self, stream: Stream, headers: Headers) -> None:
        stream.headers = headers
        try:
            stream.expected_bytes = content_length(headers)
        except ValueError as error:
            self.stream_error(stream, ErrorCode.PROTOCOL_ERROR, str(error))

    def stream_aborted(self, stream: Stream) -> None:
        self.num_resets += 1


def feed(connection: AsyncConnection, data: bytes, sizes: Iterable[int] = repeat(1 << 20)) -> None:
    """Receive bytes from the socket in portions of these sizes."""
    rest, portions = memoryview(data), iter(sizes)
    while len(rest) and not connection._transport.is_closing():
        room = connection.get_buffer(-1)
        assert len(room), "asyncio would fail"
        count = min(len(room), len(rest), next(portions))
        room[:count] = rest[:count]
        connection.buffer_updated(count)
        rest = rest[count:]


def parse(data: bytes) -> list[Frame]:
    """Return complete frames, parsed by hyperframe."""
    found, rest = [], memoryview(data.removeprefix(PREFACE))
    while len(rest):
        frame, length = Frame.parse_frame_header(rest[:9])
        assert len(rest) >= 9 + length, "an incomplete frame"
        frame.parse_body(rest[9 : 9 + length])
        found.append(frame)
        rest = rest[9 + length :]
    return found


class H2Peer:
    """A connection of the h2 library with its events. It raises if the other end violates the protocol."""

    def __init__(self, **options: bool) -> None:
        self.h2 = H2Connection(H2Configuration(header_encoding=None, **options))
        self.events: list[Event] = []
        self.acknowledges = True  # restores windows as soon as they are used

    def receive(self, data: bytes) -> None:
        for event in self.h2.receive_data(data):
            self.events.append(event)
            if self.acknowledges and isinstance(event, DataReceived) and event.flow_controlled_length:
                self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)

    def of(self, kind: type[E], number: int | None = None) -> list[E]:
        """Return the received events of one kind, and of one stream."""
        return [e for e in self.events if isinstance(e, kind) and number in (None, getattr(e, "stream_id", None))]

    def body_of(self, number: int) -> bytes:
        """Return the received body of a stream."""
        return b"".join(event.data for event in self.of(DataReceived, number))


class Peer(H2Peer):
    """An h2 peer of one of our connections, without a socket."""

    def __init__(self, ours: End, transport: FakeTransport, *, settings: dict[int, int] | None = None) -> None:
        super().__init__(validate_inbound_headers=False)
        self.ours, self.transport = ours, transport
        self.h2.initiate_connection()
        if settings:
            self.h2.update_settings(settings)
        self.run()

    def request(self, *numbers: int, end_stream: bool = True) -> list[AsyncStream]:
        """Send requests on these streams, and return our ends of the streams."""
        for number in numbers:
            self.h2.send_headers(number, REQUEST, end_stream=end_stream)
        self.run()
        return [self.ours.all_streams[number] for number in numbers]

    def send(self, body: bytes, *, number: int = 1, end_stream: bool = False) -> None:
        self.h2.send_data(number, body, end_stream=end_stream)
        self.run()

    def run(self, sizes: Iterable[int] = repeat(1 << 20)) -> None:
        """Exchange bytes until neither end has more to send."""
        portions = iter(sizes)
        while self._exchange(portions):
            pass

    def _exchange(self, sizes: Iterator[int]) -> bool:
        to_us = self.h2.data_to_send()
        feed(self.ours, to_us.removeprefix(PREFACE), sizes)
        if self.transport.pauses and not self.transport.is_closed:
            self.ours.resume_writing()
        from_us = self.transport.take()
        self.receive(from_us)
        return bool(to_us or from_us)


def connect(*, settings: dict[int, int] | None = None, pauses: bool = False, **own: int) -> tuple[End, Peer]:
    """Return an end of ours, and h2's as its peer."""
    ours = End(**own)
    return ours, Peer(ours, ours.connect(pauses=pauses), settings=settings)
