"""Requests of tensors over HTTP/2 or HTTP/1.1.

They do without httpx's client, whose overhead exceeds the time of a small request.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncIterable, AsyncIterator, Mapping, Sequence

import httpx

from ps_config.certificates import TlsFiles, client_context
from ps_config.control_client import ControlTransport, may_be_problem
from ps_config.tokens import TokenPair
from ps_http2.client import BODY_EXTENSION, SINK_EXTENSION, Http2Transport
from ps_http2.stream import Sink

CHUNK_BYTES = 1024 * 1024
CONNECT_SECONDS = 5.0
PROBE_SECONDS = 5  # between TCP's own probes of a silent connection
KEEP_SECONDS = 60.0  # services close a connection after 75 s without a request

_INTERVALS = [getattr(socket, name) for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL") if hasattr(socket, name)]
_KEEP_ALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *((socket.IPPROTO_TCP, option, PROBE_SECONDS) for option in _INTERVALS),
]


def make_bulk_transport(tls: TlsFiles, *, http2: bool, local: str | None = None) -> httpx.AsyncBaseTransport:
    """Return a transport for tensors; with `local` (HTTP/2 only) for the pserver that listens on this Unix socket."""
    return Http2Transport(tls, local) if http2 else Http1Transport(tls)


def make_bulk_client(tls: TlsFiles, auth: httpx.Auth | None, *, http2: bool) -> httpx.AsyncClient:
    """Return an httpx client over such a transport, where its overhead does not matter."""
    transport = make_bulk_transport(tls, http2=http2)
    return httpx.AsyncClient(transport=transport, auth=auth, timeout=None, trust_env=False)


class Exchange:
    """A transport with a bearer token. If the token is refused, its predecessor is sent (as `BearerAuth` does).

    With `local`, requests go to the pserver that listens on this Unix socket.
    """

    def __init__(self, tls: TlsFiles, tokens: TokenPair | None, *, http2: bool, local: str | None = None) -> None:
        self._transport = make_bulk_transport(tls, http2=http2, local=local)
        self._tokens = tokens

    async def begin_request(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        *,
        body: Sequence[memoryview] = (),
        sink: Sink | None = None,
    ) -> httpx.Response:
        """Send a request and return its response, which the caller has to close.

        The names of `headers` are in lower case. Until then neither `body` nor the memory of `sink` may be touched.
        Raises httpx.TransportError.
        """
        response: httpx.Response | None = None
        for token in [None] if self._tokens is None else self._tokens.read():
            if response is not None:
                await response.aclose()  # else that request would still read the body
            authorization = {} if token is None else {"authorization": f"Bearer {token}"}
            response = await self._send(method, url, {**headers, **authorization}, body, sink)
            if response.status_code != httpx.codes.UNAUTHORIZED:
                break
        assert response is not None  # TokenPair.read returns a token or raises
        return response

    async def _send(
        self, method: str, url: str, headers: Mapping[str, str], body: Sequence[memoryview], sink: Sink | None
    ) -> httpx.Response:
        if isinstance(self._transport, Http2Transport):
            raw = [(name.encode("ascii"), value.encode("ascii")) for name, value in headers.items()]
            response = await self._transport.send(method, url, raw, body, sink)
            if not may_be_problem(response):
                return response
        extensions = {BODY_EXTENSION: body, SINK_EXTENSION: sink}
        request = httpx.Request(method, url, headers=headers, extensions=extensions)
        if not isinstance(self._transport, Http2Transport):
            response = await self._transport.handle_async_request(request)
        response.request = request
        return response

    async def send(
        self, method: str, url: str, headers: Mapping[str, str], *, body: Sequence[memoryview] = ()
    ) -> tuple[httpx.Response, bytes]:
        """Send a request and return its response, and its body, which is small. Raises httpx.TransportError."""
        response = await self.begin_request(method, url, headers, body=body)
        try:
            if may_be_problem(response):
                return response, await response.aread()
            return response, b"".join([part async for part in raw_parts(response)])
        finally:
            await response.aclose()

    async def aclose(self) -> None:
        """Close all connections."""
        await self._transport.aclose()


def raw_parts(response: httpx.Response) -> AsyncIterable[bytes]:
    """Return the parts of a response's body as they are received, without the cost of httpx's decoders."""
    assert isinstance(response.stream, httpx.AsyncByteStream)
    return response.stream


class Http1Transport(ControlTransport):
    """A connection for each concurrent request to an origin; connections are kept alive.

    httpx's timeouts are ignored: the caller bounds a request. When a file of `tls` has changed, new connections use it.
    """

    def __init__(self, tls: TlsFiles = TlsFiles()) -> None:  # noqa: B008 - frozen
        super().__init__(
            verify=client_context(tls),
            limits=httpx.Limits(keepalive_expiry=KEEP_SECONDS),  # the number of connections has no limit
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
