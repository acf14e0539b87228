"""An httpx transport over HTTP/2 for large bodies: sent from the caller's memory, and received straight into it.

httpx stays the API. Its own HTTP/2 copies each body several times; here the kernel reads and writes the tensors.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import TypeAlias
from urllib.parse import urlsplit
from weakref import WeakSet

import httpx

from ps_config.certificates import TlsFiles, WatchedFiles, client_context

from . import frames
from .connection import Connection
from .frames import PREFACE, Code
from .local_sockets import connect_locally
from .stream import Headers, Inbox, Sink, Stream, StreamResetError, content_length

# Extensions of a request, and of a response.
BODY_EXTENSION = "gradpost_body"  # memoryviews to be sent one behind the other, unchanged until the request has ended
SINK_EXTENSION = "gradpost_sink"  # a `Sink` for the body of a 200 response; others come as httpx has it
LOCAL_EXTENSION = "gradpost_local"  # of a response: whether it came over a Unix socket

CONNECT_SECONDS = 5.0
PING_SECONDS = 5.0
STREAM_WINDOW = 1 << 30  # whatever comes has a place to go to

_Failure: TypeAlias = tuple[type[httpx.TransportError], str]

_OF_HTTP1 = frozenset({b"host", b"connection", b"transfer-encoding", b"keep-alive", b"content-length"})


class Http2Transport(httpx.AsyncBaseTransport):
    """One connection to each origin, with prior knowledge, or by ALPN under TLS.

    Ignores httpx's timeouts: a request is bounded by its caller, and dead peers are found by pings. When a file of
    `tls` has changed, what is sent from then on goes over new connections.

    With `local`, the name of a Unix socket, it is for the one origin that listens there: each new connection to it is
    tried there first, and made over TCP if it is on another host or uses TLS.
    """

    def __init__(self, tls: TlsFiles = TlsFiles(), local: str | None = None) -> None:  # noqa: B008 - frozen
        self._origins: dict[str, _Origin] = {}
        self._tls = tls
        self._local = local

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send one request and wait for its answer's headers. Raises httpx.TransportError and its children."""
        body = request.extensions.get(BODY_EXTENSION)
        if body is None:
            body = (await request.aread(),)
        num_bytes = sum(map(len, body))
        url = request.url
        name = f"{url.scheme}://{url.netloc.decode('ascii')}"
        origin = self._origins.get(name)
        if origin is None:
            origin = self._origins[name] = _Origin(name, self._tls, self._local)
        try:
            connection = await origin.connect(request)
            stream = await connection.begin(request.extensions.get(SINK_EXTENSION))
        except StreamResetError as reset:
            raise _translate(reset, request) from reset
        try:
            stream.send_headers(_headers_of(request, num_bytes), is_last=not num_bytes)
            stream.lend(*body)
            while stream.headers is None:
                await stream.changed()
        except BaseException as error:
            stream.close()
            if isinstance(error, StreamResetError):
                raise _translate(error, request) from error
            raise
        [status] = [value for name, value in stream.headers if name == b":status"]
        return httpx.Response(
            int(status),
            headers=[header for header in stream.headers if header[0] != b":status"],
            stream=_Answer(stream, request),
            extensions={"http_version": b"HTTP/2", LOCAL_EXTENSION: connection.is_local},
        )

    async def aclose(self) -> None:
        """Close all connections."""
        for origin in self._origins.values():
            origin.close()
        await asyncio.sleep(0)  # asyncio closes what was aborted in the loop's next turn, which may be its last


class _Answer(httpx.AsyncByteStream):
    """What no sink has taken of an answer's body. Closing it gives the memory of body and sink back to their owner."""

    def __init__(self, stream: Stream, request: httpx.Request) -> None:
        self._stream, self._request = stream, request
        self._inbox = stream.sink if isinstance(stream.sink, Inbox) else None

    async def __aiter__(self) -> AsyncIterator[bytes]:
        has_more = True
        try:
            while has_more:
                if self._inbox is not None:
                    data, has_more = await self._inbox.next()
                    yield data
                elif has_more := not self._stream.is_remote_over:
                    await self._stream.changed()
        except StreamResetError as reset:
            raise _translate(reset, self._request) from reset

    async def aclose(self) -> None:
        self._stream.close()


class _Origin:
    """One server, and the connection to it."""

    def __init__(self, name: str, tls: TlsFiles, local: str | None) -> None:
        url = urlsplit(name)
        self._host, self._port = url.hostname or "", url.port or (443 if url.scheme == "https" else 80)
        self._is_secure = url.scheme == "https"
        self._local = None if self._is_secure else local  # nobody shows a certificate there
        self._tls = tls
        self._files = WatchedFiles(tls.paths)
        self._context: ssl.SSLContext | None = None
        self._connection: ClientConnection | None = None
        self._connections: WeakSet[ClientConnection] = WeakSet()  # those that were replaced, too
        self._connecting: asyncio.Task[ClientConnection | _Failure] | None = None

    async def connect(self, request: httpx.Request) -> ClientConnection:
        """The connection; if there is none that takes requests, a new one that all requests wait for.

        Raises httpx.ConnectError and httpx.ConnectTimeout.
        """
        if (connection := self._usable()) is not None:
            return connection
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._connect(), name=f"connect to {self._host}:{self._port}")
            self._connecting.add_done_callback(self._has_connected)
        outcome = await asyncio.shield(self._connecting)
        if isinstance(outcome, ClientConnection):
            return outcome
        kind, text = outcome
        raise kind(text, request=request)

    async def _connect(self) -> ClientConnection | _Failure:
        """What is wrong is returned: an error that many raise would hold what each of them wanted to send."""
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

    def _has_connected(self, task: asyncio.Task[ClientConnection | _Failure]) -> None:
        self._connecting = None
        if not task.cancelled():
            task.exception()  # maybe nobody waits for it any more

    async def _connect_locally(self) -> ClientConnection | None:
        if self._local is None:
            return None
        with suppress(OSError):  # it is on another host, or gone
            connected = connect_locally(self._local)
            loop = asyncio.get_running_loop()
            _, connection = await loop.create_unix_connection(ClientConnection, sock=connected)
            connection.is_local = True
            return connection
        return None

    async def _connect_over_tcp(self) -> ClientConnection:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_SECONDS):
            transport, connection = await loop.create_connection(
                ClientConnection, self._host, self._port, ssl=self._make_context()
            )
        if self._is_secure and transport.get_extra_info("ssl_object").selected_alpn_protocol() != "h2":
            transport.abort()
            raise ConnectionError("the server does not speak HTTP/2")
        return connection

    def close(self) -> None:
        """End all connections and what is under way."""
        if self._connecting is not None:
            self._connecting.cancel()
        for connection in [*self._connections]:
            connection.close()

    def _usable(self) -> ClientConnection | None:
        connection = self._connection
        if connection is None or connection.is_closing:
            return None
        if connection.looks_again and self._is_secure:
            connection.looks_again = False
            if self._files.have_changed():
                self._connection = None  # the context looks at the files by itself
                connection.go_away()  # what is on its way ends there
                return None
        return connection

    def _make_context(self) -> ssl.SSLContext | None:
        if self._is_secure and self._context is None:
            self._context = client_context(self._tls)
            self._context.set_alpn_protocols(["h2"])
        return self._context


class ClientConnection(Connection):
    """The client's end: begins streams, as many at once as the server takes, and looks after the server's life."""

    preface = PREFACE
    tops_up = True

    def __init__(self) -> None:
        super().__init__({frames.ENABLE_PUSH: 0}, STREAM_WINDOW)
        self.is_local = False  # over a Unix socket
        self.looks_again = False  # at the files of TLS; true every now and then
        self._room = asyncio.Event()
        self._seen_bytes = 0
        self._num_pings = 0  # in a row that were not answered
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        super().connection_made(transport)
        self._timer = asyncio.get_running_loop().call_later(PING_SECONDS, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)
        self._room.set()

    async def begin(self, sink: Sink | None) -> Stream:
        """Wait until the server takes another stream, and begin it. A good answer goes to `sink`.

        Raises StreamResetError if the connection takes no more.
        """
        while len(self.streams) >= self.peer_max_streams and not self.is_closing:
            self._room.clear()
            await self._room.wait()
        if self.is_closing:
            raise StreamResetError(Code.REFUSED_STREAM, "the connection takes no more requests")
        stream = self.new_stream(self.highest_stream + 2 if self.highest_stream else 1)
        stream.sink = sink
        self.streams[stream.number] = stream
        if stream.number > frames.MAX_WINDOW - 2:
            self.is_closing = True  # there are no more numbers
        return stream

    def open_stream(self, number: int) -> Stream | None:
        """See Connection: headers of a stream that was given up, or that never was."""
        self.check_not_idle(number)
        return None

    def headers_received(self, stream: Stream, headers: Headers) -> None:
        """See Connection."""
        found = [value for name, value in headers if name == b":status"]
        if len(found) != 1 or not (found[0].isdigit() and len(found[0]) == 3):
            self.violated(stream, Code.PROTOCOL_ERROR, "an answer without a status")
            return
        if found[0][:1] == b"1":  # the answer itself comes later
            if stream.is_remote_over:
                self.violated(stream, Code.PROTOCOL_ERROR, "an answer that does not come")
            return
        if not stream.is_remote_over:  # else it is what the answer would have, to a HEAD
            try:
                stream.expected_bytes = content_length(headers)
            except ValueError as error:
                self.violated(stream, Code.PROTOCOL_ERROR, str(error))
                return
        if stream.sink is None or found[0] != b"200":
            stream.sink = Inbox(stream)
        stream.headers = headers
        stream.wake()

    def goaway_received(self, last_stream: int) -> None:
        """See Connection."""
        self.is_closing = True
        for stream in [stream for stream in self.streams.values() if stream.number > last_stream]:
            self.lose(stream, StreamResetError(Code.REFUSED_STREAM, "the server goes away, and has not looked at this"))
        self._room.set()

    def stream_over(self, stream: Stream) -> None:
        """See Connection."""
        self._room.set()

    def settings_received(self) -> None:
        """See Connection."""
        self._room.set()

    def close(self) -> None:
        """End it, and what is under way."""
        self._transport.abort()

    def _look(self) -> None:
        self.looks_again = True
        if self.received_bytes != self._seen_bytes:
            self._seen_bytes, self._num_pings = self.received_bytes, 0
        elif self._num_pings == 2:
            self._transport.abort()
            self.connection_lost(TimeoutError(f"no sign of life for {3 * PING_SECONDS:g} s"))
            return
        else:
            self._num_pings += 1
            self.ping()
        self._timer = asyncio.get_running_loop().call_later(PING_SECONDS, self._look)


def _headers_of(request: httpx.Request, num_bytes: int) -> Headers:
    url = request.url
    headers = [
        (b":method", request.method.encode("ascii")),
        (b":scheme", url.raw_scheme),
        (b":authority", url.netloc),
        (b":path", url.raw_path),
    ]
    headers += [(name.lower(), value) for name, value in request.headers.raw if name.lower() not in _OF_HTTP1]
    if num_bytes or request.method in ("POST", "PUT"):
        headers.append((b"content-length", b"%d" % num_bytes))
    return headers


def _translate(reset: StreamResetError, request: httpx.Request) -> Exception:
    """What a sink did not like is raised as it was; the rest is trouble on the way."""
    if reset.__cause__ is not None:
        return reset.__cause__ if isinstance(reset.__cause__, Exception) else reset
    kind = httpx.ConnectError if reset.code == Code.REFUSED_STREAM else httpx.ReadError
    return kind(str(reset), request=request)
