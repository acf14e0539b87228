"""Requests over HTTP/2 as ASGI calls, and an ASGI extension for bodies in the application's own memory.

A server with the extension receives into a buffer that the application names, and accepts memoryviews as parts of a
response, which may change once they are sent. With other servers `receive_into` copies.
"""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress
from functools import lru_cache
from urllib.parse import unquote

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope

from .asyncio_shell import AsyncStream, BodyReader
from .frames import ErrorCode
from .stream import Headers, StreamResetError

log: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger("gradpost")

SET_BUFFER = "gradpost.set_buffer"  # extension of a scope: names the buffer of the next `receive`
DISCARD_SECONDS = 5.0  # for the rest of a body that the application has not read
SMALL_BYTES = 4 * 1024  # the application need not wait until the end of so small a response is sent

_PSEUDO = frozenset({b":method", b":scheme", b":path", b":authority"})
_CONNECTION_HEADERS = frozenset({b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"})
_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")
_METHOD = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_INVALID_VALUE = re.compile(rb"[\0\r\n]|\A[ \t]|[ \t]\Z")


def read_scope(headers: Headers) -> Scope:
    """Return the ASGI scope of a request's headers. Raises ValueError (RFC 9113, sections 8.2 and 8.3).

    >>> request = [(b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/a%20b?c"), (b":authority", b"x")]
    >>> scope = read_scope(request)
    >>> scope["method"], scope["path"], scope["query_string"], scope["headers"]
    ('GET', '/a b', b'c', [(b'host', b'x')])
    """
    pseudo: dict[bytes, bytes] = {}
    regular: Headers = []
    host: bytes | None = None
    for name, value in headers:
        if _INVALID_VALUE.search(value):
            raise ValueError(f"the value of {name!r} contains NUL, CR or LF, or begins or ends with a blank")
        if name[:1] == b":":
            if name not in _PSEUDO or name in pseudo or regular:
                raise ValueError(f"{name!r} is unknown, duplicate, or after other headers")
            pseudo[name] = value
            continue
        if not _is_name(name) or (name == b"te" and value != b"trailers"):
            raise ValueError(f"a request over HTTP/2 may not have the header {name!r}")
        if name == b"host":
            if host is not None:
                raise ValueError("a request may have one Host header")
            host = value
        regular.append((name, value))
    method, target = pseudo.get(b":method", b""), pseudo.get(b":path", b"")
    if not _METHOD.fullmatch(method) or b":scheme" not in pseudo or not (target.startswith(b"/") or target == b"*"):
        raise ValueError("a request needs a method, a scheme and a path")
    authority = pseudo.get(b":authority")
    if authority is not None and host is None:
        regular.insert(0, (b"host", authority))
    elif authority is not None and authority != host:
        raise ValueError("the authority and the Host header of a request differ")
    path, _, query = target.partition(b"?")
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "2",
        "method": method.decode("ascii"),
        "scheme": "http",
        "root_path": "",
        "path": unquote(path.decode("ascii", "replace")),
        "raw_path": path,
        "query_string": query,
        "headers": regular,
    }


@lru_cache(256)  # the headers of each request have the same names
def _is_name(name: bytes) -> bool:
    return _NAME.fullmatch(name) is not None and name not in _CONNECTION_HEADERS


async def receive_into(buffer: memoryview, scope: Scope, receive: Receive) -> tuple[int, bool]:
    """Receive the next part of a body at the beginning of a buffer; return its bytes, and True if more may follow.

    Raises ValueError if it does not fit.
    """
    set_buffer = scope.get("extensions", {}).get(SET_BUFFER)
    if set_buffer is not None:
        set_buffer(buffer)
    message = await receive()
    part = message.get("body", b"")
    if len(part) > len(buffer):
        raise ValueError("the body is longer than its buffer")
    if not isinstance(part, memoryview):  # a view refers to the buffer itself
        buffer[: len(part)] = part
    return len(part), message.get("more_body", False)


class Request:
    """A request while the application answers it.

    While a body is received into the application's buffer, `receive` returns every `read_seconds`. So the application
    can detect slow clients.
    """

    def __init__(self, stream: AsyncStream, scope: Scope, default_headers: Headers, read_seconds: float) -> None:
        self._stream = stream
        self._scope = scope
        self._default_headers = default_headers
        self._read_seconds = read_seconds
        self._body = stream.sink = BodyReader(stream)
        self._body_has_ended = False
        self._buffer: memoryview | None = None  # of the next `receive`
        self._expects_continue = any(n == b"expect" and v.lower() == b"100-continue" for n, v in scope["headers"])
        self._has_completed = False
        scope["extensions"] = {SET_BUFFER: self._set_buffer}

    async def run(self, app: ASGIApp) -> None:
        """Call the application unless the stream was reset already, and close the stream in any case."""
        if self._stream.error is not None:
            return
        try:
            await app(self._scope, self._receive, self._send)
            self._scope["headers"] = self._stream.headers = []  # up to 64 KiB; the reply may wait for a window
            if self._has_completed:
                await self._wait_for_end()
        except Exception as error:
            log.error("the application failed", exc_info=error, path=self._scope["path"])
        finally:
            self._stream.close(ErrorCode.NO_ERROR if self._has_completed else ErrorCode.INTERNAL_ERROR)

    def _set_buffer(self, buffer: memoryview) -> None:
        self._buffer = buffer

    async def _wait_for_end(self) -> None:
        """Discard the rest of the body, and wait until the response is sent.

        Clients such as curl lose a response that is followed by a reset.
        """
        with suppress(StreamResetError):
            if not self._body_has_ended:
                await self._discard_body()
            while not self._stream.is_local_closed:
                await self._stream.wait_for_change()

    async def _discard_body(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(DISCARD_SECONDS):
                while not self._body_has_ended:
                    self._body_has_ended = not (await self._body.read())[1]

    async def _receive(self) -> Message:
        if self._expects_continue:
            self._expects_continue = False
            if self._stream.error is None and not self._stream.is_remote_closed:
                self._stream.send_headers([(b":status", b"100")])
                self._stream.send_nowait(end_stream=False)  # writes the headers
        try:
            while self._body_has_ended:
                if self._stream.is_closed:
                    return {"type": "http.disconnect"}
                await self._stream.wait_for_change()
            buffer, self._buffer = self._buffer, None
            body: bytes | memoryview
            if not buffer:  # without one, or if it is full: the body is too long, or has ended
                body, has_more = await self._body.read()
            else:
                num_bytes, has_more = await self._body.read_into(buffer, self._read_seconds)
                body = buffer[:num_bytes]
        except StreamResetError:
            return {"type": "http.disconnect"}
        self._body_has_ended = not has_more
        return {"type": "http.request", "body": body, "more_body": has_more}

    async def _send(self, message: Message) -> None:
        """Send an ASGI message, unless the stream was reset. A memoryview as body must not change meanwhile.

        The application does not wait until a small response is sent, so that a closed window does not occupy a request.
        """
        stream = self._stream
        self._expects_continue = False
        if message["type"] == "http.response.start":
            status = message["status"]
            self._has_body = self._scope["method"] != "HEAD" and status not in (204, 304)
            if stream.error is None:
                headers = [(b":status", b"%d" % status), *self._default_headers]
                headers += [(n.lower(), v) for n, v in message["headers"] if n.lower() not in _CONNECTION_HEADERS]
                stream.send_headers(headers)
            return
        end_stream = not message.get("more_body", False)
        body = message.get("body", b"") if self._has_body else b""
        self._has_completed = end_stream
        if end_stream and len(body) <= SMALL_BYTES:
            if stream.error is None:
                stream.send_nowait(bytes(body))
            return
        with suppress(StreamResetError):
            await stream.send(body, end_stream=end_stream)
