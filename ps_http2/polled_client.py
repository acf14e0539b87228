"""The shell of client connections without an event loop: a selector, polled by the thread that waits for the answers.

begin(), begin(), … ──► wait() ──► the sockets take and bring bytes ──► `Call.is_done`
"""

from __future__ import annotations

import copy
import errno
import math
import os
import selectors
import socket
import ssl
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import httpx
from typing_extensions import override

from ps_config.certificates import TlsFiles

from .client_connection import (
    BODY_EXTENSION,
    CONNECT_SECONDS,
    LOCAL_EXTENSION,
    PING_SECONDS,
    SINK_EXTENSION,
    Origin,
    Request,
    make_response,
    read_headers,
    to_httpx_error,
)
from .local_sockets import connect_locally
from .polled_connection import Body, PolledConnection, Wire
from .stream import Headers, Sink, Stream, StreamResetError

_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class Call:
    """One request and its response. Its memory may change after `finish` or `cancel`."""

    def __init__(self, request: Request, sink: Sink | None) -> None:
        self.request = request
        self.sink = sink
        self.is_local = False  # over a Unix socket
        self.stream: Stream | None = None  # once it is sent
        self.error: Exception | None = None  # without a stream

    @property
    def is_done(self) -> bool:
        """True once the response is complete, or has failed."""
        stream = self.stream
        return self._is_complete or (self.error if stream is None else stream.error) is not None

    @property
    def _is_complete(self) -> bool:
        stream = self.stream
        return stream is not None and stream.is_remote_closed and stream.headers is not None

    def finish(self) -> httpx.Response:
        """Return the response of a call that `is_done`. Raises httpx.TransportError, or the error of the sink."""
        stream = self.stream
        if stream is None or not self._is_complete:
            if stream is not None and stream.error is not None:
                raise to_httpx_error(stream.error)
            assert self.error is not None, "the call is not done"
            raise copy.copy(self.error) from self.error.__cause__  # its traceback would refer to this call
        stream.close()  # it may still be sending, if the response came early
        content = bytes(stream.sink.content) if isinstance(stream.sink, Body) else b""
        return make_response(stream, httpx.ByteStream(content), **{LOCAL_EXTENSION: self.is_local})

    def cancel(self) -> None:
        """Give up the call."""
        if self.stream is not None:
            self.stream.close()
        elif self.error is None:
            self.error = httpx.ReadError("the call was cancelled")
            self.request, self.sink = self.request._replace(body=()), None


class PolledTransport(httpx.BaseTransport):
    """One connection to each origin, with prior knowledge, or by ALPN under TLS, for one thread at a time.

    Nothing is sent or received but in its methods. Only `wait` blocks, and looking up a host name. A server gives up a
    client whose open calls it has pinged in vain for some 50 s, so `wait` for them more often. Sinks must not call it.
    """

    def __init__(self, tls: TlsFiles = TlsFiles()) -> None:  # noqa: B008 - frozen
        self._tls = tls
        self._origins: dict[tuple[str, str | None], _PolledOrigin] = {}
        self._has_news = False  # `begin` has received something that may end other calls
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._selector.register(self._woken, _READ, self._take_wakes)

    def begin(
        self,
        method: str,
        url: str,
        headers: Headers,
        body: Sequence[memoryview | bytes] = (),
        sink: Sink | None = None,
        *,
        local: str | None = None,
    ) -> Call:
        """Send a request as far as that does not block, and return its call. The names of `headers` are in lower case.

        Body and sink are those of the extensions. Their memory belongs to the transport until the call is done. `local`
        is the name of a Unix socket of the server, which is tried first.
        """
        call = Call(Request.make(method, url, headers, body), sink)
        key = call.request.origin, local
        origin = self._origins.get(key)
        if origin is None:
            origin = self._origins[key] = _PolledOrigin(key[0], self._tls, local, self._selector)
        try:
            self._has_news |= origin.begin(call)
        except BaseException:  # an interrupt
            call.cancel()
            raise
        return call

    def wait(self, seconds: float) -> None:
        """Send and receive what is possible, now or once something is, within `seconds`. Any thread may `wake` it.

        It may return earlier.
        """
        now = time.monotonic()
        due = min((origin.due_at for origin in self._origins.values()), default=math.inf)
        if self._has_news:
            self._has_news, seconds = False, 0.0
        ready = self._selector.select(max(0.0, min(seconds, due - now, PING_SECONDS)))
        for key, events in ready:
            key.data(events)
        if not ready and seconds:
            for origin in self._origins.values():
                origin.read_nowait()
        now = time.monotonic()
        for origin in self._origins.values():
            origin.look_at_clock(now)

    def wake(self) -> None:
        """Let `wait` return. Any thread may call it."""
        with suppress(OSError):  # it is full of them, or closed
            self._waker.send(b"\0")

    def _take_wakes(self, events: int) -> None:
        with suppress(BlockingIOError):
            while self._woken.recv(4096):
                pass

    @override
    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request and wait for its response. Raises httpx.TransportError.

        httpx's read time-out bounds the time without a part of the response.
        """
        seconds: float = request.extensions.get("timeout", {}).get("read") or math.inf
        deadline, received_bytes = time.monotonic() + seconds, 0
        body = request.extensions.get(BODY_EXTENSION)
        if body is None:
            body = (request.read(),)
        sink = request.extensions.get(SINK_EXTENSION)
        call = self.begin(request.method, str(request.url), read_headers(request), body, sink)
        try:
            while not call.is_done:
                now = time.monotonic()
                if call.stream is not None and call.stream.received_bytes > received_bytes:
                    received_bytes, deadline = call.stream.received_bytes, now + seconds
                if now >= deadline:
                    raise httpx.ReadTimeout(f"no response within {seconds:g} s")
                self.wait(deadline - now)
        except BaseException:
            call.cancel()
            raise
        return call.finish()

    @override
    def close(self) -> None:
        """Close all connections."""
        for origin in self._origins.values():
            origin.close()
        for each in (self._selector, self._woken, self._waker):
            each.close()


class _PolledOrigin(Origin):
    """A server, the connection to it, and the calls that wait for one or for the end of another call."""

    def __init__(self, name: str, tls: TlsFiles, local: str | None, selector: selectors.BaseSelector) -> None:
        """`local` is the name of a Unix socket, which is tried first."""
        super().__init__(name, tls)
        self._local = None if self.is_secure else local  # a Unix socket has no certificate
        self._selector = selector
        self._connection: PolledConnection | None = None
        self._connections: list[PolledConnection] = []  # including replaced ones, whose calls are finished there
        self._ping_at = math.inf
        self._waiting: list[Call] = []
        self._connecting: Wire | None = None
        self._addresses: list[tuple[int, tuple[object, ...]]] = []  # that are not tried yet: family, address
        self._give_up_at = 0.0

    @property
    def due_at(self) -> float:
        """The time at which `look_at_clock` has something to do."""
        return min(self._ping_at, math.inf if self._connecting is None else self._give_up_at)

    def begin(self, call: Call) -> bool:
        """Send a call, now or once there is a connection; return True if other calls may have changed."""
        self._waiting.append(call)
        connection = self._connection
        before = 0 if connection is None else connection.received_bytes
        if connection is not None:
            # The server may have closed an idle connection; what a busy one brings has no bound.
            connection.read_nowait(to_end=not connection.streams)
        self.look_at_clock(time.monotonic())
        return connection is not None and (connection.received_bytes != before or connection.is_closing)

    def look_at_clock(self, now: float) -> None:
        """Give up a connection that is not made in time, ping a silent server, and send calls that may be sent."""
        if self._connecting is not None and now >= self._give_up_at:
            self._fail(httpx.ConnectTimeout(f"no connection within {CONNECT_SECONDS:g} s"))
        if now >= self._ping_at:
            self._connections = [one for one in self._connections if one.check_liveness()]
            self._ping_at = now + PING_SECONDS if self._connections else math.inf
        self._waiting = [call for call in self._waiting if call.error is None]  # the others were cancelled
        if self._waiting and self._connecting is None:
            if self._connection is not None and self.is_usable(self._connection):
                self._send_waiting()
            else:
                self._connect()

    def read_nowait(self) -> None:
        """Receive what has arrived, although it may be less than the connections await."""
        for connection in [*self._connections]:
            connection.read_nowait()

    def close(self) -> None:
        """Abort the connection and all calls."""
        for connection in self._connections:
            connection.close()
        self._fail(httpx.ConnectError("closed while it was connecting"))

    def _send_waiting(self) -> None:
        connection = self._connection
        assert connection is not None
        while self._waiting and connection.may_open_stream:
            call = self._waiting.pop(0)
            call.is_local = connection.is_local
            try:
                call.stream = connection.open_stream(call.request, call.sink)
            except StreamResetError as error:
                call.error = to_httpx_error(error)
            except Exception as error:
                call.error = error

    # ------------------------------------------------------------------ a new connection

    def _connect(self) -> None:
        self._connection = None
        self._give_up_at = time.monotonic() + CONNECT_SECONDS
        if self._local is not None:
            with suppress(OSError):  # the socket is on another host, or gone
                self._open(Wire(connect_locally(self._local), self._selector), is_local=True)
                return
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            self._fail(httpx.ConnectError(str(error)))
            return
        self._addresses = [(family, address) for family, _, _, _, address in found]
        self._try_next("no address")

    def _try_next(self, reason: str) -> None:
        """Begin to connect to the next address, without waiting."""
        while self._addresses:
            family, address = self._addresses.pop(0)
            try:
                wire = Wire(socket.socket(family, socket.SOCK_STREAM), self._selector)
            except OSError as error:
                reason = str(error)
                continue
            wire.socket.setblocking(False)
            wire.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            code = wire.socket.connect_ex(address)
            if code in (0, errno.EINPROGRESS):
                self._connecting = wire
                wire.watch(_WRITE, partial(self._connected, wire))
                return
            wire.abort()
            reason = _describe(code)
        self._fail(httpx.ConnectError(reason))

    def _connected(self, wire: Wire, events: int) -> None:
        if wire is not self._connecting:  # an interrupt came while it was opened
            wire.abort()
        elif code := wire.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            wire.abort()
            self._connecting = None
            self._try_next(_describe(code))
        elif self.is_secure:
            self._shake_hands(wire, events)
        else:
            self._open(wire)

    def _shake_hands(self, wire: Wire, events: int) -> None:
        try:
            if not isinstance(wire.socket, ssl.SSLSocket):
                wire.wrap(self.make_context(), self.host)
            assert isinstance(wire.socket, ssl.SSLSocket)
            wire.socket.do_handshake()
            if wire.socket.selected_alpn_protocol() != "h2":
                raise ConnectionError("the server does not speak HTTP/2")
        except ssl.SSLWantReadError:
            wire.watch(_READ, partial(self._connected, wire))
        except ssl.SSLWantWriteError:
            wire.watch(_WRITE, partial(self._connected, wire))
        except OSError as error:
            failure = httpx.ConnectError(str(error))
            failure.__cause__ = error
            self._fail(failure)
        else:
            self._open(wire)

    def _open(self, wire: Wire, *, is_local: bool = False) -> None:
        self._connecting = None
        self._connection = connection = PolledConnection(wire, is_local=is_local)
        self._connections.append(connection)
        self._ping_at = min(self._ping_at, time.monotonic() + PING_SECONDS)
        connection.begin(wire)
        self._send_waiting()
        connection.read_nowait()  # what TLS has received with the handshake

    def _fail(self, error: httpx.TransportError) -> None:
        """Give up to connect, and all calls that wait for it."""
        if self._connecting is not None:
            self._connecting.abort()
            self._connecting = None
        waiting, self._waiting = self._waiting, []
        for call in waiting:  # each its own, whose traceback refers to no other
            if call.error is None:
                call.error = type(error)(str(error))
                call.error.__cause__ = error.__cause__


def _describe(code: int) -> str:
    return f"[Errno {code}] {os.strerror(code)}"
