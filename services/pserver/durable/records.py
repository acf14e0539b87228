"""Records of a log file, each with its own proof of integrity.

    8 bytes    mark of the file
    8 bytes    length of the frame, little endian
    16 bytes   XXH3-128 of the mark and the record's chain
    frame      a safetensors stream, like every body on the wire

The **chain** of a record is the XXH3-128 of its frame. The metadata of the frame contains the chain of the record
before as `previous`, so that a chain covers all records up to its own, and neither files nor marks. Before the first
record it is the digest of the shard.

A process that dies while it writes leaves a **torn** tail: an incomplete last record. It was never acknowledged, so it
is cut off. An incomplete record before others, or one that does not continue the chain, is **damage**: the later ones
must not be applied. After the last record the file may contain anything that does not begin with its mark, such as the
content of a former use.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ps_protocol.errors import BadInput, GradpostError
from ps_protocol.frames import TRUSTED_LIMITS, Frame, parse_frame
from services.runtime.storage import Buffer, digest_chunks

MARK_BYTES = 8
PREFIX = struct.Struct("<8sQ16s")
PREVIOUS_KEY = "previous"
_MAX_VECTORS = 512  # of one writev; the kernel takes 1,024
_WINDOW_BYTES = 1 << 20  # that are searched for a mark at once


@dataclass(frozen=True, slots=True)
class Record:
    """One complete record: its position in the file, its parsed frame, and its chain."""

    begin: int
    end: int
    frame: Frame
    body: memoryview
    chain: str

    @property
    def data(self) -> memoryview:
        """The frame's data section, not copied."""
        return self.body[self.frame.data_begin :]

    def follows(self, chain: str | None) -> bool:
        """Return whether the record before has this chain, if it is known."""
        return chain is None or self.frame.metadata.get(PREVIOUS_KEY) == chain


@dataclass(frozen=True, slots=True)
class Ending:
    """The content after the last usable record: nothing of this file, a torn tail, or damage, and its position."""

    kind: Literal["clean", "torn", "damaged"]
    at: int


def pack_prefix(mark: bytes, frame: Sequence[Buffer], chain: str | None = None) -> tuple[bytes, str]:
    """Return the bytes before a frame, and the record's chain, which the caller may know.

    The digest in the prefix contains the mark, so that a new mark does not revive old records.
    """
    chain = chain or digest_chunks(frame).hexdigest()
    return PREFIX.pack(mark, sum(map(len, frame)), _digest_prefix(mark, bytes.fromhex(chain))), chain


def _digest_prefix(mark: bytes, content: Buffer) -> bytes:
    return digest_chunks([mark, content]).digest()


def parse_record(prefix: bytes, body: memoryview, begin: int) -> Record | None:
    """Return the record with this prefix and frame, which begins at `begin`, or None if it is damaged."""
    mark, length, digest = PREFIX.unpack(prefix)
    chain = digest_chunks([body])
    if digest != _digest_prefix(mark, chain.digest()):
        return None
    try:
        frame = parse_frame(body, TRUSTED_LIMITS)
    except GradpostError:
        return None
    return Record(begin, begin + PREFIX.size + length, frame, body, chain.hexdigest())


def parse_records(data: memoryview, chain: str | None) -> list[Record]:
    """Return the records in these bytes, whose bodies are views of them. The update before has this chain, if known.

    Raises BadInput (`malformed_frame`) for damage, and for a record that does not continue the chain.
    """
    records: list[Record] = []
    at = 0
    while at < len(data):
        prefix = bytes(data[at : at + PREFIX.size])
        begin = at + PREFIX.size
        end = begin + PREFIX.unpack(prefix)[1] if len(prefix) == PREFIX.size else 0
        record = parse_record(prefix, data[begin:end], at) if begin < end <= len(data) else None
        if record is None or not record.follows(chain):
            text = f"the record at byte {at} is damaged, or does not continue the updates before it"
            raise BadInput(text, code="malformed_frame")
        records.append(record)
        at, chain = end, record.chain
    return records


def append_record(fd: int, at: int, mark: bytes, frame: Sequence[Buffer], chain: str | None = None) -> tuple[int, str]:
    """Write a record after the last one, which ends `at`. Returns where the record ends, and its chain.

    All or nothing while the process lives: on an OSError (such as a full disk) the file ends where it ended before.
    """
    prefix, chain = pack_prefix(mark, frame, chain)
    try:
        return _write_all(fd, at, [prefix, *frame]), chain
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
    file, at, chain = _File(fd), 0, None
    while (record := _read_record(file, at, mark)) is not None and record.follows(chain):
        yield record
        at, chain = record.end, record.chain
    if record is not None or _has_record_after(file, at, mark):
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
    found, length, _ = PREFIX.unpack(prefix)
    if found != mark or (body := file.read(begin + PREFIX.size, length)) is None:
        return None
    return parse_record(prefix, body, begin)


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
