"""A connection of the client on a socket that does not block, which a selector watches."""

from __future__ import annotations

import os
import selectors
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress

from typing_extensions import override

from .client_connection import ClientConnection
from .reader import MAX_READS
from .stream import Sink, Stream

MAX_BODY_BYTES = 1 << 24  # of a response without a sink

_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class Body(Sink):
    """The body of a response without another sink, as a whole."""

    def __init__(self) -> None:
        self.content = bytearray()

    @override
    def get_buffer(self) -> memoryview:
        return memoryview(b"")  # small parts, which are fed

    @override
    def buffer_updated(self, num_bytes: int) -> None:
        raise NotImplementedError

    @override
    def feed(self, data: memoryview) -> None:
        if len(self.content) + len(data) > MAX_BODY_BYTES:
            raise ValueError(f"the body of a response is longer than {MAX_BODY_BYTES} bytes")
        self.content += data


class Wire:
    """A socket in a selector, as the transport of a connection."""

    def __init__(self, made: socket.socket, selector: selectors.BaseSelector) -> None:
        self.socket = made
        self._selector = selector
        self._events = 0  # that the selector reports
        self._react: Callable[[int], None] | None = None
        self._is_closed = False

    def watch(self, events: int, react: Callable[[int], None]) -> None:
        """Let the selector report these events from now on, and no others."""
        if self._is_closed or (events == self._events and react == self._react):
            return
        if self._events:
            self._selector.modify(self.socket, events, react)
        else:
            self._selector.register(self.socket, events, react)
        self._events, self._react = events, react

    def wrap(self, context: ssl.SSLContext, host: str) -> None:
        """Continue with TLS, beginning with the handshake."""
        if self._events:
            self._selector.unregister(self.socket)
            self._events = 0
        self.socket = context.wrap_socket(self.socket, server_hostname=host, do_handshake_on_connect=False)

    def is_closing(self) -> bool:
        """Return whether it is closed."""
        return self._is_closed

    def close(self) -> None:
        """Close the socket. The kernel still sends what it has taken."""
        if not self._is_closed:
            self._is_closed = True
            if self._events:
                self._selector.unregister(self.socket)
            self.socket.close()

    abort = close


class _Guard:
    """Loses a connection with any error in its block, and raises those that are not its own: of signal handlers.

    Then it may be unknown how many bytes have moved. A generator as context manager takes three times as long.
    """

    def __init__(self, connection: PolledConnection) -> None:
        self._connection = connection

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        if error is None or isinstance(error, BlockingIOError | ssl.SSLWantReadError):
            return True
        self._connection.lose(error if isinstance(error, OSError) else None)
        return isinstance(error, OSError)


class PolledConnection(ClientConnection):
    """The client's end on a socket that does not block."""

    def __init__(self, wire: Wire, *, is_local: bool) -> None:
        super().__init__()
        self.is_local = is_local  # over a Unix socket
        self._wire = wire
        self._is_secure = isinstance(wire.socket, ssl.SSLSocket)
        self._guard = _Guard(self)
        wire.watch(_READ, self._handle)

    def _handle(self, events: int) -> None:
        if events & _READ:
            self.read_nowait()
        if events & _WRITE and not self._wire.is_closing():
            self.pump()

    def read_nowait(self, *, to_end: bool = False) -> None:
        """Receive what the kernel has; `to_end`: also the end of the connection behind it."""
        num_reads = 0
        to_end |= self._is_secure  # TLS keeps bytes of its own, which no selector reports
        with self._guard:
            while not self._wire.is_closing() and (num_reads < MAX_READS or to_end):
                num_reads += 1
                buffers = self._reader.get_buffers()
                if self._is_secure:
                    del buffers[1:]
                    num_bytes = self._wire.socket.recv_into(buffers[0])
                else:
                    num_bytes = os.readv(self._wire.socket.fileno(), buffers)
                if not num_bytes:
                    self.lose(None)
                    return
                is_all = num_bytes < sum(map(len, buffers))
                del buffers
                self.buffers_updated(num_bytes)
                if is_all and not to_end:
                    return

    def lose(self, error: Exception | None) -> None:
        """End the connection and its calls with an error."""
        self._wire.abort()
        self.end(error)

    @override
    def close(self) -> None:
        self.lose(None)

    @override
    def check_liveness(self) -> bool:
        return not self._wire.is_closing() and super().check_liveness()

    @override
    def make_body(self, stream: Stream) -> Sink:
        return Body()

    @override
    def write_parts(self) -> None:
        wire, writer = self._wire, self._writer
        is_full = False
        with self._guard:
            while not is_full and not wire.is_closing() and (parts := writer.next_parts()):
                try:
                    # ssl has no sendmsg
                    num_bytes = wire.socket.send(parts[0]) if self._is_secure else wire.socket.sendmsg(parts)
                    writer.advance(num_bytes)
                except (BlockingIOError, ssl.SSLWantWriteError):
                    is_full = True
                except OSError:  # the peer takes no more, but what it has sent before may still be read
                    break
        wire.watch(_READ | _WRITE if is_full else _READ, self._handle)

    @override
    def await_bytes(self, num_bytes: int) -> None:
        if not self._is_secure:  # TLS keeps bytes of its own
            with suppress(OSError):
                self._wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)

    @override
    def write_last(self, data: bytes) -> None:
        with suppress(OSError):  # the peer may be gone, or take no more
            self._wire.socket.send(data)
