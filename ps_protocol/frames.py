"""Frames: the body of every tensor request, a safetensors stream of many blocks.

    8 bytes   length of the header, little endian
    header    JSON: {"w.block0": {"dtype": "F32", "shape": [5000], "data_offsets": [0, 20000]}, "__metadata__": {…}}
    data      the tensors, one after another, without holes

Parsing copies no data: an entry is an offset into the caller's buffer. Limits are checked before objects are built.
The pushes of each round have the same headers, which are compared and not parsed again. Replies contain the same
tensors, and other metadata: what follows from the tensors alone is cached.
The format is https://huggingface.co/docs/safetensors/index#format; `safetensors.torch.load` reads our replies.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import starmap
from operator import attrgetter
from typing import Any, TypeVar

from .errors import BadInput
from .vocabulary import DTYPE_BYTES, is_shape, is_size

S = TypeVar("S", str, bytes)
L = TypeVar("L", bound=Hashable)
T = TypeVar("T")

CONTENT_TYPE = "application/x-safetensors"
LENGTH_BYTES = 8
# Lists of tensors, and headers of whole bodies, are cached by their JSON: 32 of at most 128 KiB, and 4 of at most
# 4 MiB, such as those of models with 10,000 parameters. The limits keep a peer from filling the memory, which takes
# some ten times as much as the JSON.
NUM_CACHED, MAX_CACHED_BYTES = 32, 128 * 1024
NUM_LARGE_CACHED, MAX_LARGE_CACHED_BYTES = 4, 4 * 1024 * 1024
ALIGNMENT = 64  # our own frames start their data on it, for aligned loads


_METADATA = '{"__metadata__":'  # the start of our own headers


@dataclass(frozen=True, slots=True)
class FrameLimits:
    """The limits of a receiver, which refuses a larger frame with `body_too_large`."""

    max_body_bytes: int = 256 * 1024 * 1024
    max_header_bytes: int = 1024 * 1024
    max_tensors: int = 16 * 1024


DEFAULT_LIMITS = FrameLimits()
TRUSTED_LIMITS = FrameLimits(1 << 62, 1 << 30, 1 << 30)  # of frames from own files and from the cluster's pservers


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a frame; `begin` and `end` are byte offsets into the data section."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """A parsed header: where the data section begins in the buffer, and its tensors in the order of their offsets.

    Frames whose headers are equal may be one object, so that a receiver may remember what it has checked.
    """

    tensors: tuple[TensorEntry, ...]
    metadata: Mapping[str, str]
    data_begin: int
    data_bytes: int


def encode_header(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]],
    metadata: Mapping[str, str] | None = None,
    *,
    min_bytes: int = 0,
) -> bytes:
    """Encode the length and header of a frame whose tensors (name, dtype, shape) follow in the given order.

    Spaces pad it so that the data starts on a multiple of 64 bytes, and to `min_bytes` at least, so that a reused
    buffer has room for another header of the same size. The caller appends the data as little-endian elements.
    Raises ValueError for a name that occurs twice or that the format cannot hold.

    >>> header = encode_header([("w", "F32", (2,)), ("b", "F32", (1,))])
    >>> int.from_bytes(header[:8], "little"), len(header)
    (120, 128)
    >>> header[8:].rstrip()
    b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[1],"data_offsets":[8,12]}}'
    """
    text = _encode_tensors(tuple(tensors))
    if metadata:
        text = f"{_METADATA}{_to_json(dict(metadata))}{',' if len(text) > len('{}') else ''}{text[1:]}"
    encoded = text.encode()
    total = max(LENGTH_BYTES + len(encoded), min_bytes)
    total += -total % ALIGNMENT
    return (total - LENGTH_BYTES).to_bytes(LENGTH_BYTES, "little") + encoded.ljust(total - LENGTH_BYTES)


@lru_cache(NUM_CACHED)
def _encode_tensors(tensors: tuple[tuple[str, str, tuple[int, ...]], ...]) -> str:
    header: dict[str, Any] = {}
    offset = 0
    for name, dtype, shape in tensors:
        if name in header or name == "__metadata__":
            raise ValueError(f"a frame cannot hold two entries called {name!r}")
        size = DTYPE_BYTES[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    return _to_json(header)


def _to_json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def parse_frame(body: memoryview | bytes | bytearray, limits: FrameLimits = DEFAULT_LIMITS) -> Frame:
    """Parse and check a whole frame, at least as strictly as the reference parser: no holes, no overlaps, no rest.

    Raises BadInput (`malformed_frame`, `body_too_large`) for any bytes that are not a frame.

    >>> frame = parse_frame(encode_header([("w.block0", "F32", (2,))], {"num_blocks": "1"}) + bytes(8))
    >>> frame.tensors
    (TensorEntry(name='w.block0', dtype='F32', shape=(2,), begin=0, end=8),)
    >>> frame.metadata, frame.data_begin, frame.data_bytes
    ({'num_blocks': '1'}, 128, 8)
    """
    if len(body) > limits.max_body_bytes:
        raise _too_large("the frame is too large", f"{limits.max_body_bytes} bytes", len(body))
    data_begin = parse_length(body, limits)
    if len(body) < data_begin:
        raise _malformed("the frame ends within its header", expected=f"{data_begin} bytes", actual=len(body))
    frame = _parse_known(bytes(body[LENGTH_BYTES:data_begin]), limits)
    if frame.data_bytes != len(body) - data_begin:
        expected, actual = f"{frame.data_bytes} bytes", len(body) - data_begin
        raise _malformed("the data must be as long as the header states", expected=expected, actual=actual)
    return frame


def parse_length(start: memoryview | bytes | bytearray, limits: FrameLimits) -> int:
    """Return the offset of the data, from the first eight bytes of a frame."""
    if len(start) < LENGTH_BYTES:
        raise _malformed("a frame must start with the header's length", expected="8 bytes", actual=len(start))
    header_bytes = int.from_bytes(start[:LENGTH_BYTES], "little")
    if header_bytes > limits.max_header_bytes:
        text = "a frame's first 8 bytes must be the length of its header, and this header is too large"
        raise _too_large(text, f"{limits.max_header_bytes} bytes", header_bytes)
    return LENGTH_BYTES + header_bytes


def parse_header(header: bytes, limits: FrameLimits) -> Frame:
    """Parse the JSON header of a frame and check that its tensors tile the data section."""
    if not header.startswith(b"{"):
        raise _malformed("the frame's header must begin with {", actual=f"{header[:8]!r}")
    # Counted before JSON builds an object for each. Escapes could hide some, hence the second check below.
    if (num_tensors := header.count(b'"data_offsets"')) > limits.max_tensors:
        raise _too_large(TOO_MANY, limits.max_tensors, num_tensors)
    try:
        text = header.decode()
        metadata, end = _parse_first_metadata(text)
        rest = text if metadata is None else _METADATA + "{}" + text[end:]
        found, tensors, data_bytes = _parse_tensors(rest, limits.max_tensors)
    except (ValueError, RecursionError) as error:
        raise _malformed(f"the frame's header is not JSON: {error}") from None
    metadata = found if metadata is None else metadata
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _malformed("__metadata__ must map strings to strings")
    return Frame(tensors, metadata, LENGTH_BYTES + len(header), data_bytes)


def _cached_by_size(parse: Callable[[S, L], T]) -> Callable[[S, L], T]:
    """Return the function with a cache for small texts, and another one for large ones."""
    small, large = lru_cache(NUM_CACHED)(parse), lru_cache(NUM_LARGE_CACHED)(parse)

    def parse_or_find(text: S, limit: L) -> T:
        if len(text) <= MAX_CACHED_BYTES:
            return small(text, limit)
        return large(text, limit) if len(text) <= MAX_LARGE_CACHED_BYTES else parse(text, limit)

    return parse_or_find


_parse_known = _cached_by_size(parse_header)


def _parse_first_metadata(text: str) -> tuple[Any, int]:
    """Return the metadata that a header begins with, and where it ends; None if it does not begin with any."""
    if not text.startswith(_METADATA + "{"):
        return None, 0
    metadata, end = _DECODER.raw_decode(text, len(_METADATA))
    _check_surrogates(text[:end], metadata)
    return metadata, end


@_cached_by_size
def _parse_tensors(text: str, max_tensors: int) -> tuple[Any, tuple[TensorEntry, ...], int]:
    """Return the metadata of a header, its tensors in the order of their offsets, and their number of bytes."""
    parsed: dict[str, Any] = _DECODER.decode(text)
    _check_surrogates(text, parsed)
    metadata = parsed.pop("__metadata__", {})
    if len(parsed) > max_tensors:
        raise _too_large(TOO_MANY, max_tensors, len(parsed))
    tensors = sorted(starmap(_parse_entry, parsed.items()), key=attrgetter("begin", "end"))
    offset = 0
    for entry in tensors:
        if entry.begin != offset:
            what = f"tensor {entry.name!r:.200} leaves a hole or overlaps"
            raise _malformed(what, expected=f"offset {offset}", actual=entry.begin)
        offset = entry.end
    return metadata, tuple(tensors), offset


def _check_surrogates(text: str, parsed: Any) -> None:
    if "\\u" in text:  # half of a surrogate pair is valid JSON, but cannot be printed or encoded
        json.dumps(parsed, ensure_ascii=False).encode()


TOO_MANY = "the frame holds too many tensors"
_ENTRY_MEMBERS = {"dtype", "shape", "data_offsets"}


def _parse_entry(name: str, value: Any) -> TensorEntry:
    what = f"tensor {name!r:.200}"
    if not isinstance(value, dict) or value.keys() != _ENTRY_MEMBERS:
        raise _malformed(f"{what} must have dtype, shape and data_offsets, nothing else")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise _malformed(f"{what} has an unknown dtype", expected=", ".join(DTYPE_BYTES), actual=f"{dtype!r:.200}")
    if not isinstance(shape, list) or not is_shape(shape := tuple(shape)):
        raise _malformed(f"{what} has a shape that is not a list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(is_size, offsets)):
        raise _malformed(f"{what} has data_offsets that are not two sizes")
    begin, end = offsets
    if end - begin != (num_bytes := DTYPE_BYTES[dtype] * math.prod(shape)):
        expected, actual = f"{num_bytes} bytes", f"{end - begin} bytes"
        raise _malformed(f"{what}: offsets do not fit dtype and shape", expected=expected, actual=actual)
    return TensorEntry(name, dtype, shape, begin, end)


def _object_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key occurs twice in one object")
    return result


_DECODER = json.JSONDecoder(object_pairs_hook=_object_without_duplicates)


def _malformed(detail: str, **facts: Any) -> BadInput:
    return BadInput(detail, code="malformed_frame", **facts)


def _too_large(detail: str, most: int | str, actual: int) -> BadInput:
    return BadInput(detail, code="body_too_large", expected=f"<= {most}", actual=actual)
