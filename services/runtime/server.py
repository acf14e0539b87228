"""The HTTP server of a service: its address, its life, its HTTP/1.1, and the main function of its process.

A connection of HTTP/1.1 has the limits and time-outs of HTTP/2, and one request under way. What follows the request is
not read before its response. A connection that begins with the preface of HTTP/2 is handed over to `ps_http2`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import ssl
import sys
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, NoReturn

import h11
import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp
from typing_extensions import override
from uvicorn.protocols.http.h11_impl import H11Protocol

from ps_config.certificates import close_handshake, server_context
from ps_config.environment import SettingsError
from ps_config.hosts import ListenError, authority, reachable_host, take_port
from ps_http2.frames import PREFACE
from ps_http2.reader import MAX_HEADER_BYTES, MAX_HEADERS
from ps_http2.server import ServerConnection, Watch
from ps_protocol.errors import BadInput, GradpostError, TryAgain

from .errors import problem_response
from .logs import get_logger
from .process import allow_many_files, bound_connections, keep_large_buffers, use_huge_pages
from .security import protect, wait_for_token, warn_if_exposed
from .settings import ServiceSettings

BACKLOG = 1024
KEEP_ALIVE_SECONDS = 75  # longer than most rounds: a connection closed between two costs a failed request
GRACE_SECONDS = 5  # for requests in flight when the service stops
ANSWER_SECONDS = 1.0  # for the answers to those that take longer
READ_BYTES = 64 * 1024  # at a time: each chunk of a body takes time to parse, however short it is

log = get_logger()


async def serve(
    app: FastAPI,
    settings: ServiceSettings,
    *,
    stop: asyncio.Event,
    on_started: Callable[[str], None] | None = None,
    local: socket.socket | None = None,
) -> None:
    """Serve `app` until `stop` is set, then end within about `GRACE_SECONDS`.

    In order: wait for the token file, take the port, enter the app's lifespan, listen, call `on_started` with the
    advertised address. On stop: refuse new connections, let requests in flight finish, answer slower ones with
    `try_again`, leave the lifespan. The service also listens on `local`, a bound Unix socket, with the same limits and
    checks. Raises SettingsError if the token file does not appear, ListenError, and exceptions of the lifespan and of
    `on_started`.
    """
    if not await wait_for_token(settings, stop):
        return
    with _take_socket(settings) as bound:
        address = advertised_address(settings, bound.getsockname()[1])
        warn_if_exposed(settings)
        protect(app, settings, address)
        # The lifespan is not uvicorn's task, which turns its exceptions into a log line and an exit code.
        async with app.router.lifespan_context(app), UvicornServer(app, settings, bound, local):
            log.info("serving", address=address)
            if on_started is not None:
                on_started(address)
            await stop.wait()


def run_service(main: Callable[[asyncio.Event], Awaitable[int]]) -> NoReturn:
    """Run `main` as a whole process, which exits with the code that it returns; the event requests the end.

    SIGTERM and SIGINT set the event; a second SIGINT exits immediately. An exception is exit code 1 and a log
    entry: one line for a GradpostError, ListenError or SettingsError, also when a task group wraps it, a traceback for
    any other.
    """

    async def run() -> int:
        stop = asyncio.Event()

        def handle(received: signal.Signals) -> None:
            if received == signal.SIGINT and stop.is_set():
                os._exit(128 + received)
            log.info("stopping", signal=received.name)
            stop.set()

        for handled in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(handled, handle, handled)
        try:
            return await main(stop)
        except Exception as error:
            cause: BaseException = error
            while isinstance(cause, BaseExceptionGroup) and len(cause.exceptions) == 1:
                [cause] = cause.exceptions  # a task group wraps the exception of a task
            if isinstance(cause, GradpostError | ListenError | SettingsError):
                log.error(str(cause))
            else:
                log.error("the service failed", exc_info=error)
        return 1

    async def run_and_exit() -> NoReturn:
        exit_code = await run()
        # Python's own exit waits for threads, one of which may be writing to a hanging disk.
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)

    keep_large_buffers()
    use_huge_pages()
    allow_many_files()
    asyncio.run(run_and_exit())


# ---------------------------------------------------------------------- the address


def _take_socket(settings: ServiceSettings) -> socket.socket:
    if settings.listen_fd is None:
        return take_port(settings.host, settings.port)
    return socket.socket(proto=socket.IPPROTO_TCP, fileno=settings.listen_fd)


def advertised_address(settings: ServiceSettings, port: int) -> str:
    """Return the base URL under which others reach a service that listens on `port`, without a trailing slash.

    It is `advertise_address`, else made from `host`. If that is every interface, it is the address from which this
    machine reaches other networks, or its name if it reaches none. With TLS the certificate must be valid for it.
    """
    if settings.advertise_address is not None:
        return settings.advertise_address
    scheme = "https" if settings.tls_cert else "http"
    return f"{scheme}://{authority(reachable_host(settings.host), port)}"


# ---------------------------------------------------------------------- the HTTP server


class UvicornServer(uvicorn.Server):
    """An HTTP server on this event loop, without its own signal handlers, logs and lifespan.

    It listens on `bound`, and on the Unix socket `local`, if given, while its context is entered.
    """

    def __init__(
        self, app: ASGIApp, settings: ServiceSettings, bound: socket.socket, local: socket.socket | None = None
    ) -> None:
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # or it logs each request that is not HTTP
        protocol: Any = self._accept
        tls: Any = (lambda *_: _offer_http2(server_context(settings.server_tls))) if settings.tls_cert else None
        config = uvicorn.Config(
            app,
            http=protocol,
            ws="none",
            loop="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=GRACE_SECONDS,  # then it cancels requests, which the gate answers
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            ssl_context_factory=tls,
        )
        config.load()
        super().__init__(config)
        self._limits = settings
        self._max_connections = bound_connections(settings.max_connections)
        self._handshakes: dict[asyncio.Task[Any], None] = {}  # that are incomplete, oldest first
        self.lifespan = config.lifespan_class(config)
        # In this order: a client that reaches the port may use the Unix socket next.
        self._sockets = [bound] if local is None else [local, bound]

    def _accept(self, **kwargs: Any) -> Http1Connection:
        """Return the protocol of a new connection, whose TLS handshake is limited as its headers are.

        If there are too many connections, the oldest incomplete handshakes are closed. uvicorn does not count them.
        """
        if self.config.ssl is not None:
            handshake = asyncio.current_task()  # in which asyncio accepts the connection
            assert handshake is not None
            close_handshake.set(handshake.cancel)  # the callbacks of its connection run in copies of this context
            asyncio.get_running_loop().call_later(self._limits.header_timeout_seconds, handshake.cancel)
            self._handshakes[handshake] = None
            handshake.add_done_callback(lambda _: self._handshakes.pop(handshake, None))
            # The newest one continues: after its handshake it is refused with an answer.
            num_complete = len(self.server_state.connections)
            while len(self._handshakes) > 1 and num_complete + len(self._handshakes) > self._max_connections:
                oldest = next(iter(self._handshakes))
                del self._handshakes[oldest]
                oldest.cancel()
        return Http1Connection(limits=self._limits, max_connections=self._max_connections, **kwargs)

    async def __aenter__(self) -> None:
        await self.startup(self._sockets)
        self._ticking = asyncio.create_task(self.main_loop())

    async def __aexit__(self, *_: object) -> None:
        self._ticking.cancel()
        await self.shutdown(self._sockets)
        if self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks, timeout=ANSWER_SECONDS)


def _offer_http2(context: ssl.SSLContext) -> ssl.SSLContext:
    context.set_alpn_protocols(["h2", "http/1.1"])
    return context


# ---------------------------------------------------------------------- HTTP/1.1


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
