"""The HTTP server of a service: its address, its life, and the main function of its process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import ssl
import sys
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp

from ps_config.certificates import close_handshake, server_context
from ps_config.environment import SettingsError
from ps_config.hosts import ListenError, authority, reachable_host, take_port
from ps_http2.reader import MAX_HEADER_BYTES
from ps_protocol.errors import GradpostError

from .http1 import Http1Connection
from .logs import get_logger
from .process import allow_many_files, bound_connections, keep_large_buffers
from .security import protect, wait_for_token, warn_if_exposed
from .settings import ServiceSettings

BACKLOG = 1024
KEEP_ALIVE_SECONDS = 75  # longer than most rounds: a connection closed between two costs a failed request
GRACE_SECONDS = 5  # for requests in flight when the service stops
ANSWER_SECONDS = 1.0  # for the answers to those that take longer

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
        async with contextlib.AsyncExitStack() as stack:
            protect(app, settings, address)
            # Not by uvicorn, which turns exceptions of the lifespan into a log line and an exit code.
            await stack.enter_async_context(app.router.lifespan_context(app))
            await stack.enter_async_context(UvicornServer(app, settings, bound, local))
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
