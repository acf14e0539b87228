"""Records of a log file: each proves by itself that it is whole.

    8 bytes    magic
    8 bytes    length of the frame, little endian
    16 bytes   XXH3-128 of the frame
    frame      a safetensors stream, like every body on the wire

A process that dies while it writes leaves a **torn** tail: a last record that is not whole. It was never acknowledged,
so it is cut off. A record that is not whole while others stand behind it is **damage**: those behind it must not be
applied without it.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import xxhash

from ps_protocol.errors import GradpostError
from ps_protocol.frames import Frame, FrameLimits, parse_frame

Buffer: TypeAlias = bytes | memoryview

MAGIC = b"gpRECORD"
_PREFIX = struct.Struct("<8sQ16s")
_MAX_VECTORS = 512  # of one writev; the kernel takes 1,024
_LIMITS = FrameLimits(max_body_bytes=1 << 62, max_header_bytes=1 << 30, max_tensors=1 << 30)  # our own files


@dataclass(frozen=True, slots=True)
class Record:
    """One whole record: where it stands in the file, and its parsed frame."""

    begin: int
    end: int
    frame: Frame
    body: memoryview

    @property
    def data(self) -> memoryview:
        """The frame's data section, not copied."""
        return self.body[self.frame.data_begin :]


@dataclass(frozen=True, slots=True)
class Ending:
    """What follows the last record that can be used: nothing, a torn tail, or damage. `at` is where it begins."""

    kind: Literal["clean", "torn", "damaged"]
    at: int


def append_record(fd: int, frame: Sequence[Buffer]) -> int:
    """Append a record to a file that is open at its end; returns how many bytes were written.

    All or nothing as long as the process lives: on an OSError (the disk is full) the file is cut to what it was.
    """
    digest = xxhash.xxh3_128()
    length = 0
    for chunk in frame:
        digest.update(chunk)
        length += len(chunk)
    begin = os.lseek(fd, 0, os.SEEK_END)
    try:
        return _write_all(fd, [_PREFIX.pack(MAGIC, length, digest.digest()), *frame])
    except BaseException:
        os.ftruncate(fd, begin)
        os.lseek(fd, begin, os.SEEK_SET)
        raise


def _write_all(fd: int, chunks: Sequence[Buffer]) -> int:
    rest = [memoryview(chunk).cast("B") for chunk in chunks if len(chunk)]
    total = sum(map(len, rest))
    while rest:
        written = os.writev(fd, rest[:_MAX_VECTORS])
        while rest and written >= len(rest[0]):
            written -= len(rest.pop(0))
        if written:
            rest[0] = rest[0][written:]
    return total


def read_records(data: memoryview) -> Iterator[Record | Ending]:
    """The records of a file in order, and last its ending. Reads every byte once; the caller keeps `data` alive."""
    at = 0
    while at < len(data):
        record = _read_record(data, at)
        if record is None:
            yield Ending("damaged" if _has_record_after(data, at) else "torn", at)
            return
        yield record
        at = record.end
    yield Ending("clean", at)


def _read_record(data: memoryview, begin: int) -> Record | None:
    if len(data) - begin < _PREFIX.size:
        return None
    magic, length, digest = _PREFIX.unpack_from(data, begin)
    body_begin = begin + _PREFIX.size
    if magic != MAGIC or length > len(data) - body_begin:
        return None
    body = data[body_begin : body_begin + length]
    if xxhash.xxh3_128_digest(body) != digest:
        return None
    try:
        frame = parse_frame(body, _LIMITS)
    except GradpostError:
        return None
    return Record(begin, body_begin + length, frame, body)


def _has_record_after(data: memoryview, begin: int) -> bool:
    at = begin + 1
    while True:
        at = _find_magic(data, at)
        if at < 0:
            return False
        if _read_record(data, at) is not None:
            return True
        at += 1


def _find_magic(data: memoryview, begin: int) -> int:
    step = 1 << 20
    for at in range(begin, len(data), step):
        found = bytes(data[at : at + step + len(MAGIC) - 1]).find(MAGIC)
        if found >= 0:
            return at + found
    return -1
