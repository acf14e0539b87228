"""What carries large bodies over HTTP/1.1, where there is no HTTP/2: hyper through pyreqwest.

httpx stays the API; this transport sends a body from one memoryview without a copy and hands out reply chunks as they
come from the socket.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import timedelta
from time import monotonic

import httpx
from pyreqwest import exceptions
from pyreqwest.client import Client, ClientBuilder
from pyreqwest.response import Response

from ps_protocol.certificates import TlsFiles, WatchedFiles

from .extensions import BODY_EXTENSION

CHUNK_BYTES = 1024 * 1024
CONNECT_SECONDS = 5
PING_SECONDS = 5
CHECK_SECONDS = 1.0

# Most specific first; every other error of pyreqwest becomes httpx.TransportError.
_ERRORS: tuple[tuple[type[exceptions.PyreqwestError], type[httpx.TransportError]], ...] = (
    (exceptions.ConnectTimeoutError, httpx.ConnectTimeout),
    (exceptions.ReadTimeoutError, httpx.ReadTimeout),
    (exceptions.WriteTimeoutError, httpx.WriteTimeout),
    (exceptions.PoolTimeoutError, httpx.PoolTimeout),
    (exceptions.RequestTimeoutError, httpx.TimeoutException),
    (exceptions.ConnectError, httpx.ConnectError),
    (exceptions.ReadError, httpx.ReadError),
    (exceptions.WriteError, httpx.WriteError),
    (exceptions.NetworkError, httpx.NetworkError),
    (exceptions.PyreqwestError, httpx.TransportError),
)


class Http1Transport(httpx.AsyncBaseTransport):
    """A connection for each request to an origin that is under way; they are kept.

    Ignores httpx's timeouts: a bulk request is bounded by its caller, and dead peers are found by pings. When a file
    of `tls` has changed, what is sent from then on goes over new connections.
    """

    def __init__(self, tls: TlsFiles = TlsFiles()) -> None:  # noqa: B008 - frozen
        self._tls = tls
        self._files = WatchedFiles(tls.paths)
        self._next_check = monotonic() + CHECK_SECONDS
        self._client = _build_client(tls)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send one request; the reply's body is streamed. Raises httpx.TransportError and its children."""
        parts = request.extensions.get(BODY_EXTENSION)
        headers = [(k, v) for k, v in request.headers.multi_items() if k not in ("content-length", "host")]
        if self._tls.paths and monotonic() >= self._next_check:
            self._renew()
        builder = self._client.request(request.method, str(request.url)).headers(headers)
        builder = builder.body_bytes(await request.aread() if parts is None else _join(parts))
        pending = builder.build_streamed()
        try:
            reply = await pending.__aenter__()
        except exceptions.PyreqwestError as error:
            raise map_error(error, request) from error
        return httpx.Response(
            reply.status, headers=list(reply.headers.items()), stream=_ReplyStream(pending, reply, request)
        )

    async def aclose(self) -> None:
        """Close all connections."""
        await self._client.close()

    def _renew(self) -> None:
        self._next_check = monotonic() + CHECK_SECONDS
        if self._files.have_changed():
            try:
                # Requests that are on their way keep the old one, and its connections, until they end.
                self._client = _build_client(self._tls)
            except (OSError, ValueError, exceptions.PyreqwestError):
                self._files.forget()  # half replaced: look again


class _ReplyStream(httpx.AsyncByteStream):
    """Chunks of a reply as bytes-like objects, valid until the next one is asked for."""

    def __init__(self, pending: AbstractAsyncContextManager[Response], reply: Response, request: httpx.Request) -> None:
        self._pending, self._reply, self._request = pending, reply, request

    async def __aiter__(self) -> AsyncIterator[bytes]:
        read = self._reply.body_reader.read
        try:
            while (chunk := await read(CHUNK_BYTES)) is not None:
                yield chunk  # type: ignore[misc]  # a buffer, not bytes: saves a copy, and httpx passes it on as it is
        except exceptions.PyreqwestError as error:
            raise map_error(error, self._request) from error

    async def aclose(self) -> None:
        await self._pending.__aexit__(None, None, None)


def _join(parts: Sequence[memoryview]) -> memoryview | bytes:
    return parts[0] if len(parts) == 1 else b"".join(parts)


def map_error(error: exceptions.PyreqwestError, request: httpx.Request) -> httpx.TransportError:
    """The httpx exception that stands for a pyreqwest one."""
    for theirs, ours in _ERRORS:
        if isinstance(error, theirs):
            return ours(error.message, request=request)
    raise AssertionError  # the last row is the base class


def _build_client(tls: TlsFiles) -> Client:
    builder = (
        ClientBuilder()
        .http1_only()
        .no_proxy()  # cluster traffic never goes through a proxy that happens to be set
        .follow_redirects(False)
        .connect_timeout(timedelta(seconds=CONNECT_SECONDS))
        .tcp_nodelay(True)
        .tcp_keepalive(timedelta(seconds=PING_SECONDS))
    )
    if tls.ca is not None:
        builder = builder.add_root_certificate_pem(tls.ca.read_bytes())
    if tls.cert is not None and tls.key is not None:
        builder = builder.identity_pem(tls.cert.read_bytes() + b"\n" + tls.key.read_bytes())
    return builder.build()
