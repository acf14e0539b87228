"""Streams: one request and its response on a connection, with their bodies and windows."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol, TypeAlias

from typing_extensions import override

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
    """A stream on the event loop of its connection.

    The connection refers to the memory of a body while it is sent. The caller may change it once `send` has returned,
    or after `close`.
    """

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
        self._waiters: list[asyncio.Future[None]] = []

    def __repr__(self) -> str:
        ends = f"{'closed' if self.is_remote_closed else 'open'}, {'closed' if self.is_local_closed else 'open'}"
        return f"<Stream {self.stream_id} [{ends} | {self.received_bytes} bytes received]>"

    @property
    def is_closed(self) -> bool:
        """True once the stream is closed in both directions, or was reset."""
        return self.error is not None or (self.is_remote_closed and self.is_local_closed)

    def notify(self) -> None:
        """Wake all tasks in `wait_for_change`."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait_for_change(self) -> None:
        """Wait for the next change of the stream. Raises StreamResetError if it has been reset."""
        self._raise_if_reset()
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    def send_headers(self, headers: Headers, *, end_stream: bool = False) -> None:
        """Queue headers; they are written with the next data."""
        self._connection.send_headers(self, headers, end_stream=end_stream)

    async def send(self, data: memoryview | bytes, *, end_stream: bool = False) -> None:
        """Send a part of the body, and wait until the transport has taken all of it.

        Raises StreamResetError, also after the end of the body. Cancellation resets the stream.
        """
        self._raise_if_reset()
        if self.ends_with_outgoing or self.is_local_closed:
            raise StreamResetError(ErrorCode.STREAM_CLOSED, "the body has ended")
        self.send_nowait(data, end_stream=end_stream)
        try:
            while self.outgoing or self.is_being_written or (end_stream and not self.is_local_closed):
                await self.wait_for_change()
        except asyncio.CancelledError:
            self.close()
            raise

    def send_nowait(self, *parts: memoryview | bytes, end_stream: bool = True) -> None:
        """Queue parts of the body without a copy. They must not change until the stream is closed."""
        self.outgoing += [memoryview(part) for part in parts if len(part)]
        self.ends_with_outgoing = end_stream
        self._connection.pump()

    def _raise_if_reset(self) -> None:
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


class BodyReader(Sink):
    """A sink whose owner reads the body into a buffer, or in parts. It keeps at most a window of unread bytes."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._unread: deque[bytes] = deque()
        self._target = _EMPTY
        self._num_written = 0

    async def read_into(self, buffer: memoryview, seconds: float) -> tuple[int, bool]:
        """Receive until the buffer is full or the body ends; return the number of bytes, and True if more may follow.

        Returns after `seconds` with the bytes received by then, if there are any. The stream's window is raised to the
        size of the buffer. Raises StreamResetError.
        """
        unread, self._unread = self._unread, deque()
        self._target, self._num_written = buffer, 0
        for part in unread:
            self.feed(memoryview(part))
        stream = self._stream
        stream.raise_window(len(buffer) - self._num_written)
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            while self._num_written < len(buffer) and not stream.is_remote_closed:
                timer = loop.call_later(seconds, stream.notify)
                try:
                    await stream.wait_for_change()
                finally:
                    timer.cancel()
                if self._num_written and loop.time() - started >= seconds:
                    break
        finally:
            self._target = _EMPTY
        return self._num_written, bool(self._unread) or not stream.is_remote_closed

    async def read(self) -> tuple[bytes, bool]:
        """Wait for the next bytes of the body, empty at its end; return them, and True if more may follow."""
        while not self._unread and not self._stream.is_remote_closed:
            self._stream.raise_window(MIN_WINDOW_BYTES)
            await self._stream.wait_for_change()
        data = b"".join(self._unread)
        self._unread.clear()
        return data, not self._stream.is_remote_closed

    @override
    def get_buffer(self) -> memoryview:
        return self._target[self._num_written :]

    @override
    def buffer_updated(self, num_bytes: int) -> None:
        self._num_written += num_bytes
        if self._num_written == len(self._target):
            self._stream.notify()

    @override
    def feed(self, data: memoryview) -> None:
        room = self.get_buffer()[: len(data)]
        if len(room):
            room[:] = data[: len(room)]
            self.buffer_updated(len(room))
        if len(data) > len(room):
            self._unread.append(bytes(data[len(room) :]))
            self._stream.notify()


_EMPTY = memoryview(bytearray())
