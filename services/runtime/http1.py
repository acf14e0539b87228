"""The HTTP/1.1 protocol of uvicorn with the limits and time-outs of HTTP/2.

A connection has one request under way. What follows the request is not read before its response.
A connection that begins with the preface of HTTP/2 is handed over to `ps_http2`.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

import h11
from typing_extensions import override
from uvicorn.protocols.http.h11_impl import H11Protocol

from ps_http2.frames import PREFACE
from ps_http2.reader import MAX_HEADERS
from ps_http2.server import ServerConnection, Watch
from ps_protocol.errors import BadInput, GradpostError, TryAgain

from .errors import problem_response
from .settings import ServiceSettings

READ_BYTES = 64 * 1024  # at a time: each chunk of a body takes time to parse, however short it is


class Http1Connection(H11Protocol, asyncio.BufferedProtocol):
    """A connection that uvicorn has accepted."""

    cycle: Any  # the newest request, None before the first

    def __init__(self, *args: Any, limits: ServiceSettings, max_connections: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sent_bytes = 0  # at least
        self._limits = limits
        self._max_connections = max_connections
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._watch: Watch | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time-outs, or refuse if there are too many connections."""
        super().connection_made(transport)
        limits = self._limits
        self._watch = Watch(self, transport, limits.header_timeout_seconds, limits.body_timeout_seconds)
        if len(self.connections) > self._max_connections:
            self._refuse(TryAgain(f"all {self._max_connections} connections are in use; retry", code="overloaded"))

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers of the connection, one of which uvicorn leaves."""
        if self._watch is not None:
            self._watch.stop()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    @override
    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Parse data, or hand the connection over if it begins with the preface of HTTP/2."""
        self._unset_keepalive_if_required()
        self.conn.receive_data(bytes(self._buffer[:nbytes]))
        if self.cycle is None:
            begin = self.conn.trailing_data[0]
            if begin.startswith(PREFACE):
                self._hand_over(begin[len(PREFACE) :])
                return
            if PREFACE.startswith(begin):
                return
        self.handle_events()

    def handle_events(self) -> None:
        """Parse the rest of a request, or the next one. Refuse headers that h11 accepts before it parses them."""
        if self.transport.is_closing():
            return
        if self.conn.their_state is h11.IDLE:
            head = self.conn.trailing_data[0].partition(b"\r\n\r\n")[0].lower()
            if head.count(b"\n") > MAX_HEADERS:
                expected = f"<= {MAX_HEADERS} headers"
                self._refuse(BadInput("there are too many headers", code="body_too_large", expected=expected))
                return
            if b"\ncontent-length" in head and b"\ntransfer-encoding" in head:  # a proxy may have used the other one
                self._refuse(BadInput("a request may not have both Content-Length and Transfer-Encoding"))
                return
        super().handle_events()

    def on_response_complete(self) -> None:
        """Process the next request, or close the connection if the rest of this one's body was not read."""
        if self.cycle.more_body:
            self.transport.close()
        else:
            super().on_response_complete()

    def _hand_over(self, rest: bytes) -> None:
        assert self._watch is not None
        self._watch.stop()
        self.connections.discard(self)
        successor = ServerConnection(
            self.config.loaded_app,
            header_timeout_seconds=self._limits.header_timeout_seconds,
            body_timeout_seconds=self._limits.body_timeout_seconds,
            connections=self.connections,
            tasks=self.tasks,
            default_headers=lambda: self.server_state.default_headers,
        )
        self.transport.set_protocol(successor)
        successor.connection_made(self.transport)
        successor.feed(rest)

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that cannot be parsed."""
        self._refuse(BadInput("the request is invalid, or its headers are too large"))

    def _refuse(self, error: GradpostError) -> None:
        """Answer with a problem document and close the connection; abort it if a response has begun."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
            return
        if self.cycle is not None:
            self.cycle.disconnected = True  # and has no answer of its own
        response = problem_response(error)
        headers = [*response.raw_headers, (b"connection", b"close")]
        head = h11.Response(status_code=error.status, headers=headers, reason=HTTPStatus(error.status).phrase)
        for event in (head, h11.Data(data=bytes(response.body)), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    # ------------------------------------------------------------------ time-outs

    def resume_writing(self) -> None:
        """Note that the client has read a part of its reply."""
        self.sent_bytes += READ_BYTES
        super().resume_writing()

    @property
    def is_sending(self) -> bool:
        """Implement `Watched.is_sending`."""
        return self.flow.write_paused

    def awaits_headers(self) -> bool:
        """Implement `Watched.awaits_headers`."""
        return self.cycle is None or (self.cycle.response_complete and bool(self.conn.trailing_data[0]))

    def headers_are_late(self) -> None:
        """Implement `Watched.headers_are_late`."""
        if self.conn.trailing_data[0]:
            self._refuse(TryAgain("the headers came too slowly", code="slow_body"))
        else:
            self.transport.close()

    def check_streams(self, now: float, elapsed: float) -> None:
        """Implement `Watched.check_streams`: there are none."""
