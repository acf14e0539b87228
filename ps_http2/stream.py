"""One request and its answer on a connection: what has come, what is to go, and how much the other end takes."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol, TypeAlias

from .frames import Code

Headers: TypeAlias = list[tuple[bytes, bytes]]


MIN_GRANT_BYTES = 64 * 1024  # what those get who ask for the next bytes, however many


class Sink(Protocol):
    """Where a body goes. What it raises ends the stream."""

    def room(self) -> memoryview:
        """Where the next bytes belong, writable; empty if they are to be fed, because it is not known yet."""

    def landed(self, num_bytes: int) -> None:
        """So many have been written at the beginning of `room()`."""

    def feed(self, data: memoryview) -> None:
        """The next bytes, which are only lent."""


class StreamOwner(Protocol):
    """The connection of a stream, as its stream uses it."""

    def send_headers(self, stream: Stream, headers: Headers, *, is_last: bool = False) -> None:
        """Queue headers; they are written with what comes next, or with `pump`."""

    def pump(self) -> None:
        """Write what may be written now."""

    def grant(self, stream: Stream, num_bytes: int) -> None:
        """Let the other end send so many bytes from now on, if it may not already."""

    def reset(self, stream: Stream, code: Code, text: str) -> None:
        """End a stream before its time."""


class StreamResetError(Exception):
    """The other end, or the end of the connection, has ended a stream before its time."""

    def __init__(self, code: Code | int, text: str) -> None:
        super().__init__(text)
        self.code = code


class Stream:
    """Lives on the event loop, as its connection does.

    A body that is being sent is only lent: it must not change until `send` has returned. Who does not wait for that
    calls `close`, and is free to change it at once.
    """

    def __init__(self, connection: StreamOwner, number: int, send_window: int, receive_window: int) -> None:
        self.number = number
        self.send_window = send_window  # bytes of bodies that the other end takes now; after a SETTINGS it may be < 0
        self.receive_window = receive_window  # bytes that the other end may send now
        self.sink: Sink | None = None
        self.headers: Headers | None = None  # of the other end, once they are here
        self.is_remote_over = False  # nothing more comes
        self.is_local_over = False  # nothing more goes, and all of it has gone
        self.error: StreamResetError | None = None
        self.outgoing: deque[memoryview] = deque()
        self.ends_with_outgoing = False
        self.is_being_written = False  # a frame of it
        self.received_bytes = 0
        self.sent_bytes = 0  # of bodies, in whole frames
        self.was_blocked = False  # its own window was closed while the connection could send
        self.expected_bytes: int | None = None  # by Content-Length
        self._connection = connection
        self._waiting: list[asyncio.Future[None]] = []

    def __repr__(self) -> str:
        ends = f"{'over' if self.is_remote_over else 'open'}, {'over' if self.is_local_over else 'open'}"
        return f"<Stream {self.number} [{ends} | {self.received_bytes} bytes received]>"

    @property
    def is_over(self) -> bool:
        """In both directions, or ended before."""
        return self.error is not None or (self.is_remote_over and self.is_local_over)

    def wake(self) -> None:
        """Something has changed: whoever waits looks again."""
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    async def changed(self) -> None:
        """Wait until something has changed since it was looked at. Raises StreamResetError if it has been ended."""
        self._check()
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        await future

    def send_headers(self, headers: Headers, *, is_last: bool = False) -> None:
        """Queue headers, which go with what is sent next."""
        self._connection.send_headers(self, headers, is_last=is_last)

    async def send(self, data: memoryview | bytes, *, is_last: bool = False) -> None:
        """Send a part of the body; waits until the kernel, or the connection's small buffer, has all of it.

        Raises StreamResetError, also behind the last part. Cancelled, it gives the stream up.
        """
        self._check()
        if self.ends_with_outgoing or self.is_local_over:
            raise StreamResetError(Code.STREAM_CLOSED, "the body is over")
        self.lend(data, is_last=is_last)
        try:
            while self.outgoing or self.is_being_written or (is_last and not self.is_local_over):
                await self.changed()
        except asyncio.CancelledError:
            self.close()
            raise

    def lend(self, *parts: memoryview | bytes, is_last: bool = True) -> None:
        """Send them without waiting: they must not change until the stream is over, or closed."""
        self.outgoing += [memoryview(part) for part in parts if len(part)]
        self.ends_with_outgoing = is_last
        self._connection.pump()

    def _check(self) -> None:
        if self.error is not None:  # not itself, whose traceback would hold us and what each of these calls was given
            raise StreamResetError(self.error.code, str(self.error)) from self.error.__cause__

    def grant(self, num_bytes: int) -> None:
        """Let the other end send so many bytes from now on, if it may not already."""
        self._connection.grant(self, num_bytes)

    def close(self, code: Code = Code.CANCEL) -> None:
        """Give it up: nothing that belongs to the caller is read or written any more. Does nothing if it is over."""
        if not self.is_over:
            self._connection.reset(self, code, "given up")


def content_length(headers: Headers) -> int | None:
    """What a message says about its body. Raises ValueError."""
    given = {value for name, value in headers if name == b"content-length"}
    if not given:
        return None
    [value] = given
    if not value.isdigit() or len(value) > 18:
        raise ValueError("a Content-Length that is no number")
    return int(value)


class Inbox:
    """The sink of those who ask for a body: all of it into a buffer, or piece by piece.

    What nobody has asked for yet, a window at most, is kept.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._kept: deque[bytes] = deque()
        self._target = _NOTHING
        self._num_landed = 0

    async def fill(self, buffer: memoryview, seconds: float) -> tuple[int, bool]:
        """Let the body land in a buffer until one of them ends; returns its bytes, and whether there is more to come.

        After so many seconds also if only a part is here. The other end is told that there is room for all of it.
        Raises StreamResetError.
        """
        kept, self._kept = self._kept, deque()
        self._target, self._num_landed = buffer, 0
        for piece in kept:
            self.feed(memoryview(piece))
        stream = self._stream
        stream.grant(len(buffer) - self._num_landed)
        loop = asyncio.get_running_loop()
        begun = loop.time()
        try:
            while not stream.is_remote_over and not self._kept:
                timer = loop.call_later(seconds, stream.wake)
                try:
                    await stream.changed()
                finally:
                    timer.cancel()
                if self._num_landed and loop.time() - begun >= seconds:
                    break
        finally:
            self._target = _NOTHING
        return self._num_landed, bool(self._kept) or not stream.is_remote_over

    async def next(self) -> tuple[bytes, bool]:
        """Wait for the next bytes of the body, none if it is over; and whether there is more to come."""
        while not self._kept and not self._stream.is_remote_over:
            self._stream.grant(MIN_GRANT_BYTES)
            await self._stream.changed()
        data = b"".join(self._kept)
        self._kept.clear()
        return data, not self._stream.is_remote_over

    def room(self) -> memoryview:
        """See Sink."""
        return self._target[self._num_landed :]

    def landed(self, num_bytes: int) -> None:
        """See Sink."""
        self._num_landed += num_bytes

    def feed(self, data: memoryview) -> None:
        """See Sink."""
        room = self.room()[: len(data)]
        if len(room):
            room[:] = data[: len(room)]
            self._num_landed += len(room)
        if len(data) > len(room):
            self._kept.append(bytes(data[len(room) :]))
            self._stream.wake()


_NOTHING = memoryview(bytearray())
