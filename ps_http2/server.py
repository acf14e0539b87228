"""The server's end of an HTTP/2 connection: requests for an ASGI application, limits and time-outs."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, MutableSet
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp

from . import frames
from .asgi import Request, log, read_scope
from .connection import Connection
from .frames import ErrorCode, ProtocolError
from .local_sockets import enlarge_buffer
from .reader import MAX_HEADER_BYTES
from .stream import Headers, Stream, content_length

MAX_STREAMS = 100  # of one connection
STREAM_WINDOW = frames.DEFAULT_WINDOW  # of a body until the application reads it
MAX_SKIPPED = 16  # ranges of stream identifiers; ordinary clients skip none
MAX_RESETS = 100  # of unanswered streams, more than of answered ones
PING_INTERVAL_SECONDS = 30.0
PING_TIMEOUT_SECONDS = 20.0
MIN_BYTES_PER_SECOND = 4 * 1024  # of a response; a slower client counts as stalled
CHECKS = 4  # of progress during each time-out
READ_SECONDS = 1.0  # at most, until an application receives a part of a body

_NAMELESS = "a process on this host"


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
    """A connection that uvicorn has accepted, after the client's preface.

    `connections` and `tasks` are uvicorn's sets of both; `default_headers` returns the headers of each response.
    """

    preface = b""
    keeps_windows_full = False

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
        self._num_running = 0  # requests, including those whose stream was reset
        self._num_unanswered = 0  # streams that were reset, less answered ones
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Implement `asyncio.BaseProtocol.connection_made`."""
        super().connection_made(transport)
        self._connections.add(self)
        self._loop = asyncio.get_running_loop()
        peer, own = transport.get_extra_info("peername"), transport.get_extra_info("sockname")
        if isinstance(own, bytes):  # an abstract Unix socket, whose clients have no names
            peer = own = None
            enlarge_buffer(transport.get_extra_info("socket"))
        self.client = (str(peer[0]), int(peer[1])) if peer else None
        self._scope = {
            "client": self.client,
            "server": (str(own[0]), int(own[1])) if own else None,
            "scheme": "http" if transport.get_extra_info("ssl_object") is None else "https",
        }
        now = self._loop.time()
        self._started_at = self._checked_at = self._received_at = now
        self._seen_bytes = 0
        self._pinged_at: float | None = None
        self._response = _Progress(now)
        self._sending: dict[int, _Progress] = {}  # by stream
        self._partial = (0, now)  # the number of frames when one was incomplete, and since when
        self._period = min(self._header_timeout_seconds, self._body_timeout_seconds) / CHECKS
        self._timer = self._loop.call_later(self._period, self._check_progress)

    def connection_lost(self, exc: Exception | None) -> None:
        """Implement `asyncio.BaseProtocol.connection_lost`."""
        self._connections.discard(self)
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Close the connection gracefully, because uvicorn stops."""
        self.go_away()

    # ------------------------------------------------------------------ requests

    def stream_requested(self, stream_id: int) -> Stream | None:
        """Implement `Connection.stream_requested`."""
        if stream_id % 2 == 0:
            raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "clients open streams with odd identifiers")
        if stream_id <= self.highest_stream:
            if any(stream_id in skipped for skipped in self._skipped):
                text = f"stream {stream_id} is opened after stream {self.highest_stream}"
                raise ProtocolError(ErrorCode.PROTOCOL_ERROR, text)
            self.count_unproductive_frame()  # the stream is closed already
            return None
        expected = self.highest_stream + 2 if self.highest_stream else 1
        if stream_id > expected:
            self._skipped.append(range(expected, stream_id, 2))
        if self._num_running >= MAX_STREAMS or self.is_closing:
            self.highest_stream = stream_id
            self.refuse_stream(stream_id)
            return None
        return self.new_stream(stream_id)

    def headers_received(self, stream: Stream, headers: Headers) -> None:
        """Implement `Connection.headers_received`."""
        stream.headers = headers
        try:
            scope = read_scope(headers)
            stream.expected_bytes = content_length(scope["headers"])
        except ValueError as error:
            self.stream_error(stream, ErrorCode.PROTOCOL_ERROR, str(error))
            return
        scope.update(self._scope)
        read_seconds = min(READ_SECONDS, self._body_timeout_seconds / CHECKS)
        request = Request(stream, scope, self._default_headers(), read_seconds)
        self._num_running += 1
        task = self._loop.create_task(request.run(self._app))
        self._tasks.add(task)
        task.add_done_callback(self._request_done)

    def _request_done(self, task: asyncio.Task[None]) -> None:
        self._num_running -= 1
        self._tasks.discard(task)

    def stream_aborted(self, stream: Stream) -> None:
        """Implement `Connection.stream_aborted`. A client with its whole response may reset the rest of its body."""
        if stream.is_local_closed:
            return
        self._num_unanswered += 1
        if self._num_unanswered > MAX_RESETS:
            raise ProtocolError(ErrorCode.ENHANCE_YOUR_CALM, "too many requests were cancelled")

    def stream_closed(self, stream: Stream) -> None:
        """Implement `Connection.stream_closed`."""
        if stream.error is None:
            self._num_unanswered = max(0, self._num_unanswered - 1)

    # ------------------------------------------------------------------ time-outs

    def _check_progress(self) -> None:
        """Close connections that are idle, stalled while sending or receiving, or dead. Runs periodically."""
        now, header_seconds, body_seconds = self._loop.time(), self._header_timeout_seconds, self._body_timeout_seconds
        elapsed, self._checked_at = now - self._checked_at, now
        client = self.client[0] if self.client else _NAMELESS
        if not self.is_sending:
            self._response.seconds = now
        self._response.observe(self.sent_bytes, now, elapsed)
        self._observe_streams(now, elapsed)
        if self.received_bytes != self._seen_bytes:
            self._seen_bytes, self._received_at, self._pinged_at = self.received_bytes, now, None
        if not self._reader.is_in_frame or self._reader.num_frames != self._partial[0]:
            self._partial = (self._reader.num_frames, now)
        if self.highest_stream == 0 and now - self._started_at >= header_seconds:
            self._transport.abort()  # without any request
        elif now - self._partial[1] >= header_seconds:
            self.abort(ErrorCode.ENHANCE_YOUR_CALM, "the headers came too slowly")
        elif now - self._response.seconds >= body_seconds:
            log.warning("closing a connection whose client does not take its replies", client=client)
            self._transport.abort()
        elif self._pinged_at is not None and now - self._pinged_at >= PING_TIMEOUT_SECONDS:
            self._transport.abort()
        elif self._pinged_at is None and now - self._received_at >= PING_INTERVAL_SECONDS:
            self._pinged_at = now
            self.ping()
        if self._transport.is_closing():
            return
        for stream_id, progress in self._sending.items():
            if now - progress.seconds >= body_seconds and stream_id in self.streams:
                log.warning("resetting a stream whose client does not take its reply", client=client)
                self.reset_stream(self.streams[stream_id], ErrorCode.CANCEL, "the client does not take the reply")
        self._timer = self._loop.call_later(self._period, self._check_progress)

    def _observe_streams(self, now: float, elapsed: float) -> None:
        """Observe the progress of each response; a client is late only while the stream's own window is closed.

        The writer prefers earlier streams. So streams that have progressed move behind the waiting ones.
        """
        sending = [stream for stream in self.streams.values() if stream.outgoing]
        self._sending = {s.stream_id: self._sending.get(s.stream_id, _Progress(now, s.sent_bytes)) for s in sending}
        for stream in sending:
            progress = self._sending[stream.stream_id]
            if progress.observe(stream.sent_bytes, now, elapsed):
                self.streams[stream.stream_id] = self.streams.pop(stream.stream_id)
            elif not stream.was_blocked and stream.send_window > 0:
                progress.seconds = min(now, progress.seconds + elapsed)
            stream.was_blocked = False
