"""The order of frames: control frames first, then DATA, one frame at a time.

The body of the oldest stream that may send goes first. Its bytes are views of its owner's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from . import frames
from .stream import Stream

PART_BYTES = 1024 * 1024  # of a body, for one write
SMALL_BYTES = 64 * 1024  # a copy costs less than a system call of its own, here and at the receiver


class Transport(Protocol):
    """The members of a transport that a connection uses itself."""

    def is_closing(self) -> bool:
        """Return whether it is closed, or will be."""

    def close(self) -> None:
        """Close it once everything is written."""

    def abort(self) -> None:
        """Close it now."""


class FrameWriter:
    """A queue of control frames, and the DATA frame that is being written. No method waits, or writes anywhere."""

    def __init__(self, streams: Mapping[int, Stream], on_sent: Callable[[Stream, int, bool], None]) -> None:
        """`on_sent` is called for each written DATA frame with its stream, its bytes, and whether it has END_STREAM."""
        self.window = frames.DEFAULT_WINDOW  # of the connection
        self.frame_bytes = frames.MIN_FRAME_BYTES  # largest payload that the peer accepts
        self.num_queued = 0  # bytes of control frames
        self.is_paused = False  # by a transport that keeps bytes which the kernel has not taken
        self._streams = streams
        self._on_sent = on_sent
        self._queued: list[bytes | memoryview] = []
        self._begun = memoryview(b"")  # of frames that were queued, the next to be written
        self._rest = memoryview(b"")  # of the DATA frame that follows
        self._rest_stream: Stream | None = None  # None if the stream was released
        self._frame = (0, False)  # its bytes, and whether it has END_STREAM

    @property
    def is_in_frame(self) -> bool:
        """True while a DATA frame is partly written."""
        return len(self._rest) > 0

    @property
    def has_written_all(self) -> bool:
        """True if nothing is queued, here or in the transport."""
        return not (self._queued or len(self._begun) or self.is_in_frame or self.is_paused)

    def queue(self, frame: bytes) -> None:
        """Let a control frame be written next."""
        self._queued.append(frame)
        self.num_queued += len(frame)

    def next_parts(self) -> list[memoryview]:
        """Return the bytes to be written next; none if the windows allow no more. `advance` says how many have been."""
        if not len(self._begun) and not len(self._rest):
            num_bytes = 0  # of small payloads, which are written together
            while num_bytes < SMALL_BYTES and not len(self._rest) and (stream := self._next_stream()) is not None:
                self._start_frame(stream)
                num_bytes += self._frame[0]
            self._begun = memoryview(self._pop_queued())
        return [part for part in (self._begun, self._rest[:PART_BYTES]) if len(part)]

    def advance(self, num_bytes: int) -> None:
        """Count bytes of `next_parts` as written."""
        num_begun = min(num_bytes, len(self._begun))
        self._begun, num_bytes = self._begun[num_begun:], num_bytes - num_begun
        if num_bytes < len(self._rest):
            self._rest = self._rest[num_bytes:]
        elif num_bytes:
            self._rest = memoryview(b"")  # an empty view would still refer to the body
            stream, self._rest_stream = self._rest_stream, None
            if stream is not None:
                self._on_sent(stream, *self._frame)

    def release(self, stream: Stream) -> None:
        """Stop referring to the stream's memory. The rest of a frame that has been started is copied."""
        if self._rest_stream is stream:
            self._rest, self._rest_stream = memoryview(bytes(self._rest)), None
            stream.is_being_written = False

    def finish(self, frame: bytes) -> bytes:
        """Return the last bytes to be written: what is queued, and this frame; none within a DATA frame."""
        last = b"" if self.is_in_frame else bytes(self._begun) + self._pop_queued() + frame
        self.stop()
        return last

    def stop(self) -> None:
        """Drop everything."""
        self._pop_queued()
        self._begun = self._rest = memoryview(b"")
        self._rest_stream = None

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
        """Queue the frame header, and a small payload with it; a large one follows."""
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
            self._queued.append(payload)  # which is copied at once
            self._on_sent(stream, *self._frame)
        else:
            self._rest, self._rest_stream = payload, stream
