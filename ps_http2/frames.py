"""Encoding and decoding of HTTP/2 frames (RFC 9113, sections 4 and 6), without any I/O."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from struct import Struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME_HEADER_BYTES = 9
MAX_WINDOW = 2**31 - 1
DEFAULT_WINDOW = 2**16 - 1
MIN_FRAME_BYTES, MAX_FRAME_BYTES = 2**14, 2**24 - 1  # bounds of SETTINGS_MAX_FRAME_SIZE

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)

END_STREAM = ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
HAS_PRIORITY = 0x20

HEADER_TABLE_SIZE, ENABLE_PUSH, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE, MAX_HEADER_LIST_SIZE = (
    range(1, 7)
)

_FRAME_HEADER = Struct(">HBBBI")  # length in 24 bits, type, flags, stream
_SETTING = Struct(">HI")
_NUMBER = Struct(">I")


class ErrorCode(IntEnum):
    """Error codes of streams and connections (section 7)."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    CONNECT_ERROR = 10
    ENHANCE_YOUR_CALM = 11


class ProtocolError(Exception):
    """A connection error (section 5.4.1): the peer broke the protocol, and the connection ends with `code`."""

    def __init__(self, code: ErrorCode, text: str) -> None:
        super().__init__(text)
        self.code = code


def pack_frame_header(num_bytes: int, frame_type: int, flags: int, stream_id: int) -> bytes:
    """Return the header of a frame with a payload of `num_bytes`."""
    return _FRAME_HEADER.pack(num_bytes >> 8, num_bytes & 0xFF, frame_type, flags, stream_id)


def unpack_frame_header(buffer: bytes | memoryview) -> tuple[int, int, int, int]:
    """Return the payload's length, the type, the flags and the stream of the frame at the beginning of `buffer`.

    >>> unpack_frame_header(pack_frame_header(1 << 20, DATA, END_STREAM, 5))
    (1048576, 0, 1, 5)
    """
    high, low, frame_type, flags, stream_id = _FRAME_HEADER.unpack_from(buffer)
    return high << 8 | low, frame_type, flags, stream_id & MAX_WINDOW  # the highest bit is reserved


def pack(frame_type: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """Return a complete frame."""
    return pack_frame_header(len(payload), frame_type, flags, stream_id) + payload


def pack_headers(stream_id: int, block: bytes, max_bytes: int, *, end_stream: bool) -> bytes:
    """Return a HEADERS frame with an encoded field block, and CONTINUATION frames for what exceeds `max_bytes`."""
    cuts = [block[at : at + max_bytes] for at in range(0, len(block), max_bytes)] or [b""]
    packed = []
    for number, cut in enumerate(cuts, 1):
        frame_type, flags = (HEADERS, END_STREAM if end_stream else 0) if number == 1 else (CONTINUATION, 0)
        packed.append(pack(frame_type, flags | (END_HEADERS if number == len(cuts) else 0), stream_id, cut))
    return b"".join(packed)


def pack_settings(settings: Mapping[int, int]) -> bytes:
    """Return a SETTINGS frame."""
    return pack(SETTINGS, 0, 0, b"".join(_SETTING.pack(*item) for item in settings.items()))


def unpack_settings(payload: bytes) -> list[tuple[int, int]]:
    """Return identifiers and values of a SETTINGS frame. Raises ProtocolError for values that are out of bounds."""
    if len(payload) % _SETTING.size:
        raise ProtocolError(ErrorCode.FRAME_SIZE_ERROR, "the length of SETTINGS must be a multiple of 6 bytes")
    settings = list(_SETTING.iter_unpack(payload))
    for name, value in settings:
        if name == INITIAL_WINDOW_SIZE and value > MAX_WINDOW:
            raise ProtocolError(ErrorCode.FLOW_CONTROL_ERROR, f"the initial window of {value} bytes is too large")
        if name == MAX_FRAME_SIZE and not MIN_FRAME_BYTES <= value <= MAX_FRAME_BYTES:
            raise ProtocolError(ErrorCode.PROTOCOL_ERROR, f"the maximum frame size of {value} bytes is out of range")
        if name == ENABLE_PUSH and value > 1:
            raise ProtocolError(ErrorCode.PROTOCOL_ERROR, f"ENABLE_PUSH must be 0 or 1, not {value}")
    return settings


def pack_number(frame_type: int, stream_id: int, number: int) -> bytes:
    """Return a WINDOW_UPDATE or RST_STREAM frame."""
    return pack(frame_type, 0, stream_id, _NUMBER.pack(number))


def unpack_number(payload: bytes) -> int:
    """Return the number in the payload of a WINDOW_UPDATE or RST_STREAM frame. Raises ProtocolError."""
    if len(payload) != _NUMBER.size:
        raise ProtocolError(ErrorCode.FRAME_SIZE_ERROR, f"a payload of {len(payload)} bytes instead of 4")
    number: int = _NUMBER.unpack(payload)[0]
    return number


def pack_goaway(last_stream_id: int, code: ErrorCode, text: str) -> bytes:
    """Return a GOAWAY frame. The sender has not processed streams above `last_stream_id`."""
    return pack(GOAWAY, 0, 0, _NUMBER.pack(last_stream_id) + _NUMBER.pack(code) + text.encode()[:200])


def strip_padding(flags: int, payload: bytes) -> bytes:
    """Return the field block of a HEADERS frame, without padding and priority. Raises ProtocolError."""
    begin, end = 0, len(payload)
    if flags & PADDED:
        if not payload:
            raise ProtocolError(ErrorCode.FRAME_SIZE_ERROR, "a padded frame without a pad length")
        begin, end = 1, end - payload[0]
    if flags & HAS_PRIORITY:
        begin += 5
    if begin > end:
        raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "more padding than payload")
    return payload[begin:end]
