"""Writing of frames: control frames first, then DATA, one frame at a time.

The body of the oldest stream that may send goes first. It is written from its owner's memory, a part at a time.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping

from . import frames
from .stream import Stream

PART_BYTES = 1024 * 1024  # of a body, for one write; asyncio copies what the kernel does not take of it
KEEPS_VIEWS = sys.version_info >= (3, 12)  # asyncio keeps a view of what the kernel does not take, without a copy
SMALL_BYTES = 64 * 1024  # a copy costs less than a system call of its own, here and at the receiver


class FrameWriter:
    """A queue of control frames, and the DATA frame that is being written. No method waits."""

    def __init__(self, streams: Mapping[int, Stream], on_sent: Callable[[Stream, int, bool], None]) -> None:
        """`on_sent` is called for each written DATA frame with its stream, its bytes, and whether it has END_STREAM."""
        self.window = frames.DEFAULT_WINDOW  # of the connection
        self.frame_bytes = frames.MIN_FRAME_BYTES  # largest payload that the peer accepts
        self.num_queued = 0  # bytes of control frames
        self.is_paused = False  # by the transport
        self._streams = streams
        self._on_sent = on_sent
        self._queued: list[bytes | memoryview] = []
        self._rest = memoryview(b"")  # of the DATA frame that is being written
        self._rest_stream: Stream | None = None  # None if the stream was released
        self._frame = (0, False)  # its bytes, and whether it has END_STREAM
        self._transport: asyncio.Transport

    @property
    def is_in_frame(self) -> bool:
        """True while a DATA frame is partly written."""
        return len(self._rest) > 0

    @property
    def has_written_all(self) -> bool:
        """True if nothing is queued, here or in the transport."""
        return not (self._queued or self.is_in_frame or self.is_paused)

    def start(self, transport: asyncio.Transport) -> None:
        """Write to this transport from now on."""
        self._transport = transport
        # Data that the kernel does not take waits here, not in a copy. With TLS a limit of 0 would pause forever.
        transport.set_write_buffer_limits(high=1, low=0)

    def queue(self, frame: bytes) -> None:
        """Write a control frame with the next `pump`."""
        self._queued.append(frame)
        self.num_queued += len(frame)

    def pump(self) -> None:
        """Write as much as the windows and the transport allow."""
        while not self.is_paused and not self._transport.is_closing():
            if len(self._rest):
                part = self._rest[:PART_BYTES]
                self._rest = self._rest[len(part) :]
                self._transport.write(bytes(part) if KEEPS_VIEWS else part)
                if not len(self._rest):
                    stream, self._rest_stream = self._rest_stream, None
                    if stream is not None:
                        self._on_sent(stream, *self._frame)
                continue
            stream = self._next_stream()
            if stream is not None:
                self._start_frame(stream)
            if self._queued:
                self._transport.write(self._pop_queued())
            if stream is None:
                break

    def release(self, stream: Stream) -> None:
        """Stop referring to the stream's memory. The rest of a frame that has been started is copied."""
        if self._rest_stream is stream:
            self._rest, self._rest_stream = memoryview(bytes(self._rest)), None
            stream.is_being_written = False

    def write_last(self, frame: bytes) -> None:
        """Write the queue and this frame, even if paused; within a DATA frame nothing, since that would corrupt it."""
        queued = self._pop_queued()
        if not self.is_in_frame:
            self._transport.write(queued + frame)

    def stop(self) -> None:
        """Drop the DATA frame that is being written."""
        self._rest, self._rest_stream = memoryview(b""), None

    def _pop_queued(self) -> bytes:
        queued, self._queued, self.num_queued = b"".join(self._queued), [], 0
        return queued

    def _next_stream(self) -> Stream | None:
        for stream in self._streams.values():
            if stream.outgoing and self.window > 0:
                if stream.send_window > 0:
                    return stream
                stream.was_blocked = True
            if stream.ends_with_outgoing and not stream.outgoing and not stream.is_local_closed:
                return stream
        return None

    def _start_frame(self, stream: Stream) -> None:
        """Queue the frame header, and a small payload with it; a large one is written by `pump`."""
        if stream.outgoing:
            data = stream.outgoing[0]
            size = min(len(data), stream.send_window, self.window, self.frame_bytes)
            stream.send_window -= size
            self.window -= size
            if size == len(data):
                stream.outgoing.popleft()
            else:
                stream.outgoing[0] = data[size:]
            payload = data[:size]
        else:
            payload = memoryview(b"")
        end_stream = stream.ends_with_outgoing and not stream.outgoing
        flags = frames.END_STREAM if end_stream else 0
        self._frame = len(payload), end_stream
        self._queued.append(frames.pack_frame_header(len(payload), frames.DATA, flags, stream.stream_id))
        stream.is_being_written = True
        if len(payload) <= SMALL_BYTES:
            self._queued.append(payload)  # `pump` writes it at once
            self._on_sent(stream, *self._frame)
        else:
            self._rest, self._rest_stream = payload, stream
