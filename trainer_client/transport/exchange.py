"""Requests without httpx's client, whose overhead exceeds the time of a small request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import httpx

from ps_config.certificates import TlsFiles
from ps_config.tokens import TokenPair
from ps_http2.client import BODY_EXTENSION, SINK_EXTENSION, Http2Transport
from ps_http2.stream import Sink

from .http1 import Http1Transport


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

    async def begin(
        self,
        method: str,
        url: httpx.URL,
        headers: Mapping[str, str],
        *,
        body: Sequence[memoryview] = (),
        sink: Sink | None = None,
    ) -> httpx.Response:
        """Send a request and return its response, which the caller has to close.

        Until then neither `body` nor the memory of `sink` may be touched. Raises httpx.TransportError.
        """
        extensions = {BODY_EXTENSION: body, SINK_EXTENSION: sink}
        response: httpx.Response | None = None
        for token in [None] if self._tokens is None else self._tokens.read():
            if response is not None:
                await response.aclose()  # or that request would still read the body
            authorization = {} if token is None else {"authorization": f"Bearer {token}"}
            request = httpx.Request(method, url, headers={**headers, **authorization}, extensions=extensions)
            response = await self._transport.handle_async_request(request)
            response.request = request
            if response.status_code != httpx.codes.UNAUTHORIZED:
                break
        assert response is not None  # TokenPair.read returns a token or raises
        return response

    async def send(
        self,
        method: str,
        url: httpx.URL,
        headers: Mapping[str, str],
        *,
        body: Sequence[memoryview] = (),
    ) -> httpx.Response:
        """Send a request and return its response with the whole body, which is small. Raises httpx.TransportError."""
        response = await self.begin(method, url, headers, body=body)
        try:
            await response.aread()
        finally:
            await response.aclose()
        return response

    async def aclose(self) -> None:
        """Close all connections."""
        await self._transport.aclose()
