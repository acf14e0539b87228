"""The HTTP server of a service: its address, its life, and the main function of its process."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import ssl
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from inspect import isawaitable
from typing import Any, NoReturn

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from ps_config.certificates import server_context
from ps_config.environment import SettingsError
from ps_config.hosts import authority, reachable_host
from ps_protocol.errors import GradpostError, TryAgain

from .errors import problem_response
from .http1 import GuardedProtocol, Handshakes
from .logs import get_logger
from .process import allow_many_files, bound_connections, keep_large_buffers
from .security import guard, wait_for_token, warn_if_exposed
from .settings import ServiceSettings

BACKLOG = 1024
KEEP_ALIVE_SECONDS = 75  # longer than most rounds: a connection closed between two costs a failed request
GRACE_SECONDS = 5.0  # for requests in flight when the service stops

log = get_logger()


class ListenError(OSError):
    """The host and port cannot be bound; the message has the reason and a remedy."""


class SwitchedApp:
    """Applications of one server, of which `choose` returns the one that answers a request."""

    def __init__(self, apps: Sequence[FastAPI], choose: Callable[[Scope], FastAPI]) -> None:
        self.apps = apps
        self._choose = choose

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        await self._choose(scope)(scope, receive, send)


async def serve(
    app: FastAPI | SwitchedApp,
    settings: ServiceSettings,
    *,
    stop: asyncio.Event,
    on_started: Callable[[str], Awaitable[None] | None] | None = None,
    local: socket.socket | None = None,
) -> None:
    """Serve `app` until `stop` is set, then end within about `GRACE_SECONDS`.

    In order: wait for the token file, take the port, enter the app's lifespan, listen, write the advertised address to
    `ready_fd`, call `on_started` with it. On stop: cancel `on_started` if it still waits, refuse new connections, let
    requests in flight finish, answer slower ones with `try_again`, leave the lifespan. The service also listens on
    `local`, a bound Unix socket, with the same limits and checks. Raises SettingsError if the token file does not
    appear, ListenError, exceptions of the lifespan and of `on_started`, and RuntimeError if the HTTP server ends by
    itself.
    """
    if not await wait_for_token(settings, stop):
        return
    requests = _RequestsInFlight(app)
    with take_port(settings.host, settings.port) as bound:
        address = advertised_address(settings, bound.getsockname()[1])
        warn_if_exposed(settings)
        async with contextlib.AsyncExitStack() as stack:
            for one in app.apps if isinstance(app, SwitchedApp) else [app]:
                guard(one, settings, address)
                # Not by uvicorn, which turns exceptions of the lifespan into a log line and an exit code.
                await stack.enter_async_context(one.router.lifespan_context(one))
            server = UvicornServer(requests, settings, bound, local)
            serving = asyncio.create_task(server.serve())
            try:
                await _while_serving(serving, wait_until_listening(bound))
                log.info("serving", address=address)
                announce(settings, address)
                if on_started is not None and isawaitable(started := on_started(address)):
                    await _while_serving(serving, stop.wait(), started)
                await _while_serving(serving, stop.wait())
            finally:
                await _shut_down(server, serving, requests)


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


def take_port(host: str, port: int) -> socket.socket:
    """Bind `host` and `port` (0: a free one) for this process alone, without listening yet. Raises ListenError."""
    try:
        [(family, _, _, _, address), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return _bind(family, address)
    except OSError as error:  # gaierror included
        if error.errno == errno.EADDRINUSE:
            reason = (
                "another process listens there; stop it or choose another port (--port or GRADPOST_PORT, 0 for any)"
            )
        else:
            reason = f"{error.strerror}; choose another address (--host or GRADPOST_HOST, --port or GRADPOST_PORT)"
        raise ListenError(f"cannot listen on {authority(host, port)}: {reason}") from error


def _bind(family: int, address: Any) -> socket.socket:
    # asyncio disables Nagle's algorithm, which can delay a request by 40 ms, only if the protocol is named.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        # Ignores connections in TIME_WAIT of an earlier process, but no listening socket.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound


async def wait_until_listening(bound: socket.socket) -> None:
    """Wait until connections to the address of `bound` are accepted."""
    while True:
        with socket.socket(bound.family, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            with suppress(ConnectionRefusedError):
                await asyncio.get_running_loop().sock_connect(probe, bound.getsockname())
                return
        await asyncio.sleep(0.005)


def advertised_address(settings: ServiceSettings, port: int) -> str:
    """Return the base URL under which others reach a service that listens on `port`, without a trailing slash.

    It is `advertise_address`, else made from `host`. If that is every interface, it is the address from which this
    machine reaches other networks, or its name if it reaches none. With TLS the certificate must be valid for it.
    """
    if settings.advertise_address is not None:
        return settings.advertise_address
    scheme = "https" if settings.tls_cert else "http"
    return f"{scheme}://{authority(reachable_host(settings.host), port)}"


def announce(settings: ServiceSettings, address: str) -> None:
    """Write the address to `ready_fd`, for the process that started this one, and close it."""
    if settings.ready_fd is not None:
        os.write(settings.ready_fd, f"{address}\n".encode())
        os.close(settings.ready_fd)


# ---------------------------------------------------------------------- the HTTP server


class _RequestsInFlight:
    """The application as uvicorn calls it, with its unanswered requests."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ended: set[asyncio.Task[Any]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None  # uvicorn runs each request in a task of its own
        self._tasks.add(task)
        try:
            await self._app(scope, receive, send)
        except asyncio.CancelledError:
            if task not in self._ended:
                raise
            with suppress(RuntimeError):  # the response has begun; the server cuts it off
                await problem_response(TryAgain("the service stops"), instance=scope["path"])(scope, receive, send)
        finally:
            self._tasks.discard(task)

    def end(self) -> None:
        """Cancel all requests; they are answered with `try_again`."""
        self._ended |= self._tasks
        for task in self._tasks:
            task.cancel()


async def _while_serving(serving: asyncio.Task[None], *waiting: Awaitable[Any]) -> None:
    """Wait for the first of `waiting`, cancel the others and raise its exception; or raise if the server ends."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in waiting]
    try:
        done, _ = await asyncio.wait({serving, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        if serving in done:
            raise RuntimeError("the HTTP server ended by itself") from serving.exception()
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _shut_down(server: UvicornServer, serving: asyncio.Task[None], requests: _RequestsInFlight) -> None:
    server.stop()
    await asyncio.wait({serving}, timeout=GRACE_SECONDS)
    if not serving.done():
        requests.end()
        await asyncio.wait({serving}, timeout=1.0)
    if not serving.done():
        log.warning("leaving connections that do not end")  # such as one whose client does not read its reply
        serving.cancel()
        await asyncio.wait({serving})
    elif error := serving.exception():
        log.error("the HTTP server failed", exc_info=error)


class UvicornServer(uvicorn.Server):
    """An HTTP server on this event loop, without its own signal handlers, logs and lifespan.

    It listens on `bound`, and on the Unix socket `local`, if given.
    """

    def __init__(
        self, app: ASGIApp, settings: ServiceSettings, bound: socket.socket, local: socket.socket | None = None
    ) -> None:
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # or it logs each request that is not HTTP
        handshakes = Handshakes(
            seconds=settings.header_timeout_seconds, max_connections=bound_connections(settings.max_connections)
        )
        protocol: Any = partial(GuardedProtocol, limits=settings, handshakes=handshakes)
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
            ssl_context_factory=(lambda *_: _offer_http2(server_context(settings.server_tls)))
            if settings.tls_cert
            else None,
        )
        super().__init__(config)
        # In this order: a client that reaches the port may use the Unix socket next.
        self._sockets = [bound] if local is None else [local, bound]

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until `stop`, then wait until the requests in flight are answered."""
        await super().serve(sockets or self._sockets)

    def stop(self) -> None:
        """Accept no more connections and requests."""
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing, because the process handles signals itself."""
        yield


def _offer_http2(context: ssl.SSLContext) -> ssl.SSLContext:
    context.set_alpn_protocols(["h2", "http/1.1"])
    return context
