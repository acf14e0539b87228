"""One end of an HTTP/2 connection (RFC 9113): frames in and out, windows, settings, and the end.

    socket ──► FrameReader ──► DATA: straight into `stream.sink` (`get_buffer` hands its memory to the kernel)
                          └──► others: whole, then `..._received`
    stream.outgoing ──► `pump` ──► FrameWriter ──► socket

Everything happens on the event loop, in callbacks that wait for nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import ClassVar

from hpack import Decoder, Encoder, HPACKError

from . import frames
from .frames import Code, ViolationError
from .reader import MAX_FRAME_BYTES, MAX_HEADER_BYTES, FrameReader
from .stream import Headers, Stream, StreamResetError
from .writer import FrameWriter

MAX_UNSENT_CONTROL_BYTES = 256 * 1024  # of answers to somebody who does not read them
MAX_USELESS_FRAMES = 10_000  # in a row, between two that carry a part of a body, in either direction
USEFUL_BYTES = 64  # of a frame that is sent: an ordinary end may have a small window, but not as small as this
CLOSE_SECONDS = 5.0  # for the other end to read why the connection is closed
CONNECTION_WINDOW = 1 << 30  # the streams' windows are what holds the other end back

_CODE_NAMES = {code.value: code.name for code in Code}


class Connection(asyncio.BufferedProtocol):
    """What both ends have in common. A child says what headers mean, and makes streams."""

    preface: ClassVar[bytes]  # what this end says first
    tops_up: ClassVar[bool]  # whether streams' windows are kept open, whatever their sinks have room for

    def __init__(self, settings: Mapping[int, int], stream_window: int) -> None:
        """`settings` are told to the other end, with a `stream_window` for each new stream."""
        self.streams: dict[int, Stream] = {}  # those that are not over
        self.is_closing = False  # no new streams
        self.peer_max_streams = 100
        self.received_bytes = 0
        self.sent_bytes = 0  # of bodies, in whole frames: answers to control frames are no progress
        self.highest_stream = 0  # that the other end has opened, or we have
        self._settings = {frames.INITIAL_WINDOW_SIZE: stream_window, frames.MAX_FRAME_SIZE: MAX_FRAME_BYTES, **settings}
        self._stream_window = stream_window
        self._encoder = Encoder()
        self._decoder = Decoder(max_header_list_size=MAX_HEADER_BYTES)
        self._reader = FrameReader(self)
        self._receive_window = CONNECTION_WINDOW
        self._num_useless = 0
        self._writer = FrameWriter(self.streams, self._frame_sent)
        self._peer_stream_window = frames.DEFAULT_WINDOW
        self._transport: asyncio.Transport

    def __repr__(self) -> str:
        return f"<{type(self).__name__} [{len(self.streams)} streams | {self.received_bytes} bytes received]>"

    @property
    def is_in_frame(self) -> bool:
        """Whether a frame, or a header block, has begun and is not whole; a body apart."""
        return self._reader.is_in_frame

    @property
    def num_frames(self) -> int:
        """Frames that have come, DATA apart."""
        return self._reader.num_frames

    @property
    def is_sending(self) -> bool:
        """Whether there is something that the other end has not taken."""
        return (
            self._writer.is_in_frame
            or self._writer.is_paused
            or any(stream.outgoing for stream in self.streams.values())
        )

    # ------------------------------------------------------------------ what a child says

    def headers_received(self, stream: Stream, headers: Headers) -> None:
        """The other end's headers are complete; its body follows unless `stream.is_remote_over`."""
        raise NotImplementedError

    def open_stream(self, number: int) -> Stream | None:
        """The other end begins a stream: return a new one, or None to refuse it. Raises ViolationError."""
        raise NotImplementedError

    def stream_over(self, stream: Stream) -> None:
        """It is over in both directions, or was ended; it is not in `streams` any more."""

    def goaway_received(self, last_stream: int) -> None:
        """The other end takes no new streams, and has not looked at those above this one."""
        self.is_closing = True

    # ------------------------------------------------------------------ asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._writer.begin(transport)
        # The window of the connection does not count in SETTINGS.
        window = frames.pack_number(frames.WINDOW_UPDATE, 0, CONNECTION_WINDOW - frames.DEFAULT_WINDOW)
        self._writer.queue(self.preface + frames.pack_settings(self._settings) + window)
        self.pump()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        self.is_closing = True
        for stream in [*self.streams.values()]:
            self.lose(stream, StreamResetError(Code.CONNECT_ERROR, f"the connection is lost: {exc or 'closed'}"))
        self._writer.end()

    def get_buffer(self, sizehint: int) -> memoryview:
        """See asyncio."""
        return self._reader.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        """See asyncio."""
        self.received_bytes += nbytes
        try:
            self._reader.received(nbytes)
        except ViolationError as violation:
            self.abort(violation.code, str(violation))
            return
        self.pump()

    def take(self, data: bytes) -> None:
        """The same for bytes that somebody else has read from the transport."""
        rest = memoryview(data)
        while len(rest) and not self._transport.is_closing():
            room = self.get_buffer(len(rest))
            count = min(len(room), len(rest))
            room[:count] = rest[:count]
            del room
            self.buffer_updated(count)
            rest = rest[count:]

    def eof_received(self) -> None:
        """See asyncio: the transport closes itself."""

    def pause_writing(self) -> None:
        """See asyncio."""
        self._writer.is_paused = True

    def resume_writing(self) -> None:
        """See asyncio."""
        self._writer.is_paused = False
        self.pump()

    # ------------------------------------------------------------------ reading, see Receiver

    @property
    def is_over(self) -> bool:
        """See Receiver."""
        return self._transport.is_closing()

    def data_begun(self, number: int, flags: int, length: int, payload: int) -> Stream | None:
        """See Receiver."""
        if not payload and not flags & frames.END_STREAM:
            self.useless()
        self._receive_window -= length
        if self._receive_window < 0:
            raise ViolationError(Code.FLOW_CONTROL_ERROR, "more bytes than the connection's window")
        stream = self.streams.get(number)
        if stream is None:
            self.check_not_idle(number)
            self.useless()  # of a stream that is over: on its way when that was decided
            return None
        if stream.is_remote_over:
            self.violated(stream, Code.STREAM_CLOSED, "data behind the end of a stream")
            return None
        if stream.headers is None:
            raise ViolationError(Code.PROTOCOL_ERROR, "data before headers")
        stream.receive_window -= length
        if stream.receive_window < 0:
            raise ViolationError(Code.FLOW_CONTROL_ERROR, "more bytes than the stream's window")
        if payload:
            self._num_useless = 0
        if stream.expected_bytes is not None and stream.received_bytes + payload > stream.expected_bytes:
            self.violated(stream, Code.PROTOCOL_ERROR, "the body is longer than its Content-Length")
            return None
        return stream

    def data_received(self, stream: Stream, num_bytes: int, data: memoryview | None) -> None:
        """See Receiver."""
        assert stream.sink is not None
        stream.received_bytes += num_bytes
        try:
            if data is None:
                stream.sink.landed(num_bytes)
            else:
                stream.sink.feed(data)
        except Exception as error:  # whatever it does not like ends this stream alone
            self._queue(frames.pack_number(frames.RST_STREAM, stream.number, Code.CANCEL))
            failure = StreamResetError(Code.CANCEL, f"what came could not be used: {error}")
            failure.__cause__ = error
            self.lose(stream, failure)

    def data_over(self, stream: Stream | None, flags: int) -> None:
        """See Receiver."""
        if self._receive_window < CONNECTION_WINDOW // 2:
            self._queue(frames.pack_number(frames.WINDOW_UPDATE, 0, CONNECTION_WINDOW - self._receive_window))
            self._receive_window = CONNECTION_WINDOW
        if stream is None or stream.is_over:
            return
        if flags & frames.END_STREAM:
            self._remote_over(stream)
        elif stream.receive_window < self._stream_window // 2 and stream.sink is not None:
            self.grant(stream, self._stream_window if self.tops_up else len(stream.sink.room()))

    def _remote_over(self, stream: Stream) -> None:
        if stream.expected_bytes not in (None, stream.received_bytes):
            self.violated(stream, Code.PROTOCOL_ERROR, "the body is shorter than its Content-Length")
            return
        stream.is_remote_over = True
        stream.wake()
        self._end_if_over(stream)

    def block_received(self, number: int, flags: int, block: bytes) -> None:
        """See Receiver."""
        try:
            headers: Headers = list(self._decoder.decode(block, raw=True))
        except HPACKError as error:
            raise ViolationError(Code.COMPRESSION_ERROR, f"headers that cannot be read: {error}") from None
        is_last = bool(flags & frames.END_STREAM)
        stream = self.streams.get(number)
        if stream is None:
            stream = self.open_stream(number)
            if stream is None:
                return
            self.streams[number] = stream
            self._num_useless = 0
        elif stream.is_remote_over:
            self.violated(stream, Code.STREAM_CLOSED, "headers behind the end of a stream")
            return
        elif stream.headers is not None:  # trailers, which are checked and dropped
            if not is_last:
                self.violated(stream, Code.PROTOCOL_ERROR, "trailers that do not end the stream")
            elif any(name[:1] in (b"", b":") or name != name.lower() for name, _ in headers):
                self.violated(stream, Code.PROTOCOL_ERROR, "trailers with a malformed name")
            else:
                self._remote_over(stream)
            return
        self.headers_received(stream, headers) if not is_last else self._last_headers(stream, headers)

    def frame_received(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        """See Receiver."""
        if kind == frames.WINDOW_UPDATE:
            self._on_window_update(number, frames.unpack_number(payload))
        elif kind == frames.RST_STREAM:
            self._on_reset(number, frames.unpack_number(payload))
        elif kind == frames.SETTINGS:
            self._on_settings(flags, number, payload)
        elif kind == frames.PING:
            self._on_ping(flags, number, payload)
        elif kind == frames.GOAWAY:
            self._check_form(number == 0, len(payload) >= 8, "GOAWAY")
            self.goaway_received(int.from_bytes(payload[:4], "big") & frames.MAX_WINDOW)
        elif kind == frames.PUSH_PROMISE:
            raise ViolationError(Code.PROTOCOL_ERROR, "pushed streams are not wanted")
        else:
            self.useless()  # PRIORITY, and kinds that are not known, mean nothing
            if kind == frames.PRIORITY:
                self._check_form(number > 0, len(payload) == 5, "PRIORITY")

    def useless(self) -> None:
        """Count a frame that brings nothing. Raises ViolationError when there are too many of them."""
        self._num_useless += 1
        if self._num_useless > MAX_USELESS_FRAMES:
            raise ViolationError(Code.ENHANCE_YOUR_CALM, f"{self._num_useless} frames that bring nothing")

    def _check_form(self, is_right_stream: bool, is_right_size: bool, name: str) -> None:
        if not is_right_stream:
            raise ViolationError(Code.PROTOCOL_ERROR, f"{name} of a stream that has none")
        if not is_right_size:
            raise ViolationError(Code.FRAME_SIZE_ERROR, f"{name} of another size")

    def check_not_idle(self, number: int) -> None:
        """Raise ViolationError for a stream that was never opened. Servers, which open even ones, push nothing here."""
        if number % 2 == 0 or number > self.highest_stream:
            raise ViolationError(Code.PROTOCOL_ERROR, f"a frame of stream {number}, which was never opened")

    def _last_headers(self, stream: Stream, headers: Headers) -> None:
        stream.is_remote_over = True  # first, since the child looks at it
        self.headers_received(stream, headers)
        if not stream.is_over and stream.expected_bytes not in (None, 0):
            self.violated(stream, Code.PROTOCOL_ERROR, "the body is shorter than its Content-Length")
        self._end_if_over(stream)

    def _on_window_update(self, number: int, increment: int) -> None:
        self.useless()
        increment &= frames.MAX_WINDOW  # the highest bit is reserved
        if number == 0:
            if not increment:
                raise ViolationError(Code.PROTOCOL_ERROR, "a window that does not grow")
            self._writer.window += increment
            if self._writer.window > frames.MAX_WINDOW:
                raise ViolationError(Code.FLOW_CONTROL_ERROR, "the connection's window is too large")
            return
        stream = self.streams.get(number)
        if stream is None:
            self.check_not_idle(number)
            return
        stream.send_window += increment
        if not increment:
            self.violated(stream, Code.PROTOCOL_ERROR, "a window that does not grow")
        elif stream.send_window > frames.MAX_WINDOW:
            self.violated(stream, Code.FLOW_CONTROL_ERROR, "the stream's window is too large")

    def _on_reset(self, number: int, code: int) -> None:
        stream = self.streams.get(number)
        if stream is None:
            self.check_not_idle(number)
            self.useless()
            return
        name = _CODE_NAMES.get(code, str(code))
        self.stream_reset(stream)
        self.lose(stream, StreamResetError(code, f"the other end has reset the stream: {name}"))

    def stream_reset(self, stream: Stream) -> None:
        """The other end ends a stream before its time, or makes us do so. Raises ViolationError if too often."""

    def violated(self, stream: Stream, code: Code, text: str) -> None:
        """The other end has broken the protocol on one stream. Raises ViolationError if it does so too often."""
        self.reset(stream, code, text)
        self.stream_reset(stream)

    def _on_settings(self, flags: int, number: int, payload: bytes) -> None:
        self.useless()
        self._check_form(number == 0, not (flags & frames.ACK and payload), "SETTINGS")
        if flags & frames.ACK:
            return
        for name, value in frames.unpack_settings(payload):
            if name == frames.INITIAL_WINDOW_SIZE:
                gain, self._peer_stream_window = value - self._peer_stream_window, value
                for stream in self.streams.values():
                    stream.send_window += gain
                    if stream.send_window > frames.MAX_WINDOW:
                        raise ViolationError(Code.FLOW_CONTROL_ERROR, "a stream's window is too large")
            elif name == frames.MAX_FRAME_SIZE:
                self._writer.frame_bytes = min(value, MAX_FRAME_BYTES)
            elif name == frames.HEADER_TABLE_SIZE:
                self._encoder.header_table_size = min(value, 4096)
            elif name == frames.MAX_CONCURRENT_STREAMS:
                self.peer_max_streams = value
        self._queue(frames.pack(frames.SETTINGS, frames.ACK, 0))
        self.settings_received()

    def settings_received(self) -> None:
        """The other end has said what it wants."""

    def _on_ping(self, flags: int, number: int, payload: bytes) -> None:
        self.useless()
        self._check_form(number == 0, len(payload) == 8, "PING")
        if not flags & frames.ACK:
            self._queue(frames.pack(frames.PING, frames.ACK, 0, payload))

    # ------------------------------------------------------------------ writing

    def new_stream(self, number: int) -> Stream:
        """Not among `streams` yet."""
        self.highest_stream = number
        return Stream(self, number, self._peer_stream_window, self._stream_window)

    def send_headers(self, stream: Stream, headers: Headers, *, is_last: bool = False) -> None:
        """Queue headers; they are written with what comes next, or with `pump`."""
        block = self._encoder.encode(headers)
        self._queue(frames.pack_headers(stream.number, block, self._writer.frame_bytes, is_last=is_last))
        if is_last:
            stream.is_local_over = True
            self._end_if_over(stream)

    def grant(self, stream: Stream, num_bytes: int) -> None:
        """Let the other end send so many bytes from now on, if it may not already."""
        num_bytes = min(num_bytes, frames.MAX_WINDOW)
        if num_bytes > stream.receive_window and not stream.is_remote_over and not stream.is_over:
            self._queue(frames.pack_number(frames.WINDOW_UPDATE, stream.number, num_bytes - stream.receive_window))
            stream.receive_window = num_bytes
            self.pump()

    def ping(self) -> None:
        """Ask for a sign of life."""
        self._queue(frames.pack(frames.PING, 0, 0, b"gradpost"))
        self.pump()

    def go_away(self) -> None:
        """Take no new streams, and close once those that there are have ended."""
        if not self.is_closing:
            self.is_closing = True
            self._queue(self._pack_goaway(Code.NO_ERROR, ""))
            self.pump()
        self._close_if_done()

    def reset(self, stream: Stream, code: Code, text: str) -> None:
        """End a stream before its time."""
        self._queue(frames.pack_number(frames.RST_STREAM, stream.number, code))
        self.lose(stream, StreamResetError(code, text))
        self.pump()

    def refuse(self, number: int) -> None:
        """Do not open a stream; the other end may try again. Raises ViolationError if it does so too often."""
        self.useless()
        self._queue(frames.pack_number(frames.RST_STREAM, number, Code.REFUSED_STREAM))

    def abort(self, code: Code, text: str) -> None:
        """End the connection, and say why if that can be said at once."""
        if not self._transport.is_closing():
            self._writer.write_last(self._pack_goaway(code, text))
            self._transport.close()
            # Which waits for the other end to take what is written.
            asyncio.get_running_loop().call_later(CLOSE_SECONDS, self._transport.abort)
        self.connection_lost(ConnectionError(text))

    def _pack_goaway(self, code: Code, text: str) -> bytes:
        looked_at = 0 if self.preface else self.highest_stream  # of the other end's streams; servers begin none
        return frames.pack_goaway(looked_at, code, text)

    def _queue(self, frame: bytes) -> None:
        self._writer.queue(frame)
        if self._writer.num_queued > MAX_UNSENT_CONTROL_BYTES:
            self.abort(Code.ENHANCE_YOUR_CALM, "answers that are not read")

    def pump(self) -> None:
        """Write what may be written now."""
        self._writer.pump()
        if self.is_closing:
            self._close_if_done()

    def _frame_sent(self, stream: Stream, num_bytes: int, is_last: bool) -> None:
        if num_bytes >= USEFUL_BYTES:
            self._num_useless = 0
        self.sent_bytes += num_bytes
        stream.sent_bytes += num_bytes
        stream.is_local_over = is_last
        if not stream.outgoing:
            stream.wake()
        self._end_if_over(stream)

    # ------------------------------------------------------------------ ends of streams

    def _end_if_over(self, stream: Stream) -> None:
        if stream.is_over and not stream.is_being_written and stream.number in self.streams:
            self.lose(stream, None)

    def lose(self, stream: Stream, error: StreamResetError | None) -> None:
        """Let go of it, and of all memory that it was lent; without an error if it is over."""
        self._writer.let_go(stream)
        self._reader.let_go(stream)
        if error is not None:
            stream.error = stream.error or error
            stream.outgoing.clear()
            if not stream.is_remote_over:
                stream.sink = None
        if self.streams.pop(stream.number, None) is not None:
            stream.wake()
            self.stream_over(stream)
        self._close_if_done()

    def _close_if_done(self) -> None:
        if self.is_closing and not self.streams and self._writer.has_written_all:
            self._transport.close()
