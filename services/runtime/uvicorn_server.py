"""uvicorn as it carries a service: HTTP/1.1 and our HTTP/2 on the same sockets."""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from ps_config.certificates import server_context

from .descriptors import bound_connections
from .guarded_protocol import guard_protocol
from .settings import ServiceSettings

BACKLOG = 1024
KEEP_ALIVE_SECONDS = 75  # longer than most rounds: a connection that closes between two costs a failed request


class UvicornServer(uvicorn.Server):
    """An HTTP server on this event loop, without signal handlers, logs and lifespan of its own.

    It listens on `bound`, and on the Unix socket `local` if there is one.
    """

    def __init__(
        self, app: ASGIApp, settings: ServiceSettings, bound: socket.socket, local: socket.socket | None = None
    ) -> None:
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # else a line for each request that is not HTTP
        config = uvicorn.Config(
            app,
            http=guard_protocol(settings, bound_connections(settings.max_connections)),
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
        # In this order: a client that reaches the port may tell others of the Unix socket.
        self._sockets = [bound] if local is None else [local, bound]

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until `stop`, and then until the requests in flight are answered, however long that takes."""
        await super().serve(sockets or self._sockets)

    def stop(self) -> None:
        """Accept no more connections and requests."""
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """See uvicorn.Server. Signals are the process's, not the server's."""
        yield


def _offer_http2(context: ssl.SSLContext) -> ssl.SSLContext:
    context.set_alpn_protocols(["h2", "http/1.1"])
    return context
