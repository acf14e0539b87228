"""From frames and bodies to what the kernel takes: control frames first, then DATA, a frame at a time.

The body of the oldest stream that may send goes first. It is written from its owner's memory, a piece at a time.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping

from . import frames
from .stream import Stream

PIECE_BYTES = 1024 * 1024  # of a body, for one write: what the kernel does not take of it is copied
KEEPS_VIEWS = sys.version_info >= (3, 12)  # what the kernel does not take of it is not copied, but looked at again
SMALL_BYTES = 16 * 1024  # what is rather copied than given a system call of its own


class FrameWriter:
    """`queue` keeps a frame, `pump` writes what may be written; both wait for nothing."""

    def __init__(self, streams: Mapping[int, Stream], sent: Callable[[Stream, int, bool], None]) -> None:
        """`sent` is told when a DATA frame has gone: its bytes, and whether it was the last one of its stream."""
        self.window = frames.DEFAULT_WINDOW  # what the other end takes of bodies now
        self.frame_bytes = frames.MIN_FRAME_BYTES  # payload at most
        self.num_queued = 0  # bytes of control frames
        self.is_paused = False  # by the transport
        self._streams = streams
        self._sent = sent
        self._queued: list[bytes] = []
        self._rest = memoryview(b"")  # of the DATA frame that is being written
        self._rest_stream: Stream | None = None  # whose it is; None if nobody waits for it
        self._frame = (0, False)  # its bytes in all, and whether it ends its stream
        self._transport: asyncio.Transport

    @property
    def is_in_frame(self) -> bool:
        """Whether a part of a DATA frame is still to be written."""
        return len(self._rest) > 0

    @property
    def has_written_all(self) -> bool:
        """Whether nothing waits, here or in the transport."""
        return not (self._queued or self.is_in_frame or self.is_paused)

    def begin(self, transport: asyncio.Transport) -> None:
        """From now on there is somebody to write to."""
        self._transport = transport
        # What does not fit into the kernel waits here, not in a copy. With TLS 0 would be a pause without an end.
        transport.set_write_buffer_limits(high=1, low=0)

    def queue(self, frame: bytes) -> None:
        """Write it with the next `pump`."""
        self._queued.append(frame)
        self.num_queued += len(frame)

    def pump(self) -> None:
        """Write what may be written now."""
        while not self.is_paused and not self._transport.is_closing():
            if len(self._rest):
                piece = self._rest[:PIECE_BYTES]
                self._rest = self._rest[len(piece) :]
                self._transport.write(bytes(piece) if KEEPS_VIEWS else piece)
                if not len(self._rest):
                    stream, self._rest_stream = self._rest_stream, None
                    if stream is not None:
                        self._frame_sent(stream)
                continue
            stream = self._next_stream()
            if stream is not None:
                self._begin_frame(stream)
            if self._queued:
                self._transport.write(self._take_queued())
            if stream is None:
                break

    def let_go(self, stream: Stream) -> None:
        """Look at its memory no more. The frame that has been begun goes on, from a copy."""
        if self._rest_stream is stream:
            self._rest, self._rest_stream = memoryview(bytes(self._rest)), None
            stream.is_being_written = False

    def write_last(self, frame: bytes) -> None:
        """What is queued and this, whatever the transport says; nothing if it would be read as a part of DATA."""
        queued = self._take_queued()
        if not self.is_in_frame:
            self._transport.write(queued + frame)

    def end(self) -> None:
        """Nobody is there any more."""
        self._rest, self._rest_stream = memoryview(b""), None

    def _take_queued(self) -> bytes:
        whole, self._queued, self.num_queued = b"".join(self._queued), [], 0
        return whole

    def _next_stream(self) -> Stream | None:
        for stream in self._streams.values():
            if stream.outgoing and self.window > 0:
                if stream.send_window > 0:
                    return stream
                stream.was_blocked = True
            if stream.ends_with_outgoing and not stream.outgoing and not stream.is_local_over:
                return stream
        return None

    def _begin_frame(self, stream: Stream) -> None:
        """Its head goes with the control frames, and a small payload, too."""
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
        is_last = stream.ends_with_outgoing and not stream.outgoing
        flags = frames.END_STREAM if is_last else 0
        self._frame = len(payload), is_last
        self._queued.append(frames.pack_head(len(payload), frames.DATA, flags, stream.number))
        stream.is_being_written = True
        if len(payload) <= SMALL_BYTES:
            self._queued.append(bytes(payload))
            self._frame_sent(stream)
        else:
            self._rest, self._rest_stream = payload, stream

    def _frame_sent(self, stream: Stream) -> None:
        stream.is_being_written = False
        self._sent(stream, *self._frame)
