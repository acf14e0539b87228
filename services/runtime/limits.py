"""Limits for the number of concurrent requests, and for the time of their bodies."""

from __future__ import annotations

import asyncio
from http import HTTPStatus

from fastapi import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ps_protocol.errors import TryAgain

from .errors import problem_response
from .scopes import PROBES, needed_scope
from .settings import ServiceSettings

MIN_BODY_BYTES_PER_SECOND = 4 * 1024  # on average, after the time-out: single bytes are no progress
HURRIED_BYTES_PER_SECOND = 64 * 1024  # slower uploads are ended if there are too many requests
HURRIED_SECONDS = 1.0  # before that an upload is not judged


class LimitRequests:
    """ASGI middleware that answers requests beyond the limit with `overloaded`, and slow bodies with `slow_body`.

    Excess requests are refused without reading their bodies. If a slow upload exists, it is ended in favour of a new
    request, so that slow senders cannot block a service. Reading requests, which may wait long, get half of the limit:
    heartbeats are always accepted.
    """

    def __init__(self, app: ASGIApp, settings: ServiceSettings) -> None:
        self._app = app
        self._max_requests = settings.max_requests
        self._body_timeout_seconds = settings.body_timeout_seconds
        self._num_requests = 0
        self._num_readers = 0  # among them
        self._uploads: set[Upload] = set()  # of these requests

    def __repr__(self) -> str:
        num_uploads = sum(not upload.is_over for upload in self._uploads)
        return f"<LimitRequests [{self._num_requests} of {self._max_requests} | {num_uploads} uploads]>"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Process a request, or answer that there are too many."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        needed = needed_scope(scope["method"], scope["path"])
        is_reader = needed == "read" or (needed is None and (scope["method"], scope["path"]) not in PROBES)
        if is_reader and self._num_readers >= max(1, self._max_requests // 2):
            error = TryAgain(f"the limit of {self._num_readers} reading requests is reached; retry", code="overloaded")
            await problem_response(error, instance=scope["path"])(scope, receive, send)
            return
        if self._num_requests >= self._max_requests and not self._end_slowest_upload():
            error = TryAgain(f"the limit of {self._num_requests} requests is reached; retry", code="overloaded")
            await problem_response(error, instance=scope["path"])(scope, receive, send)
            return
        upload = Upload(receive, self._body_timeout_seconds)
        self._num_requests += 1
        self._num_readers += is_reader
        self._uploads.add(upload)
        try:
            await self._app(scope, upload.receive, send)
        finally:
            self._num_requests -= 1
            self._num_readers -= is_reader
            self._uploads.discard(upload)

    def _end_slowest_upload(self) -> bool:
        """End the slowest of the slow uploads, and return True if there was one."""
        now = asyncio.get_running_loop().time()
        crawling = [upload for upload in self._uploads if upload.is_crawling(now)]
        if not crawling:
            return False
        slowest = min(crawling, key=lambda upload: upload.num_bytes)
        self._uploads.discard(slowest)
        slowest.end(now)
        return True


class Upload:
    """The body of a request while it is received. Only time that the application waits for it counts."""

    def __init__(self, receive: Receive, timeout_seconds: float) -> None:
        self.num_bytes = 0
        self.is_over = False  # complete, or given up
        self.was_too_slow = False
        self._receive = receive
        self._timeout_seconds = timeout_seconds
        self._waited_seconds = 0.0
        self._waits_since: float | None = None
        self._wait: asyncio.Timeout | None = None

    async def receive(self) -> Message:
        """Return the next message. Raises HTTPException 408 for a slow body: FastAPI hides other exceptions."""
        if self.was_too_slow:
            return {"type": "http.disconnect"}
        if self.is_over:  # the application waits for the client to disconnect, which may take any time
            return await self._receive()
        loop = asyncio.get_running_loop()
        begin = self._waits_since = loop.time()
        behind = self._timeout_seconds + self.num_bytes / MIN_BODY_BYTES_PER_SECOND - self._waited_seconds
        try:
            async with asyncio.timeout_at(begin + min(self._timeout_seconds, behind)) as self._wait:
                message = await self._receive()
        except TimeoutError:
            self.is_over = self.was_too_slow = True
            raise HTTPException(
                HTTPStatus.REQUEST_TIMEOUT, f"after {self.num_bytes} bytes the body came too slowly"
            ) from None
        finally:
            self._wait = self._waits_since = None
        self._waited_seconds += loop.time() - begin
        self.num_bytes += len(message.get("body", b""))
        self.is_over = not message.get("more_body", False)
        return message

    def is_crawling(self, now: float) -> bool:
        """Return True if the application waits for the upload, and it is slow enough to be ended for another."""
        if self._waits_since is None:
            return False
        waited = self._waited_seconds + now - self._waits_since
        return waited > HURRIED_SECONDS and self.num_bytes < HURRIED_BYTES_PER_SECOND * waited

    def end(self, now: float) -> None:
        """Time out the current wait."""
        if self._wait is not None and not self._wait.expired():  # else it is about to time out by itself
            self._wait.reschedule(now)
