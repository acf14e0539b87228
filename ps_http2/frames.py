"""Frames of HTTP/2 as bytes (RFC 9113, sections 4 and 6). Pure."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from struct import Struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD_BYTES = 9
MAX_WINDOW = 2**31 - 1
DEFAULT_WINDOW = 2**16 - 1
MIN_FRAME_BYTES, MAX_FRAME_BYTES = 2**14, 2**24 - 1  # what SETTINGS_MAX_FRAME_SIZE may be

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)

END_STREAM = ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
HAS_PRIORITY = 0x20

HEADER_TABLE_SIZE, ENABLE_PUSH, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE, MAX_HEADER_LIST_SIZE = (
    range(1, 7)
)

_HEAD = Struct(">HBBBI")  # length in 24 bits, kind, flags, stream
_SETTING = Struct(">HI")
_NUMBER = Struct(">I")


class Code(IntEnum):
    """Why a stream or a connection ends (section 7)."""

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


class ViolationError(Exception):
    """The other end has broken the protocol: the connection ends with this code."""

    def __init__(self, code: Code, text: str) -> None:
        super().__init__(text)
        self.code = code


def pack_head(num_bytes: int, kind: int, flags: int, stream: int) -> bytes:
    """The head of a frame whose payload of `num_bytes` follows."""
    return _HEAD.pack(num_bytes >> 8, num_bytes & 0xFF, kind, flags, stream)


def unpack_head(buffer: bytes | memoryview) -> tuple[int, int, int, int]:
    """Length of the payload, kind, flags and stream of the frame that begins so.

    >>> unpack_head(pack_head(1 << 20, DATA, END_STREAM, 5))
    (1048576, 0, 1, 5)
    """
    high, low, kind, flags, stream = _HEAD.unpack_from(buffer)
    return high << 8 | low, kind, flags, stream & MAX_WINDOW  # the highest bit is reserved


def pack(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """A whole frame."""
    return pack_head(len(payload), kind, flags, stream) + payload


def pack_headers(stream: int, block: bytes, max_bytes: int, *, is_last: bool) -> bytes:
    """HEADERS with an encoded block, and CONTINUATIONs if one frame may not have all of it."""
    cuts = [block[at : at + max_bytes] for at in range(0, len(block), max_bytes)] or [b""]
    packed = []
    for number, cut in enumerate(cuts, 1):
        kind, flags = (HEADERS, END_STREAM if is_last else 0) if number == 1 else (CONTINUATION, 0)
        packed.append(pack(kind, flags | (END_HEADERS if number == len(cuts) else 0), stream, cut))
    return b"".join(packed)


def pack_settings(settings: Mapping[int, int]) -> bytes:
    """A SETTINGS frame."""
    return pack(SETTINGS, 0, 0, b"".join(_SETTING.pack(*item) for item in settings.items()))


def unpack_settings(payload: bytes) -> list[tuple[int, int]]:
    """What the other end wants. Raises ViolationError for what no end may want."""
    if len(payload) % _SETTING.size:
        raise ViolationError(Code.FRAME_SIZE_ERROR, "SETTINGS that are no multiple of 6 bytes")
    settings = list(_SETTING.iter_unpack(payload))
    for name, value in settings:
        if name == INITIAL_WINDOW_SIZE and value > MAX_WINDOW:
            raise ViolationError(Code.FLOW_CONTROL_ERROR, f"an initial window of {value} bytes")
        if name == MAX_FRAME_SIZE and not MIN_FRAME_BYTES <= value <= MAX_FRAME_BYTES:
            raise ViolationError(Code.PROTOCOL_ERROR, f"frames of at most {value} bytes")
        if name == ENABLE_PUSH and value > 1:
            raise ViolationError(Code.PROTOCOL_ERROR, f"ENABLE_PUSH is {value}")
    return settings


def pack_number(kind: int, stream: int, number: int) -> bytes:
    """A WINDOW_UPDATE or RST_STREAM frame."""
    return pack(kind, 0, stream, _NUMBER.pack(number))


def unpack_number(payload: bytes) -> int:
    """The one number of such a frame. Raises ViolationError."""
    if len(payload) != _NUMBER.size:
        raise ViolationError(Code.FRAME_SIZE_ERROR, "a frame of 4 bytes has another size")
    number: int = _NUMBER.unpack(payload)[0]
    return number


def pack_goaway(last_stream: int, code: Code, text: str) -> bytes:
    """A GOAWAY frame; streams above the last one were not looked at."""
    return pack(GOAWAY, 0, 0, _NUMBER.pack(last_stream) + _NUMBER.pack(code) + text.encode()[:200])


def strip(flags: int, payload: bytes) -> bytes:
    """The header block of a HEADERS frame, without padding and priority. Raises ViolationError."""
    begin, end = 0, len(payload)
    if flags & PADDED:
        if not payload:
            raise ViolationError(Code.FRAME_SIZE_ERROR, "a padded frame without its length")
        begin, end = 1, end - payload[0]
    if flags & HAS_PRIORITY:
        begin += 5
    if begin > end:
        raise ViolationError(Code.PROTOCOL_ERROR, "more padding than payload")
    return payload[begin:end]
