"""The two HTTP servers that can carry a service, behind one small interface."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from granian.constants import HTTPModes, Interfaces
from granian.http import HTTP2Settings
from granian.log import LogLevels
from granian.server.embed import Server as GranianServer
from starlette.types import ASGIApp

from ps_protocol.certificates import WatchedFiles, server_context

from .renewal import Backend, RenewedServer
from .settings import ServiceSettings

BACKLOG = 1024
KEEP_ALIVE_SECONDS = 75  # longer than most rounds: a connection that closes between two costs a failed request

_KIB = 1024
_MIB = 1024 * _KIB


def make_granian(app: ASGIApp, settings: ServiceSettings, bound: socket.socket) -> Backend:
    """HTTP/1.1 and HTTP/2 on one port. It binds beside `bound`, which must have been taken with `share`."""
    if settings.tls_cert is not None:
        return RenewedServer(lambda: _make_granian(app, settings, bound), WatchedFiles(settings.server_tls.paths))
    return _make_granian(app, settings, bound)


def _make_granian(app: ASGIApp, settings: ServiceSettings, bound: socket.socket) -> GranianServer:
    host, port, *_ = bound.getsockname()
    return GranianServer(
        app,
        host,
        port,
        interface=Interfaces.ASGINL,
        http=HTTPModes.auto,
        websockets=False,
        backlog=BACKLOG,
        # The application gets one frame at a time, so that large frames spare it work; a window must hold several
        # of them, or an upload stands still for a round trip each time it is used up.
        http2_settings=HTTP2Settings(
            max_frame_size=1 * _MIB,
            initial_stream_window_size=16 * _MIB,
            initial_connection_window_size=32 * _MIB,
            max_headers_size=64 * _KIB,
            max_concurrent_streams=200,
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


def make_uvicorn(app: ASGIApp, settings: ServiceSettings, bound: socket.socket, *, grace_seconds: int) -> Backend:
    """HTTP/1.1 only. It listens on `bound` itself and, once stopped, gives up on what takes over `grace_seconds`."""
    config = uvicorn.Config(
        app,
        http="httptools",
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
        ssl_context_factory=(lambda *_: server_context(settings.server_tls)) if settings.tls_cert else None,
    )
    return _Uvicorn(config, bound)


class _Uvicorn(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, bound: socket.socket) -> None:
        super().__init__(config)
        self._bound = bound

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        await super().serve(sockets or [self._bound])

    def stop(self) -> None:
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # signals are the process's, not the server's
