"""Records of a log file, each with its own proof of integrity.

    8 bytes    mark of the file
    8 bytes    length of the frame, little endian
    16 bytes   XXH3-128 of the mark and the frame
    frame      a safetensors stream, like every body on the wire

A process that dies while it writes leaves a **torn** tail: an incomplete last record. It was never acknowledged, so it
is cut off. An incomplete record before others is **damage**: the later ones must not be applied without it. After the
last record the file may contain anything that does not begin with its mark, such as the content of a former use.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ps_protocol.errors import GradpostError
from ps_protocol.frames import TRUSTED_LIMITS, Frame, parse_frame
from services.runtime.storage import Buffer, digest_chunks

MARK_BYTES = 8
PREFIX = struct.Struct("<8sQ16s")
_MAX_VECTORS = 512  # of one writev; the kernel takes 1,024
_WINDOW_BYTES = 1 << 20  # that are searched for a mark at once


@dataclass(frozen=True, slots=True)
class Record:
    """One complete record: its position in the file, and its parsed frame."""

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
    """The content after the last usable record: nothing of this file, a torn tail, or damage, and its position."""

    kind: Literal["clean", "torn", "damaged"]
    at: int


def pack_prefix(mark: bytes, frame: Sequence[Buffer]) -> bytes:
    """Return the bytes before a frame. The digest contains the mark, so that a new mark does not revive old records."""
    return PREFIX.pack(mark, sum(map(len, frame)), digest_chunks([mark, *frame]).digest())


def append_record(fd: int, at: int, mark: bytes, frame: Sequence[Buffer]) -> int:
    """Write a record after the last one, which ends `at`. Returns where the record ends.

    All or nothing while the process lives: on an OSError (such as a full disk) the file ends where it ended before.
    """
    try:
        return _write_all(fd, at, [pack_prefix(mark, frame), *frame])
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


def read_records(fd: int, mark: bytes) -> Iterator[Record | Ending]:
    """Yield the records of an open file in order, and last its ending. Raises OSError.

    A record's body is valid until the next record is read: its memory is reused. Every byte is read once.
    """
    file, at = _File(fd), 0
    while (record := _read_record(file, at, mark)) is not None:
        yield record
        at = record.end
    if _has_record_after(file, at, mark):
        yield Ending("damaged", at)
    else:
        yield Ending("torn" if os.pread(fd, MARK_BYTES, at) == mark else "clean", at)


class _File:
    """Reads of a file at given positions, into memory that is reused.

    Unlike in a mapping, an unreadable sector is an OSError, and a file that is truncated meanwhile ends there.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._memory = bytearray()

    def read(self, at: int, count: int) -> memoryview | None:
        """Return `count` bytes, valid until the next call, or None if the file ends before."""
        if at + count > os.fstat(self.fd).st_size:
            return None
        if count > len(self._memory):
            self._memory = bytearray(count)
        view = memoryview(self._memory)[:count]
        done = 0
        while done < count:
            got = os.preadv(self.fd, [view[done:]], at + done)
            if not got:
                return None
            done += got
        return view


def _read_record(file: _File, begin: int, mark: bytes) -> Record | None:
    prefix = os.pread(file.fd, PREFIX.size, begin)
    if len(prefix) < PREFIX.size:
        return None
    found, length, digest = PREFIX.unpack(prefix)
    body_begin = begin + PREFIX.size
    if found != mark or (body := file.read(body_begin, length)) is None:
        return None
    if digest_chunks([mark, body]).digest() != digest:
        return None
    try:
        frame = parse_frame(body, TRUSTED_LIMITS)
    except GradpostError:
        return None
    return Record(begin, body_begin + length, frame, body)


def _has_record_after(file: _File, begin: int, mark: bytes) -> bool:
    at = begin
    while (at := _find(file.fd, mark, at + 1)) >= 0:
        if _read_record(file, at, mark) is not None:
            return True
    return False


def _find(fd: int, mark: bytes, begin: int) -> int:
    at = begin
    while window := os.pread(fd, _WINDOW_BYTES + MARK_BYTES - 1, at):
        found = window.find(mark)
        if found >= 0:
            return at + found
        at += _WINDOW_BYTES
    return -1
