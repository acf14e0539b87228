"""An httpx transport over HTTP/2 for large bodies, sent from the caller's memory and received straight into it.

httpx's own HTTP/2 copies each body several times; here the kernel reads and writes the tensors.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import TypeAlias
from weakref import WeakSet

import httpx
from typing_extensions import override

from ps_config.certificates import TlsFiles

from .asyncio_shell import AsyncConnection, AsyncStream, BodyReader
from .client_connection import (
    BODY_EXTENSION,
    CONNECT_SECONDS,
    PING_SECONDS,
    SINK_EXTENSION,
    STREAM_WINDOW,
    ClientConnection,
    Origin,
    Request,
    make_response,
    read_headers,
    to_httpx_error,
)
from .stream import Headers, Sink, Stream, StreamResetError

BODY_READER_EXTENSION = "gradpost_body_reader"  # the `ResponseBody` of a response

_Failure: TypeAlias = tuple[type[httpx.TransportError], str]


class Http2Transport(httpx.AsyncBaseTransport):
    """One connection to each origin, with prior knowledge, or by ALPN under TLS.

    httpx's timeouts are ignored: the caller bounds a request, and pings detect dead peers. When a file of `tls` has
    changed, further requests use new connections.
    """

    def __init__(
        self,
        tls: TlsFiles = TlsFiles(),  # noqa: B008 - frozen
        *,
        window: int = STREAM_WINDOW,
    ) -> None:
        """A smaller `window` makes each sender wait until its body is read: see `BodyReader`."""
        self._origins: dict[str, _AsyncOrigin] = {}
        self._tls = tls
        self._window = window

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request and wait for the headers of its response. Raises httpx.TransportError and its children."""
        body = request.extensions.get(BODY_EXTENSION)
        if body is None:
            body = (await request.aread(),)
        sink = request.extensions.get(SINK_EXTENSION)
        return await self.send(request.method, str(request.url), read_headers(request), body, sink)

    async def send(
        self, method: str, url: str, headers: Headers, body: Sequence[memoryview | bytes] = (), sink: Sink | None = None
    ) -> httpx.Response:
        """Send a request as `handle_async_request` does, without the cost of an httpx.Request.

        The names of `headers` are in lower case. Body and sink are those of the extensions.
        """
        request = Request.make(method, url, headers, body)
        origin = self._origins.get(request.origin)
        if origin is None:
            origin = _AsyncOrigin(request.origin, self._tls, self._window)
            self._origins[request.origin] = origin
        stream: Stream | None = None
        try:
            connection = await origin.connect()
            await connection.wait_until_open()
            stream = connection.open_stream(request, sink)
            assert isinstance(stream, AsyncStream)
            while stream.headers is None:
                await stream.wait_for_change()
        except BaseException as error:
            if stream is not None:
                stream.close()
            if isinstance(error, StreamResetError):
                raise to_httpx_error(error) from error
            raise
        response_body = ResponseBody(stream)
        return make_response(stream, response_body, **{BODY_READER_EXTENSION: response_body})

    async def aclose(self) -> None:
        """Close all connections."""
        for origin in self._origins.values():
            origin.close()
        await asyncio.sleep(0)  # asyncio closes aborted transports in the loop's next turn, which may be its last


class ResponseBody(httpx.AsyncByteStream):
    """The body of a response, empty if a sink receives it. Closing it releases the memory of request body and sink.

    Its methods raise httpx.TransportError.
    """

    def __init__(self, stream: AsyncStream) -> None:
        self._stream = stream
        self._reader = stream.sink if isinstance(stream.sink, BodyReader) else None

    async def __aiter__(self) -> AsyncIterator[bytes]:
        has_more = True
        while has_more:
            data, has_more = await self.read()
            yield data

    async def read(self) -> tuple[bytes, bool]:
        """Return the next bytes, none if a sink receives them, and True if more may follow."""
        try:
            if self._reader is not None:
                return await self._reader.read()
            while not self._stream.is_remote_closed:
                await self._stream.wait_for_change()
            return b"", False
        except StreamResetError as error:
            raise to_httpx_error(error) from error

    async def read_into(self, buffer: memoryview, seconds: float) -> tuple[int, bool]:
        """Receive the next bytes, without a copy: see `BodyReader.read_into`."""
        assert self._reader is not None
        try:
            return await self._reader.read_into(buffer, seconds)
        except StreamResetError as error:
            raise to_httpx_error(error) from error

    @override
    async def aclose(self) -> None:
        self._stream.close()


class _AsyncOrigin(Origin):
    """A server, and the connection to it."""

    def __init__(self, name: str, tls: TlsFiles, window: int) -> None:
        super().__init__(name, tls)
        self._make_connection = partial(AsyncClientConnection, window)
        self._connection: AsyncClientConnection | None = None
        self._connecting: asyncio.Task[AsyncClientConnection | _Failure] | None = None
        self._connections: WeakSet[AsyncClientConnection] = WeakSet()  # including replaced ones

    async def connect(self) -> AsyncClientConnection:
        """Return the connection, or a new one for which all requests wait.

        Raises httpx.ConnectError and httpx.ConnectTimeout.
        """
        if self._connection is not None and self.is_usable(self._connection):
            return self._connection
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._connect(), name=f"connect to {self.host}:{self.port}")
            self._connecting.add_done_callback(self._connect_done)
        outcome = await asyncio.shield(self._connecting)
        if isinstance(outcome, AsyncClientConnection):
            return outcome
        error_type, text = outcome
        raise error_type(text)

    async def _connect(self) -> AsyncClientConnection | _Failure:
        """Return a failure as a value: an exception that several requests raise would refer to all their bodies."""
        try:
            connection = await self._connect_over_tcp()
        except TimeoutError:
            return httpx.ConnectTimeout, f"no connection within {CONNECT_SECONDS:g} s"
        except OSError as error:
            return httpx.ConnectError, str(error)
        except asyncio.CancelledError:
            return httpx.ConnectError, "closed while it was connecting"
        self._connection = connection
        self._connections.add(connection)
        return connection

    def _connect_done(self, task: asyncio.Task[AsyncClientConnection | _Failure]) -> None:
        self._connecting = None
        if not task.cancelled():
            task.exception()  # retrieved, since all waiting requests may have been cancelled

    async def _connect_over_tcp(self) -> AsyncClientConnection:
        loop, context = asyncio.get_running_loop(), self.make_context() if self.is_secure else None
        async with asyncio.timeout(CONNECT_SECONDS):
            transport, connection = await loop.create_connection(
                self._make_connection, self.host, self.port, ssl=context
            )
        if self.is_secure and transport.get_extra_info("ssl_object").selected_alpn_protocol() != "h2":
            transport.abort()
            raise ConnectionError("the server does not speak HTTP/2")
        return connection

    def close(self) -> None:
        """Abort all connections and their requests."""
        if self._connecting is not None:
            self._connecting.cancel()
        for connection in [*self._connections]:
            connection.close()


class AsyncClientConnection(AsyncConnection, ClientConnection):
    """The client's end on asyncio."""

    def __init__(self, window: int = STREAM_WINDOW) -> None:
        super().__init__(window)
        self._has_changed = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    async def wait_until_open(self) -> None:
        """Wait until a stream may be opened, or none ever will be."""
        while not self.may_open_stream:
            self._has_changed.clear()
            await self._has_changed.wait()

    @override
    def make_body(self, stream: Stream) -> Sink:
        assert isinstance(stream, AsyncStream)
        return BodyReader(stream)

    @override
    def begin(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().begin(transport)
        self._timer = asyncio.get_running_loop().call_later(PING_SECONDS, self._check_liveness)

    def _check_liveness(self) -> None:
        if self.check_liveness():
            self._timer = asyncio.get_running_loop().call_later(PING_SECONDS, self._check_liveness)

    @override
    def end(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().end(exc)
        self._has_changed.set()

    @override
    def goaway_received(self, last_stream_id: int) -> None:
        super().goaway_received(last_stream_id)
        self._has_changed.set()

    @override
    def stream_closed(self, stream: Stream) -> None:
        self._has_changed.set()

    @override
    def settings_received(self) -> None:
        self._has_changed.set()
