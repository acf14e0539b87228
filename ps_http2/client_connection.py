"""The client's end of a connection, and what its shells have in common: origins, requests, responses and errors."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
from typing_extensions import override

from ps_config.certificates import TlsFiles, WatchedFiles, client_context

from . import frames
from .connection import Connection
from .frames import PREFACE, ErrorCode
from .stream import Headers, Sink, Stream, StreamResetError, content_length

# Extensions of a request, and of a response.
BODY_EXTENSION = "gradpost_body"  # memoryviews to be sent in this order, unchanged until the response is closed
SINK_EXTENSION = "gradpost_sink"  # a `Sink` for the body of a 200 response; other bodies are read as usual
LOCAL_EXTENSION = "gradpost_local"  # whether a response came over a Unix socket

CONNECT_SECONDS = 5.0
PING_SECONDS = 5.0
STREAM_WINDOW = 1 << 30  # each body has a destination

_HTTP1_HEADERS = frozenset({b"host", b"connection", b"transfer-encoding", b"keep-alive", b"content-length"})


class ClientConnection(Connection):
    """The client's end: opens streams, as many at once as the server allows, and detects a dead server by pings."""

    preface = PREFACE

    keeps_windows_full = True

    def __init__(self) -> None:
        super().__init__({frames.ENABLE_PUSH: 0}, STREAM_WINDOW)
        self.must_check_files = False  # of TLS; set periodically
        self._seen_bytes = 0
        self._num_pings = 0  # unanswered, in a row

    def make_body(self, stream: Stream) -> Sink:
        """Return the sink of a response that has none of the caller. Implemented by shells."""
        raise NotImplementedError

    @property
    def may_open_stream(self) -> bool:
        """True unless a request has to wait for the end of another one."""
        return self.is_closing or len(self.streams) < self.peer_max_streams

    def open_stream(self, request: Request, sink: Sink | None) -> Stream:
        """Send a request if `may_open_stream`, and return its stream. The body of a 200 response goes to `sink`.

        Raises StreamResetError if the connection accepts no more.
        """
        if self.is_closing:
            raise StreamResetError(ErrorCode.REFUSED_STREAM, "the connection accepts no more requests")
        stream = self.new_stream(self.highest_stream + 2 if self.highest_stream else 1)
        stream.sink = sink
        self.streams[stream.stream_id] = stream
        if stream.stream_id > frames.MAX_WINDOW - 2:
            self.is_closing = True  # the identifiers are used up
        try:
            stream.send_headers(request.headers, end_stream=not request.num_bytes)
            stream.send_nowait(*request.body)
        except BaseException:
            stream.close()
            raise
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
            stream.sink = self.make_body(stream)
        stream.headers = headers
        stream.notify()

    @override
    def goaway_received(self, last_stream_id: int) -> None:
        self.is_closing = True
        for stream in [stream for stream in self.streams.values() if stream.stream_id > last_stream_id]:
            text = "the server closes the connection and has not processed this request"
            self.remove_stream(stream, StreamResetError(ErrorCode.REFUSED_STREAM, text))

    def close(self) -> None:
        """Abort the connection and its requests."""
        self._transport.abort()

    def check_liveness(self) -> bool:
        """Ping a server that was silent since the last call, which the shell makes every `PING_SECONDS`.

        Returns False if the connection has ended: the server has left two pings without an answer.
        """
        self.must_check_files = True
        self.set_low_water(1)
        if self.received_bytes != self._seen_bytes:
            self._seen_bytes, self._num_pings = self.received_bytes, 0
        elif self._num_pings == 2:
            self._transport.abort()
            self.end(TimeoutError(f"the server sent nothing for {3 * PING_SECONDS:g} s"))
        else:
            self._num_pings += 1
            self.ping()
        return not self._transport.is_closing()


class Origin:
    """A server. A shell connects to it."""

    def __init__(self, name: str, tls: TlsFiles) -> None:
        url = urlsplit(name)
        self.host, self.port = url.hostname or "", url.port or (443 if url.scheme == "https" else 80)
        self.is_secure = url.scheme == "https"
        self._tls = tls
        self._files = WatchedFiles(tls.paths)
        self._context: ssl.SSLContext | None = None

    def is_usable(self, connection: ClientConnection | None) -> bool:
        """Return whether further requests may use a connection, which ends if a file of TLS has changed."""
        if connection is None or connection.is_closing:
            return False
        if connection.must_check_files and self.is_secure:
            connection.must_check_files = False
            if self._files.have_changed():
                connection.go_away()  # its requests are finished there; the context reloads the files by itself
                return False
        return True

    def make_context(self) -> ssl.SSLContext:
        """Return the context of TLS connections."""
        if self._context is None:
            self._context = client_context(self._tls)
            self._context.set_alpn_protocols(["h2"])
        return self._context


class Request(NamedTuple):
    """A request as it is sent to an origin."""

    origin: str
    headers: Headers
    body: Sequence[memoryview | bytes]
    num_bytes: int  # of the body

    @classmethod
    def make(cls, method: str, url: str, headers: Headers, body: Sequence[memoryview | bytes]) -> Request:
        """Return a request. The names of `headers` are in lower case."""
        num_bytes = sum(map(len, body))
        origin, target = _parse_target(method, url)
        headers = [*target, *headers]
        if num_bytes or method in ("POST", "PUT"):
            headers.append((b"content-length", b"%d" % num_bytes))
        return cls(origin, headers, body, num_bytes)


def read_headers(request: httpx.Request) -> Headers:
    """Return the headers of an httpx.Request that HTTP/2 has."""
    return [(n.lower(), v) for n, v in request.headers.raw if n.lower() not in _HTTP1_HEADERS]


def make_response(
    stream: Stream, body: httpx.AsyncByteStream | httpx.SyncByteStream, **extensions: Any
) -> httpx.Response:
    """Return the response of a stream that has received its headers; `body` is its stream."""
    assert stream.headers is not None
    [status] = [value for name, value in stream.headers if name == b":status"]
    return httpx.Response(
        int(status),
        headers=[header for header in stream.headers if header[0] != b":status"],
        stream=body,
        extensions={"http_version": b"HTTP/2", **extensions},
    )


def to_httpx_error(error: StreamResetError) -> Exception:
    """Return the exception of a sink as it was raised, and an httpx.TransportError for anything else."""
    if error.__cause__ is not None:
        return error.__cause__ if isinstance(error.__cause__, Exception) else error
    error_type = httpx.ConnectError if error.code == ErrorCode.REFUSED_STREAM else httpx.ReadError
    return error_type(str(error))


@lru_cache(maxsize=1024)
def _parse_target(method: str, text: str) -> tuple[str, Headers]:
    """Return the origin of requests to a URL, and the headers that name the target."""
    url = httpx.URL(text)
    headers = [
        (b":method", method.encode("ascii")),
        (b":scheme", url.raw_scheme),
        (b":authority", url.netloc),
        (b":path", url.raw_path),
    ]
    return f"{url.scheme}://{url.netloc.decode('ascii')}", headers
