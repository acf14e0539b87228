"""Decoding of the bytes of a connection into frames. Payload of DATA goes to the sink of its stream."""

from __future__ import annotations

from typing import Protocol

from . import frames
from .frames import ErrorCode, ProtocolError
from .stream import Stream

SMALL_BYTES = 16 * 1024  # a copy costs less than a system call of its own
BUFFER_BYTES = 16 * 1024 + frames.FRAME_HEADER_BYTES  # a large frame bypasses it
MAX_READS = 16  # of one socket, before the others have their turn
MAX_FRAME_BYTES = 1024 * 1024
MAX_HEADER_BYTES = 64 * 1024  # of one message, encoded and decoded
MAX_HEADERS = 100  # of one message; each takes 100 bytes of memory, and as little as one on the wire
MAX_CONTINUATIONS = 16


class Receiver(Protocol):
    """The connection of a reader. An exception that it raises ends the connection."""

    @property
    def has_ended(self) -> bool:
        """True once nothing more is to be read."""

    def frame_received(self, frame_type: int, flags: int, stream_id: int, payload: bytes) -> None:
        """Process a frame other than DATA and headers; the payload is empty if its type is unknown."""

    def header_block_received(self, stream_id: int, flags: int, block: bytes) -> None:
        """Process the encoded headers of a message."""

    def data_started(self, stream_id: int, flags: int, length: int, payload: int) -> Stream | None:
        """Return the stream of a DATA frame, None to discard it. `length` includes the padding, `payload` does not."""

    def data_received(self, stream: Stream, num_bytes: int, data: memoryview | None) -> None:
        """Process bytes of a payload, valid during the call; None if they are in `stream.sink` already."""

    def data_ended(self, stream: Stream | None, flags: int) -> None:
        """Process the end of a payload; without a stream if that was discarded."""


class FrameReader:
    """An incremental decoder in the manner of asyncio.BufferedProtocol, with several buffers."""

    def __init__(self, receiver: Receiver) -> None:
        self.num_frames = 0  # received, without DATA
        self._receiver = receiver
        self._buffer = bytearray(BUFFER_BYTES)
        self._num_filled = 0  # bytes of it
        self._num_direct = 0  # bytes of a sink's memory among those that `get_buffers` has returned
        self._payload_left = 0  # of the current DATA frame
        self._skipped_left = 0  # of padding, or of a frame of unknown type
        self._flags = 0
        self._stream: Stream | None = None  # of the current DATA frame, None if that is discarded
        self._unfinished: tuple[int, int, bytearray, int] | None = None  # stream, flags, header block, continuations

    @property
    def is_in_frame(self) -> bool:
        """True while a frame other than DATA, or a header block, is incomplete."""
        begun = self._num_filled or self._skipped_left
        return self._unfinished is not None or (begun > 0 and not self._payload_left)

    @property
    def num_awaited(self) -> int:
        """The bytes that the peer is bound to send next: the rest of a large DATA frame, or 1."""
        return self._payload_left if self._payload_left >= SMALL_BYTES else 1

    def release(self, stream: Stream) -> None:
        """Discard the rest of the current frame if it belongs to the stream."""
        if self._stream is stream:
            self._stream = None

    def get_buffers(self) -> list[memoryview]:
        """Return the memory of the next bytes, never empty: of a sink, if a large part goes there, and then our own."""
        self._num_direct = 0
        buffers = [memoryview(self._buffer)[self._num_filled :]]
        if self._payload_left and self._stream is not None and self._stream.sink is not None:
            room = self._stream.sink.get_buffer()[: self._payload_left]
            if len(room) >= min(SMALL_BYTES, self._payload_left):
                self._num_direct = len(room)
                buffers.insert(0, room)
        return buffers

    def buffers_updated(self, num_bytes: int) -> None:
        """Decode bytes that were written to `get_buffers()`. Raises ProtocolError, and what the receiver raises."""
        direct = min(num_bytes, self._num_direct)
        if direct:
            self._payload_received(direct, None)
        if num_bytes > direct:
            self._num_filled += num_bytes - direct
            self._parse()

    def _parse(self) -> None:
        begin, end = 0, self._num_filled
        view = memoryview(self._buffer)
        while not self._receiver.has_ended:
            if left := self._payload_left or self._skipped_left:
                count = min(left, end - begin)
                if not count:
                    break
                if self._payload_left:
                    self._payload_received(count, view[begin : begin + count])
                else:
                    self._skipped_left -= count
                begin += count
                continue
            num_parsed = self._parse_frame(view[begin:end])
            if not num_parsed:
                break
            begin += num_parsed
        self._num_filled = end - begin
        self._buffer[: end - begin] = view[begin:end]

    def _parse_frame(self, data: memoryview) -> int:
        """Parse a complete frame, or the header of one whose payload is processed in parts.

        Returns the number of bytes parsed, 0 if `data` is too short.
        """
        if len(data) < frames.FRAME_HEADER_BYTES:
            return 0
        length, frame_type, flags, stream_id = frames.unpack_frame_header(data)
        if length > MAX_FRAME_BYTES:
            is_http1 = data[:7].tobytes() == b"HTTP/1."
            raise ProtocolError(
                ErrorCode.FRAME_SIZE_ERROR, "the peer speaks HTTP/1.1" if is_http1 else f"a frame of {length} bytes"
            )
        if not self.num_frames and frame_type != frames.SETTINGS:
            raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "the first frame is not SETTINGS")
        if self._unfinished is not None and frame_type != frames.CONTINUATION:
            raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "another frame within a header block")
        if frame_type == frames.DATA:
            return self._start_data(flags, stream_id, length, data[frames.FRAME_HEADER_BYTES :])
        if frame_type > frames.CONTINUATION:
            self.num_frames += 1
            self._skipped_left = length
            self._receiver.frame_received(frame_type, flags, stream_id, b"")
            return frames.FRAME_HEADER_BYTES
        if length > MAX_HEADER_BYTES:
            raise ProtocolError(ErrorCode.ENHANCE_YOUR_CALM, f"{length} bytes of headers or settings")
        num_bytes = frames.FRAME_HEADER_BYTES + length
        if len(data) < num_bytes:
            if num_bytes > len(self._buffer):
                self._buffer = self._buffer + bytearray(num_bytes - len(self._buffer))
            return 0
        self.num_frames += 1
        payload = bytes(data[frames.FRAME_HEADER_BYTES : num_bytes])
        if frame_type == frames.HEADERS:
            self._add_headers(stream_id, flags, bytearray(frames.strip_padding(flags, payload)), 0)
        elif frame_type == frames.CONTINUATION:
            self._continue_headers(stream_id, flags, payload)
        else:
            self._receiver.frame_received(frame_type, flags, stream_id, payload)
        return num_bytes

    def _start_data(self, flags: int, stream_id: int, length: int, data: memoryview) -> int:
        is_padded = bool(flags & frames.PADDED)
        if is_padded and length and not len(data):
            return 0  # the pad length follows
        padding = data[0] if is_padded and length else 0
        if (is_padded and not length) or padding > length - is_padded:
            raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "more padding than payload")
        payload = length - is_padded - padding
        self._stream = self._receiver.data_started(stream_id, flags, length, payload)
        self._payload_left, self._skipped_left, self._flags = payload, padding, flags
        if not payload:
            self._end_data()
        return frames.FRAME_HEADER_BYTES + is_padded

    def _payload_received(self, num_bytes: int, data: memoryview | None) -> None:
        self._payload_left -= num_bytes
        if self._stream is not None and self._stream.sink is not None:
            self._receiver.data_received(self._stream, num_bytes, data)
        if not self._payload_left:
            self._end_data()

    def _end_data(self) -> None:
        stream, self._stream = self._stream, None
        self._receiver.data_ended(stream, self._flags)

    def _continue_headers(self, stream_id: int, flags: int, payload: bytes) -> None:
        if self._unfinished is None or self._unfinished[0] != stream_id:
            raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "CONTINUATION without HEADERS")
        _, first_flags, block, num_frames = self._unfinished
        if len(block) + len(payload) > MAX_HEADER_BYTES or num_frames >= MAX_CONTINUATIONS:
            raise ProtocolError(ErrorCode.ENHANCE_YOUR_CALM, "a header block that is too long")
        self._add_headers(stream_id, first_flags | flags & frames.END_HEADERS, block + payload, num_frames + 1)

    def _add_headers(self, stream_id: int, flags: int, block: bytearray, num_frames: int) -> None:
        if not flags & frames.END_HEADERS:
            self._unfinished = stream_id, flags, block, num_frames
            return
        self._unfinished = None
        self._receiver.header_block_received(stream_id, flags, bytes(block))
