"""From the bytes of a connection to its frames: DATA lands in the memory of who wants it, the others are read whole."""

from __future__ import annotations

from typing import Protocol

from . import frames
from .frames import Code, ViolationError
from .stream import Stream

SMALL_BYTES = 16 * 1024  # what is rather copied than given a system call of its own
BUFFER_BYTES = 16 * 1024 + frames.HEAD_BYTES  # a large frame goes past it
MAX_FRAME_BYTES = 1024 * 1024
MAX_HEADER_BYTES = 64 * 1024  # of one message, encoded and decoded
MAX_CONTINUATIONS = 16


class Receiver(Protocol):
    """Who is told what has come. What it raises ends the connection."""

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to be read."""

    def frame_received(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        """A whole frame, neither DATA nor headers; without the payload if its kind is not known."""

    def block_received(self, number: int, flags: int, block: bytes) -> None:
        """All headers of a message, encoded."""

    def data_begun(self, number: int, flags: int, length: int, payload: int) -> Stream | None:
        """A DATA frame with so many bytes of payload and padding; returns the stream that wants it."""

    def data_received(self, stream: Stream, num_bytes: int, data: memoryview | None) -> None:
        """The next bytes of its payload, which are lent; None if they are in `stream.sink` already."""

    def data_over(self, stream: Stream | None, flags: int) -> None:
        """All of its payload is here. None if nobody wants it, or not any more."""


class FrameReader:
    """`buffer` says where the next bytes belong, `received` that they are there."""

    def __init__(self, receiver: Receiver) -> None:
        self.num_frames = 0  # that have come, DATA apart
        self._receiver = receiver
        self._buffer = bytearray(BUFFER_BYTES)
        self._num_filled = 0  # bytes of it
        self._lands = False  # whether the kernel was given a sink's memory instead
        self._payload_left = 0  # of the DATA frame that is being read
        self._skipped_left = 0  # padding, or a frame of a kind that is not known
        self._flags = 0
        self._stream: Stream | None = None  # whose it is; None if nobody wants it
        self._unfinished: tuple[int, int, bytearray, int] | None = None  # stream, flags, header block, continuations

    @property
    def is_in_frame(self) -> bool:
        """Whether a frame, or a header block, has begun and is not whole; a body apart."""
        begun = self._num_filled or self._skipped_left
        return self._unfinished is not None or (begun > 0 and not self._payload_left)

    def let_go(self, stream: Stream) -> None:
        """What comes of it from now on belongs to nobody."""
        if self._stream is stream:
            self._stream = None

    def buffer(self) -> memoryview:
        """Where the next bytes belong; never empty."""
        if self._payload_left and self._stream is not None and self._stream.sink is not None:
            room = self._stream.sink.room()
            if len(room) >= min(SMALL_BYTES, self._payload_left):
                self._lands = True
                return room[: self._payload_left]
        self._lands = False
        return memoryview(self._buffer)[self._num_filled :]

    def received(self, num_bytes: int) -> None:
        """So many are there. Raises ViolationError, and what the receiver raises."""
        if self._lands:
            self._payload_received(num_bytes, None)
        else:
            self._num_filled += num_bytes
            self._parse()

    def _parse(self) -> None:
        begin, end = 0, self._num_filled
        view = memoryview(self._buffer)
        while not self._receiver.is_over:
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
            num_taken = self._parse_frame(view[begin:end])
            if not num_taken:
                break
            begin += num_taken
        self._num_filled = end - begin
        self._buffer[: end - begin] = view[begin:end]

    def _parse_frame(self, data: memoryview) -> int:
        """A whole frame, or the head of one whose payload is read as it comes.

        Returns the bytes that it takes, 0 if they are not all here yet.
        """
        if len(data) < frames.HEAD_BYTES:
            return 0
        length, kind, flags, number = frames.unpack_head(data)
        if length > MAX_FRAME_BYTES:
            is_older = data[:7].tobytes() == b"HTTP/1."
            raise ViolationError(
                Code.FRAME_SIZE_ERROR, "it speaks HTTP/1.1" if is_older else f"a frame of {length} bytes"
            )
        if not self.num_frames and kind != frames.SETTINGS:
            raise ViolationError(Code.PROTOCOL_ERROR, "it does not begin with SETTINGS")
        if self._unfinished is not None and kind != frames.CONTINUATION:
            raise ViolationError(Code.PROTOCOL_ERROR, "another frame within a header block")
        if kind == frames.DATA:
            return self._begin_data(flags, number, length, data[frames.HEAD_BYTES :])
        if kind > frames.CONTINUATION:
            self.num_frames += 1
            self._skipped_left = length
            self._receiver.frame_received(kind, flags, number, b"")
            return frames.HEAD_BYTES
        if length > MAX_HEADER_BYTES:
            raise ViolationError(Code.ENHANCE_YOUR_CALM, f"{length} bytes of headers or settings")
        num_bytes = frames.HEAD_BYTES + length
        if len(data) < num_bytes:
            self._make_room(num_bytes)
            return 0
        self.num_frames += 1
        payload = bytes(data[frames.HEAD_BYTES : num_bytes])
        if kind == frames.HEADERS:
            self._add_headers(number, flags, bytearray(frames.strip(flags, payload)), 0)
        elif kind == frames.CONTINUATION:
            self._go_on(number, flags, payload)
        else:
            self._receiver.frame_received(kind, flags, number, payload)
        return num_bytes

    def _make_room(self, num_bytes: int) -> None:
        if num_bytes > len(self._buffer):
            self._buffer = self._buffer + bytearray(num_bytes - len(self._buffer))

    # ------------------------------------------------------------------ DATA

    def _begin_data(self, flags: int, number: int, length: int, data: memoryview) -> int:
        is_padded = bool(flags & frames.PADDED)
        if is_padded and length and not len(data):
            return 0  # the length of the padding comes next
        padding = data[0] if is_padded and length else 0
        if (is_padded and not length) or padding > length - is_padded:
            raise ViolationError(Code.PROTOCOL_ERROR, "more padding than payload")
        payload = length - is_padded - padding
        self._stream = self._receiver.data_begun(number, flags, length, payload)
        self._payload_left, self._skipped_left, self._flags = payload, padding, flags
        if not payload:
            self._data_over()
        return frames.HEAD_BYTES + is_padded

    def _payload_received(self, num_bytes: int, data: memoryview | None) -> None:
        self._payload_left -= num_bytes
        if self._stream is not None and self._stream.sink is not None:
            self._receiver.data_received(self._stream, num_bytes, data)
        if not self._payload_left:
            self._data_over()

    def _data_over(self) -> None:
        stream, self._stream = self._stream, None
        self._receiver.data_over(stream, self._flags)

    # ------------------------------------------------------------------ headers

    def _go_on(self, number: int, flags: int, payload: bytes) -> None:
        if self._unfinished is None or self._unfinished[0] != number:
            raise ViolationError(Code.PROTOCOL_ERROR, "CONTINUATION of nothing")
        _, begun_flags, block, num_frames = self._unfinished
        if len(block) + len(payload) > MAX_HEADER_BYTES or num_frames >= MAX_CONTINUATIONS:
            raise ViolationError(Code.ENHANCE_YOUR_CALM, "headers without an end")
        self._add_headers(number, begun_flags | flags & frames.END_HEADERS, block + payload, num_frames + 1)

    def _add_headers(self, number: int, flags: int, block: bytearray, num_frames: int) -> None:
        if not flags & frames.END_HEADERS:
            self._unfinished = number, flags, block, num_frames
            return
        self._unfinished = None
        self._receiver.block_received(number, flags, bytes(block))
