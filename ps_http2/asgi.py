"""Requests that come over HTTP/2, as ASGI has them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from urllib.parse import unquote

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .frames import Code
from .stream import Headers, Inbox, Stream, StreamResetError

log: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger("gradpost")

LANDING = "gradpost.landing"  # name of the extension in a scope
COPY_BYTES = 1024 * 1024  # at once, where parts of a response have to be bytes
DISCARD_SECONDS = 5.0  # for the rest of a body that nobody wants
SMALL_BYTES = 4 * 1024  # of an answer whose end is sent after the application is done

_PSEUDO = frozenset({b":method", b":scheme", b":path", b":authority"})
_OF_CONNECTIONS = frozenset({b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"})
_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")
_METHOD = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_NO_VALUE = re.compile(rb"[\0\r\n]|\A[ \t]|[ \t]\Z")


def read_scope(headers: Headers) -> Scope:
    """The part of an ASGI scope that a request's headers say. Raises ValueError (RFC 9113, sections 8.2 and 8.3).

    >>> request = [(b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/a%20b?c"), (b":authority", b"x")]
    >>> scope = read_scope(request)
    >>> scope["method"], scope["path"], scope["query_string"], scope["headers"]
    ('GET', '/a b', b'c', [(b'host', b'x')])
    """
    pseudo: dict[bytes, bytes] = {}
    regular: Headers = []
    host: bytes | None = None
    for name, value in headers:
        if _NO_VALUE.search(value):
            raise ValueError(f"the value of {name!r} has a character that no value has there")
        if name[:1] == b":":
            if name not in _PSEUDO or name in pseudo or regular:
                raise ValueError(f"{name!r} is unknown, stands twice, or behind other headers")
            pseudo[name] = value
            continue
        if not _NAME.fullmatch(name) or name in _OF_CONNECTIONS or (name == b"te" and value != b"trailers"):
            raise ValueError(f"no request over HTTP/2 has a header {name!r}")
        if name == b"host":
            if host is not None:
                raise ValueError("a request has one host")
            host = value
        regular.append((name, value))
    method, target = pseudo.get(b":method", b""), pseudo.get(b":path", b"")
    if not _METHOD.fullmatch(method) or b":scheme" not in pseudo or not (target.startswith(b"/") or target == b"*"):
        raise ValueError("a request has a method, a scheme and a path")
    authority = pseudo.get(b":authority")
    if authority is not None and host is None:
        regular.insert(0, (b"host", authority))
    elif authority is not None and authority != host:
        raise ValueError("the authority and the host of a request are the same")
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


class Landing:
    """Where the next part of a request's body belongs."""

    def __init__(self) -> None:
        self._buffer: memoryview | None = None

    def offer(self, buffer: memoryview) -> None:
        """The next `receive` may write there, and answer with a view of what it has written."""
        self._buffer = buffer

    def take(self) -> memoryview | None:
        """The server's side: what was offered, once."""
        buffer, self._buffer = self._buffer, None
        return buffer


async def receive_into(buffer: memoryview, scope: Scope, receive: Receive) -> tuple[int, bool]:
    """Receive the next part of a body at the beginning of a buffer; returns its bytes, and whether more may come.

    Raises ValueError if it does not fit.
    """
    landing = scope.get("extensions", {}).get(LANDING)
    if landing is not None:
        landing.offer(buffer)
    message = await receive()
    part = message.get("body", b"")
    if len(part) > len(buffer):
        raise ValueError("the body is longer than its buffer")
    if not isinstance(part, memoryview):  # a view is of the buffer itself
        buffer[: len(part)] = part
    return len(part), message.get("more_body", False)


async def send_from(part: bytes | memoryview, scope: Scope, send: Send, *, more_body: bool) -> None:
    """Send a part of a response; a view may change again once this has returned, or was cancelled."""
    if isinstance(part, bytes) or LANDING in scope.get("extensions", {}):
        await send({"type": "http.response.body", "body": part, "more_body": more_body})
        return
    for at in range(0, len(part), COPY_BYTES):
        piece = bytes(part[at : at + COPY_BYTES])
        is_last = at + len(piece) == len(part)
        await send({"type": "http.response.body", "body": piece, "more_body": more_body or not is_last})


class Request:
    """One of them, while the application answers it."""

    def __init__(
        self, stream: Stream, inbox: Inbox, scope: Scope, default_headers: Headers, land_seconds: float
    ) -> None:
        self._land_seconds = land_seconds
        self._stream = stream
        self._inbox = inbox
        self._scope = scope
        self._default_headers = default_headers
        self._body_is_over = False
        self._expects_continue = any(n == b"expect" and v.lower() == b"100-continue" for n, v in scope["headers"])
        self._completed = False
        self._landing = Landing()
        scope["extensions"] = {LANDING: self._landing}

    async def run(self, app: ASGIApp) -> None:
        """Let the application answer, and end the stream in any case."""
        try:
            await app(self._scope, self.receive, self.send)
            if self._completed:
                await self._discard_rest()
                await self._wait_until_sent()
        except Exception as error:
            log.error("the application failed", exc_info=error, path=self._scope["path"])
        finally:
            self._stream.close(Code.NO_ERROR if self._completed else Code.INTERNAL_ERROR)

    async def _discard_rest(self) -> None:
        """Read and drop the rest of the body: clients such as curl lose an answer that is followed by a reset."""
        with suppress(StreamResetError, TimeoutError):
            async with asyncio.timeout(DISCARD_SECONDS):
                while not self._body_is_over:
                    self._body_is_over = not (await self._inbox.next())[1]

    async def _wait_until_sent(self) -> None:
        with suppress(StreamResetError):
            while not self._stream.is_local_over:
                await self._stream.changed()

    async def receive(self) -> Message:
        """See ASGI, and `Landing`."""
        if self._expects_continue:
            self._expects_continue = False
            if self._stream.error is None and not self._stream.is_remote_over:
                self._stream.send_headers([(b":status", b"100")])
                self._stream.lend(is_last=False)  # which writes the headers
        try:
            while self._body_is_over:
                if self._stream.is_over:
                    return {"type": "http.disconnect"}
                await self._stream.changed()
            buffer = self._landing.take()
            body: bytes | memoryview
            if not buffer:  # nothing is to land, or nothing more: then it is too long, or over
                body, has_more = await self._inbox.next()
            else:
                num_bytes, has_more = await self._inbox.fill(buffer, self._land_seconds)
                body = buffer[:num_bytes]
        except StreamResetError:
            return {"type": "http.disconnect"}
        self._body_is_over = not has_more
        return {"type": "http.request", "body": body, "more_body": has_more}

    async def send(self, message: Message) -> None:
        """See ASGI; bodies may be memoryviews, which must not change meanwhile. A client that has left gets nothing.

        The application does not wait until a small answer is taken, so that a closed window holds no place there.
        """
        stream = self._stream
        self._expects_continue = False
        if message["type"] == "http.response.start":
            status = message["status"]
            self._has_body = self._scope["method"] != "HEAD" and status not in (204, 304)
            if stream.error is None:
                headers = [(b":status", b"%d" % status), *self._default_headers]
                headers += [(n.lower(), v) for n, v in message["headers"] if n.lower() not in _OF_CONNECTIONS]
                stream.send_headers(headers)
            return
        is_last = not message.get("more_body", False)
        body = message.get("body", b"") if self._has_body else b""
        self._completed = is_last
        if is_last and len(body) <= SMALL_BYTES:
            if stream.error is None:
                stream.lend(bytes(body))
            return
        try:
            await stream.send(body, is_last=is_last)
        except StreamResetError:
            return


def start_request(
    stream: Stream,
    scope: Scope,
    app: ASGIApp,
    default_headers: Headers,
    land_seconds: float,
    when_done: Callable[[asyncio.Task[Any]], object],
) -> asyncio.Task[None]:
    """Let the application answer in a task of its own.

    While a body lands in its memory it is told every `land_seconds` how much is here, so that it can tell who is slow.
    """
    inbox = Inbox(stream)
    stream.sink = inbox
    task = asyncio.get_running_loop().create_task(Request(stream, inbox, scope, default_headers, land_seconds).run(app))
    task.add_done_callback(when_done)
    return task
