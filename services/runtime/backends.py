"""The two HTTP servers that can carry a service, behind one small interface."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Iterator
from typing import Any

import uvicorn
from granian.constants import HTTPModes, Interfaces
from granian.http import HTTP1Settings, HTTP2Settings
from granian.log import LogLevels
from granian.server.embed import Server as GranianServer
from starlette.types import ASGIApp

from ps_protocol.certificates import WatchedFiles, server_context

from .connections import Connections, Peer
from .descriptors import bound_connections
from .guarded_protocol import guard_protocol
from .machine import usable_memory_bytes
from .paced_replies import PaceReplies
from .renewal import Backend, RenewedServer
from .settings import ServiceSettings
from .strangers import SWEEPS, Strangers

BACKLOG = 1024
KEEP_ALIVE_SECONDS = 75  # longer than most rounds: a connection that closes between two costs a failed request
PING_INTERVAL_SECONDS = 30
PING_TIMEOUT_SECONDS = 20
MAX_STREAMS = 100  # of one connection

_KIB = 1024
_MIB = 1024 * _KIB


def make_granian(app: ASGIApp, settings: ServiceSettings, bound: socket.socket) -> Backend:
    """HTTP/1.1 and HTTP/2 on one port. It binds beside `bound`, which must have been taken with `share`."""
    if settings.tls_cert is not None:
        return RenewedServer(lambda: _make_granian(app, settings, bound), WatchedFiles(settings.server_tls.paths))
    return _make_granian(app, settings, bound)


def _make_granian(app: ASGIApp, settings: ServiceSettings, bound: socket.socket) -> Backend:
    host, port, *_ = bound.getsockname()
    max_connections = bound_connections(settings.max_connections)
    paced = PaceReplies(
        app,
        port,
        max_untaken_bytes=settings.max_untaken_bytes or usable_memory_bytes() // 8,
        stall_seconds=settings.body_timeout_seconds,
        silent_seconds=settings.header_timeout_seconds,
        max_connections=max_connections,
    )
    server = GranianServer(
        paced,
        host,
        port,
        interface=Interfaces.ASGINL,
        http=HTTPModes.auto,
        websockets=False,
        backlog=BACKLOG,
        backpressure=max_connections,
        http1_settings=HTTP1Settings(header_read_timeout=int(settings.header_timeout_seconds * 1000)),
        # The application gets one frame at a time, so that large frames spare it work; a window must hold several
        # of them, or an upload stands still for a round trip each time it is used up.
        http2_settings=HTTP2Settings(
            max_frame_size=1 * _MIB,
            initial_stream_window_size=16 * _MIB,
            initial_connection_window_size=32 * _MIB,
            max_headers_size=64 * _KIB,
            max_concurrent_streams=MAX_STREAMS,
            # So that a connection whose other end is gone, or never was an HTTP/2 client, does not stay for ever.
            keep_alive_interval=PING_INTERVAL_SECONDS * 1000,
            keep_alive_timeout=PING_TIMEOUT_SECONDS,
        ),
        ssl_cert=settings.tls_cert,
        ssl_key=settings.tls_key,
        ssl_ca=settings.tls_client_ca,
        ssl_client_verify=settings.tls_client_ca is not None,
        # Without this it prints to stdout; so its errors go the way of all logs, and what it warns of is only that
        # embedding is experimental.
        log_level=LogLevels.error,
        log_dictconfig={"incremental": True, "formatters": {}, "handlers": {}, "loggers": {}},
    )
    return _Granian(server, paced)


def make_uvicorn(
    app: ASGIApp,
    settings: ServiceSettings,
    bound: socket.socket,
    local: socket.socket | None = None,
    *,
    grace_seconds: int,
) -> Backend:
    """HTTP/1.1, and HTTP/2 of ours. It listens on `bound` itself, and on the Unix socket `local` if there is one.

    Once stopped, it gives up on what takes over `grace_seconds`.
    """
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # else a line for whatever is no HTTP
    max_connections = bound_connections(settings.max_connections)
    config = uvicorn.Config(
        app,
        http=guard_protocol(settings, max_connections),
        ws="none",
        loop="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=grace_seconds,
        ssl_context_factory=(lambda *_: _offer_http2(server_context(settings.server_tls)))
        if settings.tls_cert
        else None,
    )
    return _Uvicorn(
        config, bound, local, header_seconds=settings.header_timeout_seconds, max_connections=max_connections
    )


def _offer_http2(context: ssl.SSLContext) -> ssl.SSLContext:
    context.set_alpn_protocols(["h2", "http/1.1"])
    return context


class _Granian:
    def __init__(self, server: GranianServer, paced: PaceReplies) -> None:
        self._server = server
        self._paced = paced

    async def serve(self) -> None:
        sweeping = asyncio.create_task(self._paced.sweep_forever(), name="sweep connections")
        try:
            await self._server.serve()
        finally:
            sweeping.cancel()

    def stop(self) -> None:
        self._server.stop()  # type: ignore[no-untyped-call]


class _Uvicorn(uvicorn.Server):
    def __init__(
        self,
        config: uvicorn.Config,
        bound: socket.socket,
        local: socket.socket | None,
        *,
        header_seconds: float,
        max_connections: int,
    ) -> None:
        super().__init__(config)
        # In this order: who finds somebody at the port may tell others of the Unix socket.
        self._sockets = [bound] if local is None else [local, bound]
        self._period = header_seconds / SWEEPS
        self._connections = Connections(bound.getsockname()[1])
        self._strangers = Strangers(
            self._connections,
            lambda peer: peer in self._known,
            seconds=header_seconds,
            max_connections=max_connections,
        )
        self._known: set[Peer] = set()

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        sweeping = asyncio.create_task(self._sweep_forever(), name="sweep connections")
        try:
            await super().serve(sockets or self._sockets)
        finally:
            sweeping.cancel()

    async def _sweep_forever(self) -> None:
        """Protocols are made when a TLS handshake is over; then they have limits of their own.

        On a Unix socket there is no TLS, so that nobody is a stranger there.
        """
        while True:
            await asyncio.sleep(self._period)
            protocols: set[Any] = set(self.server_state.connections)
            self._known = {protocol.client for protocol in protocols if protocol.client is not None}
            self._strangers.sweep(self._connections.scan(), asyncio.get_running_loop().time())

    def stop(self) -> None:
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # signals are the process's, not the server's
