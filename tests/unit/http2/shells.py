"""The client as a transport of httpx.AsyncClient."""

from __future__ import annotations

import asyncio

import httpx

from ps_config.certificates import TlsFiles
from ps_http2.client_connection import BODY_EXTENSION, SINK_EXTENSION, read_headers
from ps_http2.polled_client import Call, PolledTransport


class PolledOnLoop(httpx.AsyncBaseTransport):
    """A PolledTransport that a task of each request polls; nothing is sent or received between requests."""

    def __init__(self, tls: TlsFiles = TlsFiles(), local: str | None = None) -> None:  # noqa: B008 - frozen
        self.polled = PolledTransport(tls)
        self._local = local
        self._origins = self.polled._origins

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        head = request.method, str(request.url), read_headers(request)
        body = request.extensions.get(BODY_EXTENSION) or (await request.aread(),)
        call = self.polled.begin(*head, body, request.extensions.get(SINK_EXTENSION), local=self._local)
        try:
            await self.poll_until(call)
        except asyncio.CancelledError:
            call.cancel()
            raise
        return call.finish()

    async def poll_until(self, call: Call) -> None:
        """Send and receive until the call is done."""
        while not call.is_done:
            self.polled.wait(0)
            await asyncio.sleep(0.001)

    async def aclose(self) -> None:
        self.polled.close()
