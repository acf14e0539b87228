"""An httpx transport over HTTP/1.1, for tensors if HTTP/2 is disabled."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Sequence

import httpx

from ps_config.certificates import TlsFiles, client_context
from ps_config.control_client import ControlTransport
from ps_http2.client import BODY_EXTENSION

CHUNK_BYTES = 1024 * 1024
CONNECT_SECONDS = 5.0
PROBE_SECONDS = 5  # between TCP's own probes of a silent connection
KEEP_SECONDS = 60.0  # services close a connection after 75 s without a request

_INTERVALS = [getattr(socket, name) for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL") if hasattr(socket, name)]
_KEEP_ALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *((socket.IPPROTO_TCP, option, PROBE_SECONDS) for option in _INTERVALS),
]


class Http1Transport(ControlTransport):
    """A connection for each concurrent request to an origin; connections are kept alive.

    httpx's timeouts are ignored: the caller bounds a request. When a file of `tls` has changed, new connections use it.
    """

    def __init__(self, tls: TlsFiles = TlsFiles()) -> None:  # noqa: B008 - frozen
        super().__init__(
            verify=client_context(tls),
            limits=httpx.Limits(keepalive_expiry=KEEP_SECONDS),  # as many connections as requests
            socket_options=_KEEP_ALIVE,
        )

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request; the response's body is streamed. Raises httpx.TransportError and its children."""
        request.extensions = {**request.extensions, "timeout": {"connect": CONNECT_SECONDS}}
        if parts := request.extensions.get(BODY_EXTENSION):
            request.headers["content-length"] = str(sum(map(len, parts)))
            request.stream = _Body(parts)
        return await super().handle_async_request(request)


class _Body(httpx.AsyncByteStream):
    """A body in parts, because httpcore copies each, and asyncio copies what the kernel does not take at once."""

    def __init__(self, parts: Sequence[memoryview]) -> None:
        self._parts = parts

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for part in self._parts:
            for begin in range(0, len(part), CHUNK_BYTES):
                yield bytes(part[begin : begin + CHUNK_BYTES])
