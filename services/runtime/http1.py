"""The HTTP/1.1 protocol of uvicorn with limits for headers, connections, TLS handshakes and unread replies.

A connection that begins with the preface of HTTP/2 is handed over to `ps_http2`.
"""

from __future__ import annotations

import asyncio
import json
from http import HTTPStatus
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ps_config.certificates import close_handshake
from ps_http2.frames import PREFACE
from ps_http2.server import ServerConnection
from ps_protocol.errors import PROBLEM_CONTENT_TYPE, BadInput, GradpostError, TryAgain

from .settings import ServiceSettings

MAX_HEAD_BYTES = 64 * 1024  # of the request line and all headers
PART_BYTES = 64 * 1024  # of a reply, for one write; asyncio copies what the kernel does not take


def send_in_parts(app: ASGIApp) -> ASGIApp:
    """Wrap `app` so that a large body is sent in parts, each after the client has received the previous one."""

    async def divided(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_parts(message: Message) -> None:
            body = message.get("body", b"")
            if len(body) > PART_BYTES:
                rest = memoryview(body)
                while len(rest) > PART_BYTES:
                    await send({"type": "http.response.body", "body": rest[:PART_BYTES], "more_body": True})
                    rest = rest[PART_BYTES:]
                message = {**message, "body": rest}
            await send(message)

        await app(scope, receive, send_parts)

    return divided


class GuardedProtocol(HttpToolsProtocol):
    """A connection with time-outs.

    The header time-out begins when the connection opens; for later requests, with their first byte. If the client does
    not read a reply for the body time-out, the connection is aborted.
    """

    def __init__(
        self, config: Config, *args: Any, limits: ServiceSettings, handshakes: Handshakes, **kwargs: Any
    ) -> None:
        """Serve one connection; `handshakes` are those of all connections of the server."""
        super().__init__(config, *args, **kwargs)
        self.limits = limits
        self.max_connections = handshakes.max_connections
        self.app = send_in_parts(config.loaded_app)
        self._head_bytes = 0  # received since the request began, or since the last part of its body
        self._in_head = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._refusal: GradpostError | None = None  # of data after a request that is not answered yet
        self._first: bytes | None = b""  # received bytes, while they may be the preface of HTTP/2
        if config.ssl is not None:
            handshakes.watch(len(self.connections))

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time-out for headers, or refuse if there are too many connections."""
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            self._refuse(TryAgain(f"all {self.max_connections} connections are in use; retry", code="overloaded"))
        else:
            self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers of the connection."""
        self._stop_timer()
        super().connection_lost(exc)
        # uvicorn does not stop these two, and each refers to the connection and its buffer.
        self._stop_write_timer()
        self._unset_keepalive_if_required()

    def data_received(self, data: bytes) -> None:
        """Parse data, and refuse endless headers and trailers."""
        if self.transport.is_closing() or self._refusal is not None:
            return
        if self._first is not None:
            data = self._first + data
            if data.startswith(PREFACE):
                self._hand_over(data[len(PREFACE) :])
                return
            if PREFACE.startswith(data):
                self._first = data
                return
            self._first = None
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes <= MAX_HEAD_BYTES or self.transport.is_closing():
            return
        if self._in_head:
            self._refuse(
                BadInput("the headers are too large", code="body_too_large", expected=f"<= {MAX_HEAD_BYTES} bytes")
            )
        else:
            self.transport.abort()  # the request may have been answered already

    def on_message_begin(self) -> None:
        """Start the time-out for headers at the first byte of a request."""
        super().on_message_begin()
        self._in_head = True
        self._head_bytes = 0
        if self._head_timer is None:
            self._start_timer()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header, and drop trailers, which arrive the same way."""
        if self._in_head:
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        """Reset the count of header bytes: a body has other limits."""
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Reset the count of header bytes at the end of a request."""
        self._head_bytes = 0
        super().on_message_complete()

    def on_headers_complete(self) -> None:
        """Start the request, or refuse it and stop parsing: the parser would read its body as further requests."""
        self._in_head = False
        self._stop_timer()
        if self.parser.should_upgrade():
            error = BadInput("this server does not upgrade connections; send the request without Upgrade")
            self._refuse(error)
            raise error
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that cannot be parsed. If it was already refused, send nothing."""
        if not self.transport.is_closing() and self._refusal is None:
            self._refuse(BadInput(msg))

    def on_response_complete(self) -> None:
        """Process the next request, or close the connection if the rest of this one's body was not read."""
        super().on_response_complete()
        if not self.cycle.response_complete:
            return
        if self.cycle.more_body:
            self.transport.close()
        elif self._refusal is not None and not self.transport.is_closing():
            self._refuse(self._refusal)

    def pause_writing(self) -> None:
        """Start the time-out for a client that does not read its reply."""
        super().pause_writing()
        # Not `close`, which would wait for the client.
        self._write_timer = self.loop.call_later(self.limits.body_timeout_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop the time-out for unread replies."""
        self._stop_write_timer()
        super().resume_writing()

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _hand_over(self, rest: bytes) -> None:
        self._stop_timer()
        self.connections.discard(self)
        successor = ServerConnection(
            self.config.loaded_app,
            header_timeout_seconds=self.limits.header_timeout_seconds,
            body_timeout_seconds=self.limits.body_timeout_seconds,
            connections=self.connections,
            tasks=self.tasks,
            default_headers=lambda: self.server_state.default_headers,
        )
        self.transport.set_protocol(successor)
        successor.connection_made(self.transport)
        successor.feed(rest)

    def _start_timer(self) -> None:
        self._head_timer = self.loop.call_later(self.limits.header_timeout_seconds, self._headers_are_late)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _headers_are_late(self) -> None:
        if self._in_head:
            self._refuse(TryAgain("the headers came too slowly", code="slow_body"))
        else:  # without any request there is nothing to answer
            self.transport.close()

    def _refuse(self, error: GradpostError) -> None:
        self._stop_timer()
        if self.cycle is not None and not self.cycle.response_complete:
            if not self.cycle.more_body:
                self._refusal = error  # the invalid data follows this request, and is answered after it
                return
            if self.cycle.response_started or self.pipeline:
                self.transport.abort()  # the client would take an answer for that of another request
                return
        body = json.dumps(error.to_problem()).encode()
        headers = {
            "content-type": PROBLEM_CONTENT_TYPE,
            "content-length": str(len(body)),
            **({"retry-after": "1"} if error.may_be_retried else {}),
            "connection": "close",
        }
        lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}", *map(": ".join, headers.items())]
        self.transport.write("\r\n".join([*lines, "", ""]).encode() + body)
        self.transport.close()


class Handshakes:
    """Limits for incomplete TLS handshakes: uvicorn does not count them, and asyncio allows a minute for each.

    A handshake may take `seconds`. If all connections together exceed `max_connections`, the oldest handshakes are
    closed.
    """

    def __init__(self, *, seconds: float, max_connections: int) -> None:
        self._seconds = seconds
        self.max_connections = max_connections
        # asyncio accepts each connection in a task, which ends with the handshake. The oldest is the first.
        self._timers: dict[asyncio.Task[Any], asyncio.TimerHandle] = {}

    def watch(self, num_complete: int) -> None:
        """Limit the handshake of the current task; `num_complete` connections have completed theirs."""
        accepting = asyncio.current_task()
        assert accepting is not None  # asyncio creates the protocol in that task
        close_handshake.set(accepting.cancel)  # the callbacks of its connection run in copies of this context
        self._timers[accepting] = accepting.get_loop().call_later(self._seconds, accepting.cancel)
        accepting.add_done_callback(self._forget)
        # The newest one continues: after its handshake it is refused with an answer.
        while len(self._timers) > 1 and num_complete + len(self._timers) > self.max_connections:
            oldest = next(iter(self._timers))
            self._forget(oldest)
            oldest.cancel()  # asyncio closes the connection

    def _forget(self, accepting: asyncio.Task[Any]) -> None:
        if (timer := self._timers.pop(accepting, None)) is not None:
            timer.cancel()
