"""The server's end of an HTTP/2 connection, for uvicorn: what it takes, for how long it waits, and whom it cuts off."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, MutableSet
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp

from . import frames
from .asgi import log, read_scope, start_request
from .connection import Connection
from .frames import Code, ViolationError
from .local_sockets import enlarge_buffer
from .reader import MAX_HEADER_BYTES
from .stream import Headers, Stream, content_length

MAX_STREAMS = 100  # of one connection
STREAM_WINDOW = frames.DEFAULT_WINDOW  # of a body until somebody wants it
MAX_SKIPPED = 16  # ranges of streams; ordinary clients skip none
MAX_RESETS = 100  # of streams that were not answered, more than of those that were
PING_INTERVAL_SECONDS = 30.0
PING_TIMEOUT_SECONDS = 20.0
MIN_BYTES_PER_SECOND = 4 * 1024  # who takes less of a reply takes nothing
LOOKS = 4  # in the time after which something is cut off
LAND_SECONDS = 1.0  # at most, until an application hears of a body that lands in its memory


@dataclass(slots=True)
class _Progress:
    """The last time at which enough bytes had been sent."""

    seconds: float
    num_bytes: int = 0

    def observe(self, num_bytes: int, now: float, elapsed: float) -> bool:
        is_enough = num_bytes - self.num_bytes > MIN_BYTES_PER_SECOND * elapsed
        if is_enough:
            self.seconds = now
        self.num_bytes = num_bytes
        return is_enough


class ServerConnection(Connection):
    """One connection of uvicorn's, from behind the preface on."""

    preface = b""
    tops_up = False

    def __init__(
        self,
        app: ASGIApp,
        *,
        header_timeout_seconds: float,
        body_timeout_seconds: float,
        connections: MutableSet[Any],
        tasks: MutableSet[asyncio.Task[None]],
        default_headers: Callable[[], Headers],
    ) -> None:
        super().__init__(
            {frames.MAX_CONCURRENT_STREAMS: MAX_STREAMS, frames.MAX_HEADER_LIST_SIZE: MAX_HEADER_BYTES},
            STREAM_WINDOW,
        )
        self.client: tuple[str, int] | None = None
        self._app = app
        self._header_timeout_seconds = header_timeout_seconds
        self._body_timeout_seconds = body_timeout_seconds
        self._connections, self._tasks = connections, tasks
        self._default_headers = default_headers
        self._skipped: deque[range] = deque(maxlen=MAX_SKIPPED)  # streams that can no longer be opened
        self._num_running = 0  # requests; that of a stream which was reset goes on
        self._num_unanswered = 0  # streams that were reset, less those that were not
        self._look_timer: asyncio.TimerHandle | None = None

    # ------------------------------------------------------------------ life

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        super().connection_made(transport)
        self._connections.add(self)
        self._loop = asyncio.get_running_loop()
        peer, own = transport.get_extra_info("peername"), transport.get_extra_info("sockname")
        if isinstance(own, bytes):  # an abstract Unix socket, whose clients have no names
            peer = own = None
            enlarge_buffer(transport.get_extra_info("socket"))
        self.client = (str(peer[0]), int(peer[1])) if peer else None
        self._facts = {
            "client": self.client,
            "server": (str(own[0]), int(own[1])) if own else None,
            "scheme": "http" if transport.get_extra_info("ssl_object") is None else "https",
        }
        now = self._loop.time()
        self._begun_at = self._looked_at = self._heard_at = now
        self._heard_bytes = 0
        self._pinged_at: float | None = None
        self._client_name = self.client[0] if self.client else "a process on this host"
        self._reply = _Progress(now)
        self._sending: dict[int, _Progress] = {}  # by stream
        self._partial = (0, now)  # how many frames there were when one was not whole, and since when
        self._period = min(self._header_timeout_seconds, self._body_timeout_seconds) / LOOKS
        self._look_timer = self._loop.call_later(self._period, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        self._connections.discard(self)
        if self._look_timer is not None:
            self._look_timer.cancel()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """See uvicorn: it stops."""
        self.go_away()

    # ------------------------------------------------------------------ requests

    def open_stream(self, number: int) -> Stream | None:
        """See Connection."""
        if number % 2 == 0:
            raise ViolationError(Code.PROTOCOL_ERROR, "clients open streams with odd numbers")
        if number <= self.highest_stream:
            if any(number in skipped for skipped in self._skipped):
                raise ViolationError(Code.PROTOCOL_ERROR, f"stream {number} begins after stream {self.highest_stream}")
            self.useless()  # the stream is closed already
            return None
        expected = self.highest_stream + 2 if self.highest_stream else 1
        if number > expected:
            self._skipped.append(range(expected, number, 2))
        if self._num_running >= MAX_STREAMS or self.is_closing:
            self.highest_stream = number
            self.refuse(number)
            return None
        return self.new_stream(number)

    def headers_received(self, stream: Stream, headers: Headers) -> None:
        """See Connection."""
        stream.headers = headers
        try:
            scope = read_scope(headers)
            stream.expected_bytes = content_length(scope["headers"])
        except ValueError as error:
            self.violated(stream, Code.PROTOCOL_ERROR, str(error))
            return
        scope.update(self._facts)
        self._num_running += 1
        land_seconds = min(LAND_SECONDS, self._body_timeout_seconds / LOOKS)
        task = start_request(stream, scope, self._app, self._default_headers(), land_seconds, self._request_done)
        self._tasks.add(task)

    def _request_done(self, task: asyncio.Task[None]) -> None:
        self._num_running -= 1
        self._tasks.discard(task)

    def stream_reset(self, stream: Stream) -> None:
        """See Connection. A client that has its whole answer may drop the rest of its body."""
        if stream.is_local_over:
            return
        self._num_unanswered += 1
        if self._num_unanswered > MAX_RESETS:
            raise ViolationError(Code.ENHANCE_YOUR_CALM, "requests that are begun and given up")

    def stream_over(self, stream: Stream) -> None:
        """See Connection."""
        if stream.error is None:
            self._num_unanswered = max(0, self._num_unanswered - 1)

    # ------------------------------------------------------------------ who does nothing

    def _look(self) -> None:
        """Every now and then: cut off who asks for nothing, does not go on, takes nothing, or is not there any more."""
        now = self._loop.time()
        elapsed, self._looked_at = now - self._looked_at, now
        if not self.is_sending:
            self._reply.seconds = now
        self._reply.observe(self.sent_bytes, now, elapsed)
        self._observe_streams(now, elapsed)
        if self.received_bytes != self._heard_bytes:
            self._heard_bytes, self._heard_at, self._pinged_at = self.received_bytes, now, None
        if not self.is_in_frame or self.num_frames != self._partial[0]:
            self._partial = (self.num_frames, now)
        if self.highest_stream == 0 and now - self._begun_at >= self._header_timeout_seconds:
            self._transport.abort()  # it has asked for nothing
        elif now - self._partial[1] >= self._header_timeout_seconds:
            self.abort(Code.ENHANCE_YOUR_CALM, "headers came too slowly")
        elif now - self._reply.seconds >= self._body_timeout_seconds:
            log.warning("closing a connection whose client does not take its replies", client=self._client_name)
            self._transport.abort()
        elif self._pinged_at is not None and now - self._pinged_at >= PING_TIMEOUT_SECONDS:
            self._transport.abort()
        elif self._pinged_at is None and now - self._heard_at >= PING_INTERVAL_SECONDS:
            self._pinged_at = now
            self.ping()
        if self._transport.is_closing():
            return
        for number, progress in self._sending.items():
            if now - progress.seconds >= self._body_timeout_seconds and number in self.streams:
                log.warning("resetting a stream whose client does not take its reply", client=self._client_name)
                self.reset(self.streams[number], Code.CANCEL, "the client does not take the reply")
        self._look_timer = self._loop.call_later(self._period, self._look)

    def _observe_streams(self, now: float, elapsed: float) -> None:
        """Observe the progress of each reply; the client is late only while the stream's own window is closed.

        The writer prefers earlier streams. So those that have progressed move behind those that wait for their turn.
        """
        sending = [stream for stream in self.streams.values() if stream.outgoing]
        self._sending = {s.number: self._sending.get(s.number, _Progress(now, s.sent_bytes)) for s in sending}
        for stream in sending:
            progress = self._sending[stream.number]
            if progress.observe(stream.sent_bytes, now, elapsed):
                self.streams[stream.number] = self.streams.pop(stream.number)
            elif not stream.was_blocked and stream.send_window > 0:
                progress.seconds = min(now, progress.seconds + elapsed)
            stream.was_blocked = False
