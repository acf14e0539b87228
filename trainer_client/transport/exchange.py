"""Requests of httpx, given straight to a transport: httpx's own client would take longer than a small request does."""

from __future__ import annotations

from collections.abc import Mapping

import httpx

from ps_config.certificates import TlsFiles
from ps_config.tokens import TokenPair
from ps_http2.stream import Sink

from ..pushing.buckets import Payload
from .connections import make_bulk_transport
from .extensions import BODY_EXTENSION, SINK_EXTENSION


class Exchange:
    """Sends a token with every request; if that is refused, the one that it replaced (as `BearerAuth`).

    One with `local` is for the pserver of that Unix socket alone.
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
        body: Payload = (),
        sink: Sink | None = None,
    ) -> httpx.Response:
        """Send a request; the answer's body is still to come, and the answer has to be closed.

        Neither the body nor what a good answer lands in may be touched until then. Raises httpx.TransportError.
        """
        extensions = {BODY_EXTENSION: body, SINK_EXTENSION: sink}
        response: httpx.Response | None = None
        for token in [None] if self._tokens is None else self._tokens.read():
            if response is not None:
                await response.aclose()  # that request would go on to read the body
            authorization = {} if token is None else {"authorization": f"Bearer {token}"}
            request = httpx.Request(method, url, headers={**headers, **authorization}, extensions=extensions)
            response = await self._transport.handle_async_request(request)
            response.request = request
            if response.status_code != httpx.codes.UNAUTHORIZED:
                break
        assert response is not None  # there is a token, or reading it has raised
        return response

    async def send(
        self,
        method: str,
        url: httpx.URL,
        headers: Mapping[str, str],
        *,
        body: Payload = (),
    ) -> httpx.Response:
        """The same with an answer that is small, and whole."""
        response = await self.begin(method, url, headers, body=body)
        try:
            await response.aread()
        finally:
            await response.aclose()
        return response

    async def aclose(self) -> None:
        """Close all connections."""
        await self._transport.aclose()
