"""The shell of connections on asyncio: streams that tasks wait for, and transports that take what is to be written."""

from __future__ import annotations

import asyncio
import os
import socket
from asyncio.trsock import TransportSocket
from collections import deque
from contextlib import suppress
from typing import Any

from typing_extensions import override

from .connection import CLOSE_SECONDS, Connection
from .frames import ErrorCode
from .reader import MAX_READS
from .stream import MIN_WINDOW_BYTES, Sink, Stream, StreamResetError

KEPT_BYTES = 64 * 1024  # that a transport gets, to keep a copy of them until the kernel takes more


class AsyncStream(Stream):
    """A stream on the event loop of its connection."""

    def __init__(self, *options: Any) -> None:
        super().__init__(*options)
        self._waiters: list[asyncio.Future[None]] = []

    @override
    def notify(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait_for_change(self) -> None:
        """Wait for the next change of the stream. Raises StreamResetError if it has been reset."""
        self.raise_if_reset()
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    async def send(self, data: memoryview | bytes, *, end_stream: bool = False) -> None:
        """Send a part of the body, and wait until the transport has taken all of it.

        Raises StreamResetError, also after the end of the body. Cancellation resets the stream.
        """
        self.raise_if_reset()
        if self.ends_with_outgoing or self.is_local_closed:
            raise StreamResetError(ErrorCode.STREAM_CLOSED, "the body has ended")
        self.send_nowait(data, end_stream=end_stream)
        try:
            while self.outgoing or self.is_being_written or (end_stream and not self.is_local_closed):
                await self.wait_for_change()
        except asyncio.CancelledError:
            self.close()
            raise


class AsyncConnection(Connection, asyncio.BufferedProtocol):
    """A connection as the protocol of an asyncio transport."""

    stream_type = AsyncStream
    _transport: asyncio.Transport
    _socket: TransportSocket | None = None  # None with TLS, which keeps bytes of its own
    _num_offered = 0  # bytes of the buffer that the transport receives into

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        # Data that the kernel does not take waits here, not in a copy. With TLS a limit of 0 would pause forever.
        transport.set_write_buffer_limits(high=1, low=0)
        if transport.get_extra_info("ssl_object") is None:
            self._socket = transport.get_extra_info("socket")
        self.begin(transport)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self.end(exc)

    @override
    def get_buffer(self, sizehint: int) -> memoryview:
        room = self._reader.get_buffers()[0]
        self._num_offered = len(room)
        return room

    @override
    def buffer_updated(self, nbytes: int) -> None:
        """Process received bytes, and receive more of a large frame, since a turn of the loop takes longer."""
        self.buffers_updated(nbytes)
        num_offered = self._num_offered
        for _ in range(MAX_READS):
            is_over = nbytes < num_offered or self._low_water == 1
            if is_over or self._socket is None or self._transport.is_closing():
                return
            buffers = self._reader.get_buffers()
            num_offered = sum(map(len, buffers))
            try:
                nbytes = os.readv(self._socket.fileno(), buffers)
            except OSError:  # nothing has arrived, or never will, which the transport finds out
                return
            del buffers
            self.buffers_updated(nbytes)

    @override
    def pause_writing(self) -> None:
        self._writer.is_paused = True

    @override
    def resume_writing(self) -> None:
        self._writer.is_paused = False
        self.pump()

    @override
    def write_parts(self) -> None:
        writer, transport = self._writer, self._transport
        while not writer.is_paused and not transport.is_closing() and (parts := writer.next_parts()):
            if self._socket is not None and not transport.get_write_buffer_size():
                with suppress(OSError):  # it takes no more, or never will, which the transport finds out
                    writer.advance(os.writev(self._socket.fileno(), parts))  # from their owner's memory
                    continue
            part = bytes(parts[0][:KEPT_BYTES])  # asyncio copies what the kernel does not take, or keeps a view of it
            transport.write(part)
            writer.advance(len(part))

    @override
    def await_bytes(self, num_bytes: int) -> None:
        if self._socket is not None:
            with suppress(OSError):  # it is closed
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)

    @override
    def write_last(self, data: bytes) -> None:
        self._transport.write(data)
        # `close` waits until the peer has taken what is written.
        asyncio.get_running_loop().call_later(CLOSE_SECONDS, self._transport.abort)


class BodyReader(Sink):
    """A sink whose owner reads the body into a buffer, or in parts. It keeps at most a window of unread bytes."""

    def __init__(self, stream: AsyncStream) -> None:
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
