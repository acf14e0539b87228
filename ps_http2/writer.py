"""The order of frames: control frames first, then DATA, one frame at a time.

The body of the oldest stream that may send goes first. Its bytes are views of its owner's memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Protocol

from . import frames
from .stream import Stream

MAX_PARTS = 256  # for one write; Linux takes 1,024
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
        self._rest: deque[memoryview] = deque()  # of the DATA frame that follows: parts of a body
        self._rest_stream: Stream | None = None  # None if the stream was released
        self._frame = (0, False)  # its bytes, and whether it has END_STREAM

    @property
    def is_in_frame(self) -> bool:
        """True while a DATA frame is partly written."""
        return bool(self._rest)

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
        if not len(self._begun) and not self._rest:
            num_bytes = 0  # of small payloads, which are written together
            while num_bytes < SMALL_BYTES and (stream := self._next_stream()) is not None:
                self._start_frame(stream)
                num_bytes += self._frame[0]
            self._begun = memoryview(self._pop_queued())
        parts = [self._begun] if len(self._begun) else []
        parts += islice(self._rest, MAX_PARTS)
        return parts

    def advance(self, num_bytes: int) -> None:
        """Count bytes of `next_parts` as written."""
        num_begun = min(num_bytes, len(self._begun))
        self._begun, num_bytes = self._begun[num_begun:], num_bytes - num_begun
        while num_bytes and num_bytes >= len(self._rest[0]):
            num_bytes -= len(self._rest.popleft())
            if not self._rest and (stream := self._rest_stream) is not None:
                self._rest_stream = None
                self._on_sent(stream, *self._frame)
        if num_bytes:
            self._rest[0] = self._rest[0][num_bytes:]

    def release(self, stream: Stream) -> None:
        """Stop referring to the stream's memory. The rest of a frame that has been started is copied."""
        if self._rest_stream is stream:
            self._rest, self._rest_stream = deque([memoryview(b"".join(self._rest))]), None
            stream.is_being_written = False

    def finish(self, frame: bytes) -> bytes:
        """Return the last bytes to be written: what is queued, and this frame; none within a DATA frame."""
        last = b"" if self.is_in_frame else bytes(self._begun) + self._pop_queued() + frame
        self.stop()
        return last

    def stop(self) -> None:
        """Drop everything."""
        self._pop_queued()
        self._begun = memoryview(b"")
        self._rest.clear()
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
        size = min(stream.send_window, self.window, self.frame_bytes)  # at most
        payload: deque[memoryview] = deque()
        num_bytes = 0
        while stream.outgoing and num_bytes < size:
            part = stream.outgoing.popleft()
            if len(part) > size - num_bytes:
                stream.outgoing.appendleft(part[size - num_bytes :])
                part = part[: size - num_bytes]
            payload.append(part)
            num_bytes += len(part)
        stream.send_window -= num_bytes
        self.window -= num_bytes
        end_stream = stream.ends_with_outgoing and not stream.outgoing
        flags = frames.END_STREAM if end_stream else 0
        self._frame = num_bytes, end_stream
        self._queued.append(frames.pack_frame_header(num_bytes, frames.DATA, flags, stream.stream_id))
        stream.is_being_written = True
        if num_bytes <= SMALL_BYTES:
            self._queued += payload  # which is copied at once
            self._on_sent(stream, *self._frame)
        else:
            self._rest, self._rest_stream = payload, stream
