"""One end of an HTTP/2 connection (RFC 9113): streams, flow control, settings and errors.

    socket ──► FrameReader ──► DATA: into `stream.sink`, whose memory `get_buffers` gives to the kernel
                          └──► other frames: complete, to `frame_received` or `header_block_received`
    stream.outgoing ──► FrameWriter ──► `pump` ──► socket

There is no socket in it: bytes and buffers go in and out. The shells (`asyncio_shell.py`, `polled_client.py`) read,
write and wait. No method waits, and one thread at a time calls them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import ClassVar

from hpack import HPACKError
from typing_extensions import override

from . import frames
from .frames import ErrorCode, ProtocolError
from .header_blocks import HeaderBlocks
from .reader import MAX_FRAME_BYTES, MAX_HEADER_BYTES, MAX_HEADERS, FrameReader, Receiver
from .stream import Headers, Stream, StreamResetError
from .writer import FrameWriter, Transport

MAX_UNSENT_CONTROL_BYTES = 256 * 1024  # a peer that does not read its acknowledgements is disconnected
MAX_UNPRODUCTIVE_FRAMES = 1000  # in a row, without a request or a part of a body; they take 10 to 30 ms
UNPRODUCTIVE_SECONDS = 60.0  # at least, for so many: an idle peer may send a PING every few seconds
PRODUCTIVE_BYTES = 64  # of a frame that is sent: an ordinary peer may have a small window, but not as small as this
CLOSE_SECONDS = 5.0  # for the peer to read the GOAWAY
LOW_WATER_BYTES = 128 * 1024  # of a body that come in one read: a millisecond at 1 Gbit/s
CONNECTION_WINDOW = 1 << 30  # flow control is left to the streams' windows

_CODE_NAMES = {code.value: code.name for code in ErrorCode}


class Connection(Receiver):
    """The common part of client and server. A subclass opens streams and interprets their headers; a shell writes."""

    stream_type: ClassVar[type[Stream]] = Stream

    preface: ClassVar[bytes]  # that this end sends first
    keeps_windows_full: bool  # restore streams' windows completely, whatever their sinks have room for

    def __init__(self, settings: Mapping[int, int], stream_window: int) -> None:
        """`settings` are sent to the peer, with a `stream_window` for each new stream."""
        self.streams: dict[int, Stream] = {}  # that are not closed
        self.is_closing = False  # no new streams
        self.peer_max_streams = 100
        self.received_bytes = 0
        self.sent_bytes = 0  # of bodies, in complete frames: acknowledgements are no progress
        self.highest_stream = 0  # opened by either end
        self._settings = {frames.INITIAL_WINDOW_SIZE: stream_window, frames.MAX_FRAME_SIZE: MAX_FRAME_BYTES, **settings}
        self._stream_window = stream_window
        self._blocks = HeaderBlocks(MAX_HEADER_BYTES)
        self._reader = FrameReader(self)
        self._receive_window = CONNECTION_WINDOW
        self._num_unproductive, self._counted_since = 0, time.monotonic()
        self._writer = FrameWriter(self.streams, self._frame_sent)
        self._peer_stream_window = frames.DEFAULT_WINDOW
        self._transport: Transport
        self._low_water = 1  # more within a large DATA frame

    def __repr__(self) -> str:
        return f"<{type(self).__name__} [{len(self.streams)} streams | {self.received_bytes} bytes received]>"

    @property
    def is_sending(self) -> bool:
        """True while the peer has not taken everything that is to be sent."""
        return self._writer.is_in_frame or self._writer.is_paused or any(s.outgoing for s in self.streams.values())

    # ------------------------------------------------------------------ implemented by subclasses

    def headers_received(self, stream: Stream, headers: Headers) -> None:
        """Process the peer's headers. Its body follows unless `stream.is_remote_closed`."""
        raise NotImplementedError

    def stream_requested(self, stream_id: int) -> Stream | None:
        """Return a new stream for headers of the peer, or None to refuse it. Raises ProtocolError."""
        raise NotImplementedError

    def stream_closed(self, stream: Stream) -> None:
        """React to the end of a stream, which is no longer in `streams`."""

    def stream_aborted(self, stream: Stream) -> None:
        """React to a stream that the peer reset or made this end reset. Raises ProtocolError if there are too many."""

    def settings_received(self) -> None:
        """React to new settings of the peer."""

    def goaway_received(self, last_stream_id: int) -> None:
        """React to GOAWAY: the peer accepts no new streams, and has not processed those above `last_stream_id`."""
        self.is_closing = True

    # ------------------------------------------------------------------ implemented by shells

    def write_parts(self) -> None:
        """Write the parts of the writer, as many as the transport takes."""
        raise NotImplementedError

    def await_bytes(self, num_bytes: int) -> None:
        """Read once so many bytes have arrived, instead of after the first one. A shell may ignore it."""

    def write_last(self, data: bytes) -> None:
        """Write the last bytes before the transport is closed, within `CLOSE_SECONDS`."""
        raise NotImplementedError

    # ------------------------------------------------------------------ called by shells

    def begin(self, transport: Transport) -> None:
        """Begin with a connected transport: this end sends its preface and settings."""
        self._transport = transport
        # SETTINGS do not change the window of the connection.
        window = frames.pack_number(frames.WINDOW_UPDATE, 0, CONNECTION_WINDOW - frames.DEFAULT_WINDOW)
        self._writer.queue(self.preface + frames.pack_settings(self._settings) + window)
        self.pump()

    def end(self, exc: Exception | None) -> None:
        """End all streams, because the transport is closed."""
        self.is_closing = True
        for stream in [*self.streams.values()]:
            text = f"the connection is lost: {exc or 'closed'}"
            self.remove_stream(stream, StreamResetError(ErrorCode.CONNECT_ERROR, text))
        self._writer.stop()

    def buffers_updated(self, num_bytes: int) -> None:
        """Process bytes that were received into the buffers of the reader."""
        self.received_bytes += num_bytes
        num_frames = self._reader.num_frames
        try:
            self._reader.buffers_updated(num_bytes)
        except ProtocolError as error:
            self.abort(error.code, str(error))
            return
        self.set_low_water(min(LOW_WATER_BYTES, self._reader.num_awaited))
        # DATA alone lets nothing be written.
        if self._writer.num_queued or self._reader.num_frames != num_frames:
            self.pump()

    def set_low_water(self, num_bytes: int) -> None:
        """Let the shell read once so many bytes have arrived, which the peer is bound to send, or the end.

        Each read costs more than a copy of its bytes. Checks for stalled peers set it to 1, to see what has arrived.
        """
        if num_bytes != self._low_water:
            self._low_water = num_bytes
            self.await_bytes(num_bytes)

    # ------------------------------------------------------------------ receiving

    @property
    def has_ended(self) -> bool:
        return self._transport.is_closing()

    @override
    def data_started(self, stream_id: int, flags: int, length: int, payload: int) -> Stream | None:
        if not payload and not flags & frames.END_STREAM:
            self.count_unproductive_frame()
        self._receive_window -= length
        if self._receive_window < 0:
            raise ProtocolError(ErrorCode.FLOW_CONTROL_ERROR, "more bytes than the connection's window")
        stream = self.streams.get(stream_id)
        if stream is None:
            self.check_not_idle(stream_id)
            if payload < PRODUCTIVE_BYTES:  # the peer may send the rest of a large body before it reads the reset
                self.count_unproductive_frame()
            return None
        if stream.is_remote_closed:
            self.stream_error(stream, ErrorCode.STREAM_CLOSED, "DATA after END_STREAM")
            return None
        if stream.headers is None:
            raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "DATA before HEADERS")
        stream.receive_window -= length
        if stream.receive_window < 0:
            raise ProtocolError(ErrorCode.FLOW_CONTROL_ERROR, "more bytes than the stream's window")
        if payload:
            self._num_unproductive = 0
        if stream.expected_bytes is not None and stream.received_bytes + payload > stream.expected_bytes:
            self.stream_error(stream, ErrorCode.PROTOCOL_ERROR, "the body is longer than its Content-Length")
            return None
        return stream

    @override
    def data_received(self, stream: Stream, num_bytes: int, data: memoryview | None) -> None:
        assert stream.sink is not None
        stream.received_bytes += num_bytes
        try:
            if data is None:
                stream.sink.buffer_updated(num_bytes)
            else:
                stream.sink.feed(data)
        except Exception as error:  # ends this stream only
            self._queue(frames.pack_number(frames.RST_STREAM, stream.stream_id, ErrorCode.CANCEL))
            failure = StreamResetError(ErrorCode.CANCEL, f"the body cannot be used: {error}")
            failure.__cause__ = error
            self.remove_stream(stream, failure)

    @override
    def data_ended(self, stream: Stream | None, flags: int) -> None:
        if self._receive_window < CONNECTION_WINDOW // 2:
            self._queue(frames.pack_number(frames.WINDOW_UPDATE, 0, CONNECTION_WINDOW - self._receive_window))
            self._receive_window = CONNECTION_WINDOW
        if stream is None or stream.is_closed:
            return
        if flags & frames.END_STREAM:
            self._close_remote(stream)
        elif stream.receive_window < self._stream_window // 2 and stream.sink is not None:
            full = self._stream_window if self.keeps_windows_full else len(stream.sink.get_buffer())
            self.raise_window(stream, full)

    def _close_remote(self, stream: Stream) -> None:
        if stream.expected_bytes not in (None, stream.received_bytes):
            self.stream_error(stream, ErrorCode.PROTOCOL_ERROR, "the body is shorter than its Content-Length")
            return
        stream.is_remote_closed = True
        stream.notify()
        self._remove_if_closed(stream)

    @override
    def header_block_received(self, stream_id: int, flags: int, block: bytes) -> None:
        try:
            headers = self._blocks.decode(block)
        except HPACKError as error:
            raise ProtocolError(ErrorCode.COMPRESSION_ERROR, f"invalid headers: {error}") from None
        if len(headers) > MAX_HEADERS:
            raise ProtocolError(ErrorCode.ENHANCE_YOUR_CALM, f"a message has more than {MAX_HEADERS} headers")
        end_stream = bool(flags & frames.END_STREAM)
        stream = self.streams.get(stream_id)
        if stream is None:
            stream = self.stream_requested(stream_id)
            if stream is None:
                return
            self.streams[stream_id] = stream
            self._num_unproductive = 0
        elif stream.is_remote_closed:
            self.stream_error(stream, ErrorCode.STREAM_CLOSED, "HEADERS after END_STREAM")
            return
        elif stream.headers is not None:  # trailers are checked and dropped
            if not end_stream:
                self.stream_error(stream, ErrorCode.PROTOCOL_ERROR, "trailers without END_STREAM")
            elif any(name[:1] in (b"", b":") or name != name.lower() for name, _ in headers):
                self.stream_error(stream, ErrorCode.PROTOCOL_ERROR, "trailers with a malformed name")
            else:
                self._close_remote(stream)
            return
        stream.is_remote_closed = end_stream
        self.headers_received(stream, headers)
        if end_stream:
            if not stream.is_closed and stream.expected_bytes not in (None, 0):
                self.stream_error(stream, ErrorCode.PROTOCOL_ERROR, "the body is shorter than its Content-Length")
            self._remove_if_closed(stream)

    @override
    def frame_received(self, frame_type: int, flags: int, stream_id: int, payload: bytes) -> None:
        self.count_unproductive_frame()
        if frame_type == frames.WINDOW_UPDATE:
            self._on_window_update(stream_id, frames.unpack_number(payload))
        elif frame_type == frames.RST_STREAM:
            self._on_reset(stream_id, frames.unpack_number(payload))
        elif frame_type == frames.SETTINGS:
            self._on_settings(flags, stream_id, payload)
        elif frame_type == frames.PING:
            self._on_ping(flags, stream_id, payload)
        elif frame_type == frames.GOAWAY:
            self._check_form(stream_id == 0, len(payload) >= 8, "GOAWAY")
            self.goaway_received(int.from_bytes(payload[:4], "big") & frames.MAX_WINDOW)
        elif frame_type == frames.PUSH_PROMISE:
            raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "server push is disabled")
        elif frame_type == frames.PRIORITY:  # is ignored, and so are unknown types
            self._check_form(stream_id > 0, len(payload) == 5, "PRIORITY")

    def count_unproductive_frame(self) -> None:
        """Count a frame without use for a request. Raises ProtocolError if there are too many in a row."""
        self._num_unproductive += 1
        if self._num_unproductive > MAX_UNPRODUCTIVE_FRAMES:
            now = time.monotonic()
            if now - self._counted_since < UNPRODUCTIVE_SECONDS:
                raise ProtocolError(ErrorCode.ENHANCE_YOUR_CALM, f"{self._num_unproductive} frames without use")
            self._num_unproductive, self._counted_since = 0, now

    def _check_form(self, is_right_stream: bool, is_right_size: bool, name: str) -> None:
        if not is_right_stream:
            raise ProtocolError(ErrorCode.PROTOCOL_ERROR, f"{name} on a wrong stream")
        if not is_right_size:
            raise ProtocolError(ErrorCode.FRAME_SIZE_ERROR, f"{name} of a wrong size")

    def check_not_idle(self, stream_id: int) -> None:
        """Raise ProtocolError for a stream that was never opened; even ones never are, since push is disabled."""
        if stream_id % 2 == 0 or stream_id > self.highest_stream:
            raise ProtocolError(ErrorCode.PROTOCOL_ERROR, f"a frame of stream {stream_id}, which is idle")

    def _on_window_update(self, stream_id: int, increment: int) -> None:
        increment &= frames.MAX_WINDOW  # the highest bit is reserved
        if stream_id == 0:
            if not increment:
                raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "a window increment of 0")
            self._writer.window += increment
            if self._writer.window > frames.MAX_WINDOW:
                raise ProtocolError(ErrorCode.FLOW_CONTROL_ERROR, "the connection's window is too large")
            return
        stream = self.streams.get(stream_id)
        if stream is None:
            self.check_not_idle(stream_id)
            return
        stream.send_window += increment
        if not increment:
            self.stream_error(stream, ErrorCode.PROTOCOL_ERROR, "a window increment of 0")
        elif stream.send_window > frames.MAX_WINDOW:
            self.stream_error(stream, ErrorCode.FLOW_CONTROL_ERROR, "the stream's window is too large")

    def _on_reset(self, stream_id: int, code: int) -> None:
        stream = self.streams.get(stream_id)
        if stream is None:
            self.check_not_idle(stream_id)
            return
        self.stream_aborted(stream)
        self.remove_stream(stream, StreamResetError(code, f"the peer reset the stream: {_CODE_NAMES.get(code, code)}"))

    def _on_settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        self._check_form(stream_id == 0, not (flags & frames.ACK and payload), "SETTINGS")
        if flags & frames.ACK:
            return
        for name, value in dict(frames.unpack_settings(payload)).items():  # of repeated ones the last
            if name == frames.INITIAL_WINDOW_SIZE:
                gain, self._peer_stream_window = value - self._peer_stream_window, value
                for stream in self.streams.values():
                    stream.send_window += gain
                    if stream.send_window > frames.MAX_WINDOW:
                        raise ProtocolError(ErrorCode.FLOW_CONTROL_ERROR, "a stream's window is too large")
            elif name == frames.MAX_FRAME_SIZE:
                self._writer.frame_bytes = min(value, MAX_FRAME_BYTES)
            elif name == frames.MAX_CONCURRENT_STREAMS:
                self.peer_max_streams = value
        self._queue(frames.pack(frames.SETTINGS, frames.ACK, 0))
        self.settings_received()

    def _on_ping(self, flags: int, stream_id: int, payload: bytes) -> None:
        self._check_form(stream_id == 0, len(payload) == 8, "PING")
        if not flags & frames.ACK:
            self._queue(frames.pack(frames.PING, frames.ACK, 0, payload))

    # ------------------------------------------------------------------ sending

    def new_stream(self, stream_id: int) -> Stream:
        """Return a new stream, which the caller adds to `streams`."""
        self.highest_stream = stream_id
        return self.stream_type(self, stream_id, self._peer_stream_window, self._stream_window)

    def send_headers(self, stream: Stream, headers: Headers, *, end_stream: bool = False) -> None:
        """Queue headers, which are written with the next data or `pump`."""
        block = self._blocks.encode(headers)
        self._queue(frames.pack_headers(stream.stream_id, block, self._writer.frame_bytes, end_stream=end_stream))
        if end_stream:
            stream.is_local_closed = True
            self._remove_if_closed(stream)

    def raise_window(self, stream: Stream, num_bytes: int) -> None:
        """Let the peer send `num_bytes` from now on, unless its window is larger."""
        num_bytes = min(num_bytes, frames.MAX_WINDOW)
        if num_bytes > stream.receive_window and not stream.is_remote_closed and not stream.is_closed:
            self._queue(frames.pack_number(frames.WINDOW_UPDATE, stream.stream_id, num_bytes - stream.receive_window))
            stream.receive_window = num_bytes
            self.pump()

    def ping(self) -> None:
        """Send a PING, which the peer acknowledges."""
        self._queue(frames.pack(frames.PING, 0, 0, b"gradpost"))
        self.pump()

    def go_away(self) -> None:
        """Send GOAWAY, accept no new streams, and close once the open ones have ended."""
        if not self.is_closing:
            self.is_closing = True
            self._queue(self._pack_goaway(ErrorCode.NO_ERROR, ""))
            self.pump()
        self._close_if_done()

    def reset_stream(self, stream: Stream, code: ErrorCode, text: str) -> None:
        """Send RST_STREAM, and remove the stream."""
        self._queue(frames.pack_number(frames.RST_STREAM, stream.stream_id, code))
        self.remove_stream(stream, StreamResetError(code, text))
        self.pump()

    def stream_error(self, stream: Stream, code: ErrorCode, text: str) -> None:
        """Reset a stream on which the peer broke the protocol (section 5.4.2). Raises ProtocolError if too often."""
        self.reset_stream(stream, code, text)
        self.stream_aborted(stream)

    def refuse_stream(self, stream_id: int) -> None:
        """Refuse to open a stream; the peer may retry. Raises ProtocolError if it does so too often."""
        self.count_unproductive_frame()
        self._queue(frames.pack_number(frames.RST_STREAM, stream_id, ErrorCode.REFUSED_STREAM))

    def abort(self, code: ErrorCode, text: str) -> None:
        """Close the connection, with a GOAWAY unless a DATA frame is partly written."""
        if not self._transport.is_closing():
            self.write_last(self._writer.finish(self._pack_goaway(code, text)))
            self._transport.close()
        self.end(ConnectionError(text))

    def _pack_goaway(self, code: ErrorCode, text: str) -> bytes:
        last_stream_id = 0 if self.preface else self.highest_stream  # of the peer's streams; servers open none
        return frames.pack_goaway(last_stream_id, code, text)

    def _queue(self, frame: bytes) -> None:
        self._writer.queue(frame)
        if self._writer.num_queued > MAX_UNSENT_CONTROL_BYTES:
            self.abort(ErrorCode.ENHANCE_YOUR_CALM, "the peer does not read control frames")

    def pump(self) -> None:
        """Write as much as the windows and the transport allow."""
        self.write_parts()
        if self.is_closing:
            self._close_if_done()

    def _frame_sent(self, stream: Stream, num_bytes: int, end_stream: bool) -> None:
        if num_bytes >= PRODUCTIVE_BYTES:
            self._num_unproductive = 0
        self.sent_bytes += num_bytes
        stream.sent_bytes += num_bytes
        stream.is_being_written, stream.is_local_closed = False, end_stream
        if not stream.outgoing:
            stream.notify()
        self._remove_if_closed(stream)

    # ------------------------------------------------------------------ ends of streams

    def _remove_if_closed(self, stream: Stream) -> None:
        if stream.is_closed and not stream.is_being_written and stream.stream_id in self.streams:
            self.remove_stream(stream, None)

    def remove_stream(self, stream: Stream, error: StreamResetError | None) -> None:
        """Release a stream and the memory of its bodies; `error` is None if it is closed."""
        self._writer.release(stream)
        self._reader.release(stream)
        if error is not None:
            stream.error = stream.error or error
            stream.outgoing.clear()
            if not stream.is_remote_closed:
                stream.sink = None
        if self.streams.pop(stream.stream_id, None) is not None:
            stream.notify()
            self.stream_closed(stream)
        self._close_if_done()

    def _close_if_done(self) -> None:
        if self.is_closing and not self.streams and self._writer.has_written_all:
            self._transport.close()
