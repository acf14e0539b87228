"""An httpx transport over HTTP/2 for large bodies, sent from the caller's memory and received straight into it.

httpx's own HTTP/2 copies each body several times; here the kernel reads and writes the tensors.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from typing import NamedTuple, TypeAlias
from urllib.parse import urlsplit
from weakref import WeakSet

import httpx
from typing_extensions import override

from ps_config.certificates import TlsFiles, WatchedFiles, client_context

from . import frames
from .connection import Connection
from .frames import PREFACE, ErrorCode
from .local_sockets import connect_locally
from .stream import BodyReader, Headers, Sink, Stream, StreamResetError, content_length

# Extensions of a request, and of a response.
BODY_EXTENSION = "gradpost_body"  # memoryviews to be sent in this order, unchanged until the response is closed
SINK_EXTENSION = "gradpost_sink"  # a `Sink` for the body of a 200 response; other bodies are read as usual
LOCAL_EXTENSION = "gradpost_local"  # whether a response came over a Unix socket
BODY_READER_EXTENSION = "gradpost_body_reader"  # the `ResponseBody` of a response

CONNECT_SECONDS = 5.0
PING_SECONDS = 5.0
STREAM_WINDOW = 1 << 30  # each body has a destination

_Failure: TypeAlias = tuple[type[httpx.TransportError], str]

_HTTP1_HEADERS = frozenset({b"host", b"connection", b"transfer-encoding", b"keep-alive", b"content-length"})


class Http2Transport(httpx.AsyncBaseTransport):
    """One connection to each origin, with prior knowledge, or by ALPN under TLS.

    httpx's timeouts are ignored: the caller bounds a request, and pings detect dead peers. When a file of `tls` has
    changed, further requests use new connections.

    With `local`, the name of a Unix socket, the transport serves the one origin that listens there. Each new connection
    is tried there first, and made over TCP if the origin is on another host or uses TLS.
    """

    def __init__(
        self,
        tls: TlsFiles = TlsFiles(),  # noqa: B008 - frozen
        local: str | None = None,
        *,
        window: int = STREAM_WINDOW,
    ) -> None:
        """A smaller `window` makes each sender wait until its body is read: see `BodyReader`."""
        self._origins: dict[str, _Origin] = {}
        self._tls = tls
        self._local = local
        self._window = window

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request and wait for the headers of its response. Raises httpx.TransportError and its children."""
        body = request.extensions.get(BODY_EXTENSION)
        if body is None:
            body = (await request.aread(),)
        headers = [(n.lower(), v) for n, v in request.headers.raw if n.lower() not in _HTTP1_HEADERS]
        sink = request.extensions.get(SINK_EXTENSION)
        return await self.send(request.method, str(request.url), headers, body, sink)

    async def send(
        self, method: str, url: str, headers: Headers, body: Sequence[memoryview | bytes] = (), sink: Sink | None = None
    ) -> httpx.Response:
        """Send a request as `handle_async_request` does, without the cost of an httpx.Request.

        The names of `headers` are in lower case. Body and sink are those of the extensions.
        """
        num_bytes = sum(map(len, body))
        target = _parse_target(method, url)
        origin = self._origins.get(target.origin)
        if origin is None:
            origin = self._origins[target.origin] = _Origin(target.origin, self._tls, self._local, self._window)
        headers = [*target.headers, *headers]
        if num_bytes or method in ("POST", "PUT"):
            headers.append((b"content-length", b"%d" % num_bytes))
        try:
            connection = await origin.connect()
            stream = await connection.open_stream(sink)
        except StreamResetError as error:
            raise _to_httpx_error(error) from error
        try:
            stream.send_headers(headers, end_stream=not num_bytes)
            stream.send_nowait(*body)
            while stream.headers is None:
                await stream.wait_for_change()
        except BaseException as error:
            stream.close()
            if isinstance(error, StreamResetError):
                raise _to_httpx_error(error) from error
            raise
        response_body = ResponseBody(stream)
        [status] = [value for name, value in stream.headers if name == b":status"]
        return httpx.Response(
            int(status),
            headers=[header for header in stream.headers if header[0] != b":status"],
            stream=response_body,
            extensions={
                "http_version": b"HTTP/2",
                LOCAL_EXTENSION: connection.is_local,
                BODY_READER_EXTENSION: response_body,
            },
        )

    async def aclose(self) -> None:
        """Close all connections."""
        for origin in self._origins.values():
            origin.close()
        await asyncio.sleep(0)  # asyncio closes aborted transports in the loop's next turn, which may be its last


class ResponseBody(httpx.AsyncByteStream):
    """The body of a response, empty if a sink receives it. Closing it releases the memory of request body and sink.

    Its methods raise httpx.TransportError.
    """

    def __init__(self, stream: Stream) -> None:
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
            raise _to_httpx_error(error) from error

    async def read_into(self, buffer: memoryview, seconds: float) -> tuple[int, bool]:
        """Receive the next bytes, without a copy: see `BodyReader.read_into`."""
        assert self._reader is not None
        try:
            return await self._reader.read_into(buffer, seconds)
        except StreamResetError as error:
            raise _to_httpx_error(error) from error

    @override
    async def aclose(self) -> None:
        self._stream.close()


class _Origin:
    """A server, and the connection to it."""

    def __init__(self, name: str, tls: TlsFiles, local: str | None, window: int) -> None:
        url = urlsplit(name)
        self._host, self._port = url.hostname or "", url.port or (443 if url.scheme == "https" else 80)
        self._is_secure = url.scheme == "https"
        self._local = None if self._is_secure else local  # a Unix socket has no certificate
        self._tls = tls
        self._make_connection = partial(ClientConnection, window)
        self._files = WatchedFiles(tls.paths)
        self._context: ssl.SSLContext | None = None
        self._connection: ClientConnection | None = None
        self._connections: WeakSet[ClientConnection] = WeakSet()  # including replaced ones
        self._connecting: asyncio.Task[ClientConnection | _Failure] | None = None

    async def connect(self) -> ClientConnection:
        """Return the connection, or a new one for which all requests wait.

        Raises httpx.ConnectError and httpx.ConnectTimeout.
        """
        if (connection := self._usable()) is not None:
            return connection
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._connect(), name=f"connect to {self._host}:{self._port}")
            self._connecting.add_done_callback(self._connect_done)
        outcome = await asyncio.shield(self._connecting)
        if isinstance(outcome, ClientConnection):
            return outcome
        error_type, text = outcome
        raise error_type(text)

    async def _connect(self) -> ClientConnection | _Failure:
        """Return a failure as a value: an exception that several requests raise would refer to all their bodies."""
        try:
            connection = await self._connect_locally() or await self._connect_over_tcp()
        except TimeoutError:
            return httpx.ConnectTimeout, f"no connection within {CONNECT_SECONDS:g} s"
        except OSError as error:
            return httpx.ConnectError, str(error)
        except asyncio.CancelledError:
            return httpx.ConnectError, "closed while it was connecting"
        self._connection = connection
        self._connections.add(connection)
        return connection

    def _connect_done(self, task: asyncio.Task[ClientConnection | _Failure]) -> None:
        self._connecting = None
        if not task.cancelled():
            task.exception()  # retrieved, since all waiting requests may have been cancelled

    async def _connect_locally(self) -> ClientConnection | None:
        if self._local is None:
            return None
        with suppress(OSError):  # the socket is on another host, or gone
            connected = connect_locally(self._local)
            loop = asyncio.get_running_loop()
            _, connection = await loop.create_unix_connection(self._make_connection, sock=connected)
            connection.is_local = True
            return connection
        return None

    async def _connect_over_tcp(self) -> ClientConnection:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_SECONDS):
            transport, connection = await loop.create_connection(
                self._make_connection, self._host, self._port, ssl=self._make_context()
            )
        if self._is_secure and transport.get_extra_info("ssl_object").selected_alpn_protocol() != "h2":
            transport.abort()
            raise ConnectionError("the server does not speak HTTP/2")
        return connection

    def close(self) -> None:
        """Abort all connections and their requests."""
        if self._connecting is not None:
            self._connecting.cancel()
        for connection in [*self._connections]:
            connection.close()

    def _usable(self) -> ClientConnection | None:
        connection = self._connection
        if connection is None or connection.is_closing:
            return None
        if connection.must_check_files and self._is_secure:
            connection.must_check_files = False
            if self._files.have_changed():
                self._connection = None  # the context reloads the files by itself
                connection.go_away()  # its requests are finished there
                return None
        return connection

    def _make_context(self) -> ssl.SSLContext | None:
        if self._is_secure and self._context is None:
            self._context = client_context(self._tls)
            self._context.set_alpn_protocols(["h2"])
        return self._context


class ClientConnection(Connection):
    """The client's end: opens streams, as many at once as the server allows, and detects a dead server by pings."""

    preface = PREFACE

    def __init__(self, window: int = STREAM_WINDOW) -> None:
        super().__init__({frames.ENABLE_PUSH: 0}, window)
        self.keeps_windows_full = window == STREAM_WINDOW
        self.is_local = False  # over a Unix socket
        self.must_check_files = False  # of TLS; set periodically
        self._stream_may_open = asyncio.Event()
        self._seen_bytes = 0
        self._num_pings = 0  # unanswered, in a row
        self._timer: asyncio.TimerHandle | None = None

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._timer = asyncio.get_running_loop().call_later(PING_SECONDS, self._check_liveness)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)
        self._stream_may_open.set()

    async def open_stream(self, sink: Sink | None) -> Stream:
        """Wait until the server accepts another stream, and return it. The body of a 200 response goes to `sink`.

        Raises StreamResetError if the connection accepts no more.
        """
        while len(self.streams) >= self.peer_max_streams and not self.is_closing:
            self._stream_may_open.clear()
            await self._stream_may_open.wait()
        if self.is_closing:
            raise StreamResetError(ErrorCode.REFUSED_STREAM, "the connection accepts no more requests")
        stream = self.new_stream(self.highest_stream + 2 if self.highest_stream else 1)
        stream.sink = sink
        self.streams[stream.stream_id] = stream
        if stream.stream_id > frames.MAX_WINDOW - 2:
            self.is_closing = True  # the identifiers are used up
        return stream

    @override
    def stream_requested(self, stream_id: int) -> Stream | None:
        self.check_not_idle(stream_id)
        return None  # discards late headers of a closed stream

    @override
    def headers_received(self, stream: Stream, headers: Headers) -> None:
        found = [value for name, value in headers if name == b":status"]
        if len(found) != 1 or not (found[0].isdigit() and len(found[0]) == 3):
            self.stream_error(stream, ErrorCode.PROTOCOL_ERROR, "a response without a status")
            return
        if found[0][:1] == b"1":  # an interim response
            if stream.is_remote_closed:
                self.stream_error(stream, ErrorCode.PROTOCOL_ERROR, "an interim response with END_STREAM")
            return
        if not stream.is_remote_closed:  # else it may be the length for a HEAD
            try:
                stream.expected_bytes = content_length(headers)
            except ValueError as error:
                self.stream_error(stream, ErrorCode.PROTOCOL_ERROR, str(error))
                return
        if stream.sink is None or found[0] != b"200":
            stream.sink = BodyReader(stream)
        stream.headers = headers
        stream.notify()

    @override
    def goaway_received(self, last_stream_id: int) -> None:
        self.is_closing = True
        for stream in [stream for stream in self.streams.values() if stream.stream_id > last_stream_id]:
            text = "the server closes the connection and has not processed this request"
            self.remove_stream(stream, StreamResetError(ErrorCode.REFUSED_STREAM, text))
        self._stream_may_open.set()

    @override
    def stream_closed(self, stream: Stream) -> None:
        self._stream_may_open.set()

    @override
    def settings_received(self) -> None:
        self._stream_may_open.set()

    def close(self) -> None:
        """Abort the connection and its requests."""
        self._transport.abort()

    def _check_liveness(self) -> None:
        self.must_check_files = True
        if self.received_bytes != self._seen_bytes:
            self._seen_bytes, self._num_pings = self.received_bytes, 0
        elif self._num_pings == 2:
            self._transport.abort()
            self.connection_lost(TimeoutError(f"the server sent nothing for {3 * PING_SECONDS:g} s"))
            return
        else:
            self._num_pings += 1
            self.ping()
        self._timer = asyncio.get_running_loop().call_later(PING_SECONDS, self._check_liveness)


class _Target(NamedTuple):
    """The origin of requests to a URL, and the headers that name it."""

    origin: str
    headers: Headers


@lru_cache(maxsize=1024)
def _parse_target(method: str, text: str) -> _Target:
    url = httpx.URL(text)
    headers = [
        (b":method", method.encode("ascii")),
        (b":scheme", url.raw_scheme),
        (b":authority", url.netloc),
        (b":path", url.raw_path),
    ]
    return _Target(f"{url.scheme}://{url.netloc.decode('ascii')}", headers)


def _to_httpx_error(error: StreamResetError) -> Exception:
    """Return the exception of a sink as it was raised, and an httpx.TransportError for anything else."""
    if error.__cause__ is not None:
        return error.__cause__ if isinstance(error.__cause__, Exception) else error
    error_type = httpx.ConnectError if error.code == ErrorCode.REFUSED_STREAM else httpx.ReadError
    return error_type(str(error))
