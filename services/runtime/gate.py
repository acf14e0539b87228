"""The gate of a service, through which each request passes.

    find the route ──► count ──► check access ──► receive a message ──► handler ──► count the answer

A request that fails at any of these is answered with a problem document, unless its response has begun; then the server
cuts the response off. A bug is logged with its traceback.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from http import HTTPStatus
from time import perf_counter
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ps_config.tokens import Scope as TokenScope
from ps_http2.server import CHECKS
from ps_protocol.errors import BadInput, GradpostError, TryAgain

from .errors import describe_failure, problem_response
from .logs import get_logger
from .metrics import ServiceMetrics
from .security import Guard

log = get_logger()

MIN_BODY_BYTES_PER_SECOND = 4 * 1024  # on average, after the time-out: single bytes are no progress
HURRIED_BYTES_PER_SECOND = 64 * 1024  # slower uploads are ended if there are too many requests
HURRIED_SECONDS = 1.0  # before that an upload is not judged
MAX_MESSAGE_ITEMS = 4 * 1024 * 1024  # members and elements; each occupies some 60 bytes once parsed
PART_BYTES = 64 * 1024  # of a reply over HTTP/1.1, for one write; asyncio copies what the kernel does not take
MAX_MESSAGES_BYTES = 128 * 1024 * 1024  # of all messages that are being received or processed


class Entry(NamedTuple):
    """An entry of the table of requests."""

    path: str  # with its parameters as templates
    handler: ASGIApp
    scope: TokenScope | None = "admin"  # that the token needs; None without a token
    max_bytes: int | None = None  # of a message, which the gate receives; None if the handler receives the body
    is_probe: bool = False

    @property
    def is_reader(self) -> bool:
        """True for requests that may wait long, and that only look."""
        return self.scope == "read" or (self.scope is None and not self.is_probe)


class Gate:
    """The requests of one application. All of them are limited, checked, answered and measured here.

    Requests beyond the limit are refused without reading their bodies. If a slow upload exists, it is ended in favour
    of a new request, so that slow senders cannot block a service. Readers get half of the limit: heartbeats are always
    accepted.
    """

    def __init__(self, table: Mapping[tuple[str, str], Entry], guard: Guard, metrics: ServiceMetrics) -> None:
        """`table` has the entry of each method and path. Other requests need the scope `admin`, and are not found."""
        self._table = table
        self._patterns = [(key[0], compile_path(key[1])[0], table[key]) for key in table if "{" in key[1]]
        self._unmatched = Entry("unmatched", self._refuse)
        self._guard = guard
        self._metrics = metrics
        self._exchanges: set[Exchange] = set()
        self._num_requests = 0  # that were not refused
        self._num_readers = 0  # among them
        self._message_bytes = 0  # received, of requests that have not ended
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        num_uploads = sum(not exchange.is_received for exchange in self._exchanges)
        return f"<Gate [{self._num_requests} of {self._guard.max_requests} requests | {num_uploads} uploads]>"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Process a request, a HEAD as a GET without its body."""
        begin = perf_counter()
        if is_head := scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        entry = self._find(scope)
        exchange = Exchange(scope, receive, send, self._guard.body_timeout_seconds, is_head=is_head)
        self._exchanges.add(exchange)
        if self._timer is None:
            self._check_uploads()
        try:
            try:
                await self._process(entry, exchange)
            except Exception as error:
                await exchange.fail(error)
        except asyncio.CancelledError:
            exchange.request.uncancel()
            await exchange.answer(reasons.pop(exchange.request, TryAgain("the service stops")))
        finally:
            self._exchanges.discard(exchange)
            self._metrics.observe_request(
                entry.path,
                scope["method"],
                exchange.status,
                seconds=perf_counter() - begin,
                received_bytes=exchange.received_bytes,
                sent_bytes=exchange.sent_bytes,
            )

    def _find(self, scope: Scope) -> Entry:
        method, path = scope["method"], scope["path"]
        if (entry := self._table.get((method, path))) is not None:
            return entry
        for other, pattern, entry in self._patterns:
            if other == method and (match := pattern.match(path)):
                scope["path_params"] = match.groupdict()
                return entry
        return self._unmatched

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        methods = {method for method, pattern, _ in self._patterns if pattern.match(path)}
        methods |= {method for method, other in self._table if other == path}
        if not methods:
            raise HTTPException(HTTPStatus.NOT_FOUND)
        allowed = sorted(methods | {"HEAD"} if "GET" in methods else methods)
        raise HTTPException(HTTPStatus.METHOD_NOT_ALLOWED, headers={"allow": ", ".join(allowed)})

    async def _process(self, entry: Entry, exchange: Exchange) -> None:
        is_reader = entry.is_reader
        limit = None
        if is_reader and self._num_readers >= max(1, self._guard.max_requests // 2):
            limit = f"{self._num_readers} reading requests"
        elif self._num_requests >= self._guard.max_requests and not self._end_slowest_upload():
            limit = f"{self._num_requests} requests"
        if limit is not None:  # the body is not waited for
            await exchange.answer(TryAgain(f"the limit of {limit} is reached; retry", code="overloaded"))
            return
        self._num_requests += 1
        self._num_readers += is_reader
        try:
            self._guard.check(exchange.scope, entry.scope, is_probe=entry.is_probe)
            if entry.max_bytes is not None:
                await self._receive_message(exchange, entry.max_bytes)
            await entry.handler(exchange.scope, exchange.receive, exchange.send)
        finally:
            self._num_requests -= 1
            self._num_readers -= is_reader
            self._message_bytes -= exchange.message_bytes

    def _end_slowest_upload(self) -> bool:
        """End the slowest of the slow uploads, and return True if there was one."""
        now = asyncio.get_running_loop().time()
        slow = [each for each in self._exchanges if each.is_behind(HURRIED_BYTES_PER_SECOND, HURRIED_SECONDS, now)]
        if slow:
            min(slow, key=lambda exchange: exchange.received_bytes).end_upload()
        return bool(slow)

    def _check_uploads(self) -> None:
        """End uploads that have stalled, and those that are too slow. Runs as long as there are requests."""
        loop, seconds = asyncio.get_running_loop(), self._guard.body_timeout_seconds
        for exchange in self._exchanges:
            if exchange.is_stalled(loop.time()) or exchange.is_behind(MIN_BODY_BYTES_PER_SECOND, seconds, loop.time()):
                exchange.end_upload()
        self._timer = loop.call_later(seconds / CHECKS, self._check_uploads) if self._exchanges else None

    async def _receive_message(self, exchange: Exchange, max_bytes: int) -> None:
        """Receive a message before its handler is called. It is JSON whatever its content type is (`curl -d`)."""
        parts: list[bytes] = []
        num_items = 0
        while not exchange.is_received:
            part = (await exchange.receive()).get("body", b"")
            exchange.message_bytes += len(part)
            self._message_bytes += len(part)
            num_items += part.count(b",") + part.count(b"[") + part.count(b"{")
            if exchange.message_bytes > max_bytes:
                text = f"the message must have at most {max_bytes} bytes"
                raise BadInput(text, code="body_too_large", expected=f"<= {max_bytes}")
            if num_items > MAX_MESSAGE_ITEMS:
                raise BadInput(f"a message must have at most {MAX_MESSAGE_ITEMS} items", code="body_too_large")
            if self._message_bytes > MAX_MESSAGES_BYTES:
                raise TryAgain("too many large messages are being received", code="overloaded")
            parts.append(part)
        exchange.put_back(b"".join(parts))


reasons: WeakKeyDictionary[asyncio.Task[Any], GradpostError] = WeakKeyDictionary()  # of requests that are ended


def end_request(request: asyncio.Task[Any], error: GradpostError) -> None:
    """Cancel a request wherever it waits; it is answered with the error, or cut off if its response has begun."""
    reasons.setdefault(request, error)
    request.cancel()


def current_request() -> asyncio.Task[Any]:
    """Return the task of the request that is being processed, for `end_request`."""
    request = asyncio.current_task()
    assert request is not None
    return request


class Exchange:
    """A request and its response. Of the time of an upload, only that counts in which the handler waits for it."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, timeout_seconds: float, *, is_head: bool) -> None:
        self.request = current_request()
        self.scope = scope
        self.status = 0  # of the response, 0 until it begins
        self.received_bytes = self.sent_bytes = 0  # of bodies
        self.message_bytes = 0
        self.is_received = False  # the body is complete, or given up
        self._receive = receive
        self._send = send
        self._is_head = is_head
        self._is_http2 = scope["http_version"] == "2"
        self._message: bytes | None = None
        self._timeout_seconds = timeout_seconds
        self._waited_seconds = 0.0
        self._waits_since: float | None = None

    # ------------------------------------------------------------------ the request

    async def receive(self) -> Message:
        """Return the next part of the body. Raises ClientDisconnect before its end."""
        if self._message is not None:
            body, self._message = self._message, None
            return {"type": "http.request", "body": body}
        if self.is_received:  # the handler waits for the client to disconnect, which may take any time
            return await self._receive()
        loop = asyncio.get_running_loop()
        begin = self._waits_since = loop.time()
        message = await self._receive()
        self._waits_since = None
        self._waited_seconds += loop.time() - begin
        self.is_received = not message.get("more_body", False)
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        self.received_bytes += len(message.get("body", b""))
        return message

    def put_back(self, message: bytes) -> None:
        """Let the next `receive` return a message that is complete."""
        self._message = message
        if message:
            others = [header for header in self.scope["headers"] if header[0] != b"content-type"]
            self.scope["headers"] = [*others, (b"content-type", b"application/json")]

    def is_stalled(self, now: float) -> bool:
        """Return True if the handler has waited for the next part of the body for the whole time-out."""
        return self._waits_since is not None and now - self._waits_since >= self._timeout_seconds

    def is_behind(self, bytes_per_second: float, seconds: float, now: float) -> bool:
        """Return True if the handler waits for the body, which is slower than a rate for `seconds` or longer."""
        if self._waits_since is None:
            return False
        waited = self._waited_seconds + now - self._waits_since
        return waited > seconds and self.received_bytes < bytes_per_second * (waited - seconds)

    def end_upload(self) -> None:
        """End the request, because its body is too slow."""
        self._waits_since = None
        text = f"after {self.received_bytes} bytes the body came too slowly"
        end_request(self.request, TryAgain(text, code="slow_body"))

    # ------------------------------------------------------------------ the response

    async def send(self, message: Message) -> None:
        """Send a part of the response, or only the headers of one to HEAD."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            await self._send(message)
            if self._is_head:
                await self._send({"type": "http.response.body"})
        elif not self._is_head:
            body = message.get("body", b"")
            self.sent_bytes += len(body)
            while len(body) > PART_BYTES and not self._is_http2:
                part, body = memoryview(body)[:PART_BYTES], memoryview(body)[PART_BYTES:]
                await self._send({"type": "http.response.body", "body": part, "more_body": True})
                message = {**message, "body": body}
            await self._send(message)

    async def fail(self, error: Exception) -> None:
        """Answer with a problem document. A bug is logged with its traceback."""
        method, path = self.scope["method"], self.scope["path"]
        described = describe_failure(error, f"{method} {path}")
        if described is None:
            log.error("unexpected error", exc_info=error, method=method, path=path)
            described = GradpostError("an unexpected error; the log of the service has the traceback")
        if not self.status and not self._is_http2:  # which answers first, and then discards the rest of the body
            await self._discard_body()
        await self.answer(described, error.headers if isinstance(error, HTTPException) else None)

    async def answer(self, error: GradpostError, headers: Mapping[str, str] | None = None) -> None:
        """Answer with a problem document, unless the response has begun."""
        if not self.status:
            response = problem_response(error, instance=self.scope["path"], headers=headers)
            await response(self.scope, self.receive, self.send)

    async def _discard_body(self) -> None:
        """Receive the rest of the body. A client of HTTP/1.1 may still be sending it, and would lose the answer."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._timeout_seconds):
                while not self.is_received:
                    self.is_received = not (await self._receive()).get("more_body", False)
