"""Streams: one request and its response on a connection, with their bodies and windows."""

from __future__ import annotations

from collections import deque
from typing import Protocol, TypeAlias

from .frames import ErrorCode

Headers: TypeAlias = list[tuple[bytes, bytes]]

MIN_WINDOW_BYTES = 64 * 1024  # of a stream whose body is read in parts


class Sink(Protocol):
    """The destination of a body. An exception that it raises resets the stream."""

    def get_buffer(self) -> memoryview:
        """Return the writable memory of the next bytes; empty while that is unknown and they have to be fed."""

    def buffer_updated(self, num_bytes: int) -> None:
        """Account for bytes that were written to the beginning of `get_buffer()`."""

    def feed(self, data: memoryview) -> None:
        """Copy the next bytes, whose memory is valid during the call only."""


class StreamOwner(Protocol):
    """The methods of a connection that its streams call."""

    def send_headers(self, stream: Stream, headers: Headers, *, end_stream: bool = False) -> None:
        """Send the headers of a stream; see `Connection.send_headers`."""

    def pump(self) -> None:
        """Send as much as the windows allow; see `Connection.pump`."""

    def raise_window(self, stream: Stream, num_bytes: int) -> None:
        """Raise the window of a stream; see `Connection.raise_window`."""

    def reset_stream(self, stream: Stream, code: ErrorCode, text: str) -> None:
        """Reset a stream; see `Connection.reset_stream`."""


class StreamResetError(Exception):
    """A stream was reset by either end, or lost with its connection."""

    def __init__(self, code: ErrorCode | int, text: str) -> None:
        super().__init__(text)
        self.code = code


class Stream:
    """A stream of a connection, which refers to the memory of a body until it is sent, or until `close`."""

    def __init__(self, connection: StreamOwner, stream_id: int, send_window: int, receive_window: int) -> None:
        self.stream_id = stream_id
        self.send_window = send_window  # bytes of bodies; negative after SETTINGS that reduce it
        self.receive_window = receive_window
        self.sink: Sink | None = None
        self.headers: Headers | None = None  # of the peer, once they have been received
        self.is_remote_closed = False  # half-closed (remote): the peer has sent everything
        self.is_local_closed = False  # half-closed (local): everything has been sent
        self.error: StreamResetError | None = None
        self.outgoing: deque[memoryview] = deque()
        self.ends_with_outgoing = False
        self.is_being_written = False  # a frame of it
        self.received_bytes = 0
        self.sent_bytes = 0  # of bodies, in complete frames
        self.was_blocked = False  # by its own window, while the connection's was open
        self.expected_bytes: int | None = None  # by Content-Length
        self._connection = connection

    def __repr__(self) -> str:
        ends = f"{'closed' if self.is_remote_closed else 'open'}, {'closed' if self.is_local_closed else 'open'}"
        return f"<Stream {self.stream_id} [{ends} | {self.received_bytes} bytes received]>"

    @property
    def is_closed(self) -> bool:
        """True once the stream is closed in both directions, or was reset."""
        return self.error is not None or (self.is_remote_closed and self.is_local_closed)

    def notify(self) -> None:
        """React to a change of this stream: the shell wakes those who wait for it."""

    def send_headers(self, headers: Headers, *, end_stream: bool = False) -> None:
        """Queue headers; they are written with the next data."""
        self._connection.send_headers(self, headers, end_stream=end_stream)

    def send_nowait(self, *parts: memoryview | bytes, end_stream: bool = True) -> None:
        """Queue parts of the body without a copy. They must not change until the stream is closed."""
        self.outgoing += [memoryview(part) for part in parts if len(part)]
        self.ends_with_outgoing = end_stream
        self._connection.pump()

    def raise_if_reset(self) -> None:
        """Raise StreamResetError if the stream has been reset."""
        if self.error is not None:  # not the error itself: its traceback would refer to the arguments of each call
            raise StreamResetError(self.error.code, str(self.error)) from self.error.__cause__

    def raise_window(self, num_bytes: int) -> None:
        """Let the peer send `num_bytes` from now on, unless its window is larger."""
        self._connection.raise_window(self, num_bytes)

    def close(self, code: ErrorCode = ErrorCode.CANCEL) -> None:
        """Reset the stream unless it is closed. The connection no longer refers to memory of the caller."""
        if not self.is_closed:
            self._connection.reset_stream(self, code, "closed by this end")


def content_length(headers: Headers) -> int | None:
    """Return the value of Content-Length, None without one. Raises ValueError."""
    given = {value for name, value in headers if name == b"content-length"}
    if not given:
        return None
    [value] = given
    if not value.isdigit() or len(value) > 18:
        raise ValueError("Content-Length is not a number")
    return int(value)
