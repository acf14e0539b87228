"""Records of a log file: each proves by itself that it is whole.

    8 bytes    mark of the file
    8 bytes    length of the frame, little endian
    16 bytes   XXH3-128 of the mark and the frame
    frame      a safetensors stream, like every body on the wire

A process that dies while it writes leaves a **torn** tail: a last record that is not whole. It was never acknowledged,
so it is cut off. A record that is not whole while others stand behind it is **damage**: those behind it must not be
applied without it. Behind the last record the file may hold anything that does not begin with its mark: what is left of
a former use.
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

MARK_BYTES = 8
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
    """What follows the last record that can be used: nothing of this file, a torn tail, or damage, and where."""

    kind: Literal["clean", "torn", "damaged"]
    at: int


def append_record(fd: int, at: int, mark: bytes, frame: Sequence[Buffer]) -> int:
    """Write a record behind the last one, which ends `at`; returns where it ends itself.

    All or nothing as long as the process lives: on an OSError (the disk is full) the file ends where it began.
    """
    prefix = _PREFIX.pack(mark, sum(map(len, frame)), _digest(mark, frame))
    try:
        return _write_all(fd, at, [prefix, *frame])
    except BaseException:
        os.ftruncate(fd, at)
        raise


def _write_all(fd: int, at: int, chunks: Sequence[Buffer]) -> int:
    rest = [memoryview(chunk).cast("B") for chunk in chunks if len(chunk)]
    while rest:
        written = os.pwritev(fd, rest[:_MAX_VECTORS], at)
        at += written
        while rest and written >= len(rest[0]):
            written -= len(rest.pop(0))
        if written:
            rest[0] = rest[0][written:]
    return at


def read_records(data: memoryview, mark: bytes) -> Iterator[Record | Ending]:
    """The records of a file in order, and last its ending. Reads every byte once; the caller keeps `data` alive."""
    at = 0
    while (record := _read_record(data, at, mark)) is not None:
        yield record
        at = record.end
    if _has_record_after(data, at, mark):
        yield Ending("damaged", at)
    else:
        yield Ending("torn" if data[at : at + MARK_BYTES] == mark else "clean", at)


def _read_record(data: memoryview, begin: int, mark: bytes) -> Record | None:
    if len(data) - begin < _PREFIX.size:
        return None
    found, length, digest = _PREFIX.unpack_from(data, begin)
    body_begin = begin + _PREFIX.size
    if found != mark or length > len(data) - body_begin:
        return None
    body = data[body_begin : body_begin + length]
    if _digest(mark, [body]) != digest:
        return None
    try:
        frame = parse_frame(body, _LIMITS)
    except GradpostError:
        return None
    return Record(begin, body_begin + length, frame, body)


def _digest(mark: bytes, frame: Sequence[Buffer]) -> bytes:
    """With the mark, so that a new one before an old record is not enough to revive it."""
    digest = xxhash.xxh3_128(mark)
    for chunk in frame:
        digest.update(chunk)
    return digest.digest()


def _has_record_after(data: memoryview, begin: int, mark: bytes) -> bool:
    at = begin
    while (at := _find(mark, data, at + 1)) >= 0:
        if _read_record(data, at, mark) is not None:
            return True
    return False


def _find(mark: bytes, data: memoryview, begin: int) -> int:
    step = 1 << 20
    for at in range(begin, len(data), step):
        found = bytes(data[at : at + step + MARK_BYTES - 1]).find(mark)
        if found >= 0:
            return at + found
    return -1
