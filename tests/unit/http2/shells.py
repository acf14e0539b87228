"""Both shells of the client as transports of httpx.AsyncClient."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeAlias, TypeVar

import httpx

from ps_config.certificates import TlsFiles
from ps_http2.client import Http2Transport
from ps_http2.client_connection import BODY_EXTENSION, SINK_EXTENSION, read_headers
from ps_http2.polled_client import Call, PolledTransport

T = TypeVar("T")


class PolledInThread(httpx.AsyncBaseTransport):
    """A PolledTransport on a thread of its own, which other threads wake."""

    def __init__(self, tls: TlsFiles = TlsFiles(), local: str | None = None) -> None:  # noqa: B008 - frozen
        self.polled = PolledTransport(tls)
        self._local = local
        self._origins = self.polled._origins
        self._work: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._calls: dict[Call, Future[httpx.Response]] = {}
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        is_open = True
        while is_open:
            while not self._work.empty():
                self._work.get()()
            for call in [call for call in self._calls if call.is_done]:
                answered = self._calls.pop(call)
                try:
                    answered.set_result(call.finish())
                except Exception as error:
                    answered.set_exception(error)
            is_open = self.polled._selector.get_map() is not None
            if is_open:
                self.polled.wait(5)

    def _run(self, work: Callable[[], T]) -> Future[T]:
        """Run work on the thread."""
        ended: Future[T] = Future()

        def run() -> None:
            try:
                ended.set_result(work())
            except BaseException as error:
                ended.set_exception(error)

        self._work.put(run)
        self.polled.wake()
        return ended

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = request.extensions.get(BODY_EXTENSION) or (await request.aread(),)
        answered: Future[httpx.Response] = Future()

        def begin() -> Call:
            sink = request.extensions.get(SINK_EXTENSION)
            head = request.method, str(request.url), read_headers(request)
            call = self.polled.begin(*head, body, sink, local=self._local)
            self._calls[call] = answered
            return call

        call = await asyncio.wrap_future(self._run(begin))
        try:
            return await asyncio.wrap_future(answered)
        except asyncio.CancelledError:
            await asyncio.wrap_future(self._run(lambda: (call.cancel(), self._calls.pop(call, None))))
            raise

    async def aclose(self) -> None:
        if self._thread.is_alive():
            await asyncio.wrap_future(self._run(self.polled.close))
            await asyncio.to_thread(self._thread.join)


Shell: TypeAlias = Callable[..., Any]
SHELLS = {"asyncio": Http2Transport, "polled": PolledInThread}
