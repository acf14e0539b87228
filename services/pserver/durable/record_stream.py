"""The log as a stream for other processes: records as they are in its files, and marks of the sender between them.

    record     as in `records.py`, with the mark of the file that it was read from
    idle       a record with the mark zero: a frame without tensors, whose metadata names the newest round
    end        the same with the problem document that tells why the stream ends

A sender without updates sends an idle record every second, so that its reader can tell an idle sender from a dead one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from ps_protocol.errors import BadInput, GradpostError, error_from_problem
from ps_protocol.frames import TRUSTED_LIMITS, encode_header, parse_frame
from ps_protocol.vocabulary import Round
from services.runtime.storage import Buffer, digest_chunks

from .records import MARK_BYTES, PREFIX, Record, pack_prefix

IDLE_SECONDS = 1.0
_SENDER = bytes(MARK_BYTES)


@dataclass(frozen=True, slots=True)
class Idle:
    """The sender has no later update than this round."""

    round: Round


@dataclass(frozen=True, slots=True)
class End:
    """The sender ends the stream."""

    reason: GradpostError


Received: TypeAlias = Record | Idle | End


def encode_idle(round_: Round) -> bytes:
    """Return an idle record."""
    return _encode({"round": str(round_)})


def encode_end(reason: GradpostError) -> bytes:
    """Return the last record of a stream."""
    return _encode({"end": json.dumps(reason.to_problem(), default=str)})


def _encode(metadata: dict[str, str]) -> bytes:
    frame = encode_header([], metadata)
    return pack_prefix(_SENDER, [frame]) + frame


class RecordParser:
    """An incremental parser of a stream, which holds at most one record of `max_bytes`.

    `digest` is that of the newest record of a log. After an error the parser must not be used any more.
    """

    def __init__(self, max_bytes: int) -> None:
        self.digest: bytes | None = None
        self._max_bytes = max_bytes
        self._at = 0  # where the open record begins in the stream
        self._prefix = bytearray()
        self._body = memoryview(b"")  # of the open record, once its prefix is complete
        self._num_read = 0  # bytes of the body

    @property
    def is_in_record(self) -> bool:
        """True if the stream is torn in case that it ends here."""
        return bool(self._prefix)

    def feed(self, chunk: Buffer) -> Iterator[Received]:
        """Yield the records that end in the next bytes of the stream; the iterator must be exhausted.

        Raises BadInput (`malformed_frame`) for damage: the records before it are intact.
        """
        rest = memoryview(chunk).cast("B")
        while len(rest):
            if len(self._prefix) < PREFIX.size:
                part = rest[: PREFIX.size - len(self._prefix)]
                self._prefix += part
                rest = rest[len(part) :]
                if len(self._prefix) < PREFIX.size:
                    return
                self._begin_body()
            part = rest[: len(self._body) - self._num_read]
            self._body[self._num_read : self._num_read + len(part)] = part
            self._num_read += len(part)
            rest = rest[len(part) :]
            if self._num_read == len(self._body):
                yield self._end_record()

    def _begin_body(self) -> None:
        length = PREFIX.unpack(self._prefix)[1]
        if not 0 < length <= self._max_bytes:
            raise BadInput(
                f"the record at byte {self._at} has an impossible length", code="malformed_frame",
                expected=f"1 to {self._max_bytes} bytes", actual=length,
            )  # fmt: skip
        self._body, self._num_read = memoryview(bytearray(length)), 0

    def _end_record(self) -> Received:
        mark, length, digest = PREFIX.unpack(self._prefix)
        body, begin = self._body, self._at
        if digest_chunks([mark, body]).digest() != digest:
            raise BadInput(f"the record at byte {begin} is damaged", code="malformed_frame")
        frame = parse_frame(body, TRUSTED_LIMITS)
        self._at += PREFIX.size + length
        self._prefix, self._body = bytearray(), memoryview(b"")
        if mark != _SENDER:
            self.digest = digest
            return Record(begin, self._at, frame, body)
        if "end" in frame.metadata:
            return End(error_from_problem(json.loads(frame.metadata["end"])))
        return Idle(int(frame.metadata["round"]))
