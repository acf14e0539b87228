"""The server's end of an HTTP/2 connection, and the time-outs of connections over either version of HTTP."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, MutableSet
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.types import ASGIApp
from typing_extensions import override

from . import frames
from .asgi import Request, log, read_scope
from .asyncio_shell import AsyncConnection, AsyncStream
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


@dataclass(slots=True)
class Progress:
    """The last time at which enough bytes had been sent."""

    seconds: float
    num_bytes: int = 0

    def observe(self, num_bytes: int, now: float, elapsed: float) -> bool:
        """Note the number of bytes that have been sent by now; return True if it has grown enough."""
        is_enough = num_bytes - self.num_bytes > MIN_BYTES_PER_SECOND * elapsed
        if is_enough:
            self.seconds = now
        self.num_bytes = num_bytes
        return is_enough


class Watched(Protocol):
    """The members of a connection that its watch uses."""

    client: tuple[str, int] | None
    sent_bytes: int

    @property
    def is_sending(self) -> bool:
        """True while the client has not taken everything that is to be sent."""

    def awaits_headers(self) -> bool:
        """Return True before the first request, and if headers have been incomplete since the last call."""

    def headers_are_late(self) -> None:
        """End the connection."""

    def check_streams(self, now: float, elapsed: float) -> None:
        """End streams that have stalled, and a connection that is dead."""


class Watch:
    """The time limits of a connection over either version of HTTP, which are checked `CHECKS` times during each."""

    def __init__(
        self, connection: Watched, transport: asyncio.Transport, header_seconds: float, body_seconds: float
    ) -> None:
        self._connection = connection
        self._transport = transport
        self._header_seconds, self._body_seconds = header_seconds, body_seconds
        self._loop = asyncio.get_running_loop()
        self._checked_at = self._headers_since = now = self._loop.time()
        self._response = Progress(now)
        self._period = min(header_seconds, body_seconds) / CHECKS
        self._timer: asyncio.TimerHandle | None = self._loop.call_later(self._period, self._check)

    def stop(self) -> None:
        """Stop, because the connection is lost."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        connection, now = self._connection, self._loop.time()
        elapsed, self._checked_at = now - self._checked_at, now
        is_closing = self._transport.is_closing()
        if not connection.is_sending and not is_closing:
            self._response.seconds = now
        self._response.observe(connection.sent_bytes, now, elapsed)
        if not connection.awaits_headers():
            self._headers_since = now
        if now - self._response.seconds >= self._body_seconds:
            client = connection.client[0] if connection.client else "a process on this host"
            log.warning("closing a connection whose client does not take its replies", client=client)
            self._transport.abort()
        elif now - self._headers_since >= self._header_seconds and not is_closing:
            connection.headers_are_late()
        elif not is_closing:
            connection.check_streams(now, elapsed)
        if self._timer is not None:
            self._timer = self._loop.call_later(self._period, self._check)


class ServerConnection(AsyncConnection):
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
        self._watch: Watch | None = None

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
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
        self._received_at = self._loop.time()
        self._seen_bytes = 0
        self._pinged_at: float | None = None
        self._sending: dict[int, Progress] = {}  # by stream
        self._num_frames = 0  # received at the last check
        self._watch = Watch(self, self._transport, self._header_timeout_seconds, self._body_timeout_seconds)

    def feed(self, data: bytes) -> None:
        """Process bytes that another protocol has received from the transport."""
        rest = memoryview(data)
        while len(rest) and not self._transport.is_closing():
            room = self._reader.get_buffers()[0]
            count = min(len(room), len(rest))
            room[:count] = rest[:count]
            del room
            self.buffers_updated(count)  # without what follows in the socket
            rest = rest[count:]

    @override
    def end(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        if self._watch is not None:
            self._watch.stop()
        super().end(exc)

    def shutdown(self) -> None:
        """Close the connection gracefully, because uvicorn stops."""
        self.go_away()

    # ------------------------------------------------------------------ requests

    @override
    def stream_requested(self, stream_id: int) -> Stream | None:
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

    @override
    def headers_received(self, stream: Stream, headers: Headers) -> None:
        stream.headers = headers
        try:
            scope = read_scope(headers)
            stream.expected_bytes = content_length(scope["headers"])
        except ValueError as error:
            self.stream_error(stream, ErrorCode.PROTOCOL_ERROR, str(error))
            return
        scope.update(self._scope)
        read_seconds = min(READ_SECONDS, self._body_timeout_seconds / CHECKS)
        assert isinstance(stream, AsyncStream)
        request = Request(stream, scope, self._default_headers(), read_seconds)
        self._num_running += 1
        task = self._loop.create_task(request.run(self._app))
        self._tasks.add(task)
        task.add_done_callback(self._request_done)

    def _request_done(self, task: asyncio.Task[None]) -> None:
        self._num_running -= 1
        self._tasks.discard(task)

    @override
    def stream_aborted(self, stream: Stream) -> None:
        if stream.is_local_closed:
            return  # a client with its whole response may reset the rest of its body
        self._num_unanswered += 1
        if self._num_unanswered > MAX_RESETS:
            raise ProtocolError(ErrorCode.ENHANCE_YOUR_CALM, "too many requests were cancelled")

    @override
    def stream_closed(self, stream: Stream) -> None:
        if stream.error is None:
            self._num_unanswered = max(0, self._num_unanswered - 1)

    # ------------------------------------------------------------------ time-outs

    def awaits_headers(self) -> bool:
        """Implement `Watched.awaits_headers`."""
        seen, self._num_frames = self._num_frames, self._reader.num_frames
        return self.highest_stream == 0 or (self._reader.is_in_frame and self._num_frames == seen)

    def headers_are_late(self) -> None:
        """Implement `Watched.headers_are_late`."""
        if self.highest_stream == 0:
            self._transport.abort()
        else:
            self.abort(ErrorCode.ENHANCE_YOUR_CALM, "the headers came too slowly")

    def check_streams(self, now: float, elapsed: float) -> None:
        """Implement `Watched.check_streams`."""
        self._observe_streams(now, elapsed)
        self.set_low_water(1)
        if self.received_bytes != self._seen_bytes:
            self._seen_bytes, self._received_at, self._pinged_at = self.received_bytes, now, None
        if self._pinged_at is not None and now - self._pinged_at >= PING_TIMEOUT_SECONDS:
            self._transport.abort()
            return
        if self._pinged_at is None and now - self._received_at >= PING_INTERVAL_SECONDS:
            self._pinged_at = now
            self.ping()
        for stream_id, progress in self._sending.items():
            if now - progress.seconds >= self._body_timeout_seconds and stream_id in self.streams:
                client = self.client[0] if self.client else None
                log.warning("resetting a stream whose client does not take its reply", client=client)
                self.reset_stream(self.streams[stream_id], ErrorCode.CANCEL, "the client does not take the reply")

    def _observe_streams(self, now: float, elapsed: float) -> None:
        """Observe the progress of each response; a client is late only while the stream's own window is closed.

        The writer prefers earlier streams. So streams that have progressed move behind the waiting ones.
        """
        sending = [stream for stream in self.streams.values() if stream.outgoing]
        self._sending = {s.stream_id: self._sending.get(s.stream_id, Progress(now, s.sent_bytes)) for s in sending}
        for stream in sending:
            progress = self._sending[stream.stream_id]
            if progress.observe(stream.sent_bytes, now, elapsed):
                self.streams[stream.stream_id] = self.streams.pop(stream.stream_id)
            elif not stream.was_blocked and stream.send_window > 0:
                progress.seconds = min(now, progress.seconds + elapsed)
            stream.was_blocked = False
