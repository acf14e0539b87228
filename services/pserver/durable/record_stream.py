"""The log as a stream for other processes: records as they are in its files, and marks of the sender between them.

    record     as in `records.py`, with the mark of the file that it was read from
    idle       a record with the mark zero: a frame without tensors, whose metadata names the newest round
    end        the same with the problem document that tells why the stream ends

A sender without updates sends an idle record ten times a second, so that its reader can tell an idle sender from a
dead one.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from ps_protocol.errors import BadInput, GradpostError, error_from_problem
from ps_protocol.frames import encode_header
from ps_protocol.vocabulary import Round
from services.runtime.storage import Buffer

from .records import MARK_BYTES, PREFIX, Record, pack_prefix, parse_record

IDLE_SECONDS = 0.1
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
    return pack_prefix(_SENDER, [frame])[0] + frame


class RecordParser:
    """An incremental parser of a stream, which holds at most two records of `max_bytes`.

    An update is valid until the second update after it begins: their memory is reused, because page faults are half the
    cost of receiving a large body.
    `chain` is that of the newest record of a log, at first that of the reader's newest update; None: not known. After
    an error the parser must not be used any more.
    """

    def __init__(self, max_bytes: int, chain: str | None = None) -> None:
        self.chain = chain
        self._max_bytes = max_bytes
        self._at = 0  # where the open record begins in the stream
        self._prefix = bytearray()
        self._body = memoryview(b"")  # of the open record, once its prefix is complete
        self._memory = deque([bytearray(), bytearray()])  # the last one is that of the open record
        self._num_read = 0  # bytes of the body

    @property
    def is_in_record(self) -> bool:
        """True if the stream is torn in case that it ends here."""
        return bool(self._prefix)

    @property
    def room(self) -> memoryview:
        """The memory of the rest of the open record, which may be written before `fill`; empty between records."""
        return self._body[self._num_read :]

    def fill(self, num_bytes: int) -> Iterator[Received]:
        """Yield what `feed` yields for bytes that were written to the beginning of `room`."""
        self._num_read += num_bytes
        if self._num_read == len(self._body):
            yield self._end_record()

    def feed(self, chunk: Buffer) -> Iterator[Received]:
        """Yield the records that end in the next bytes of the stream; the iterator must be exhausted.

        Raises BadInput (`malformed_frame`) for damage, and for a record that does not continue the chain, such as the
        one behind a gap. The records before it are intact.
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
            part = rest[: len(self.room)]
            self.room[: len(part)] = part
            rest = rest[len(part) :]
            yield from self.fill(len(part))

    def _begin_body(self) -> None:
        length = PREFIX.unpack(self._prefix)[1]
        if not 0 < length <= self._max_bytes:
            raise BadInput(
                f"the record at byte {self._at} has an impossible length", code="malformed_frame",
                expected=f"1 to {self._max_bytes} bytes", actual=length,
            )  # fmt: skip
        if self._prefix.startswith(_SENDER):
            memory = bytearray(length)
        else:
            self._memory.rotate()
            if len(self._memory[-1]) < length:
                self._memory[-1] = bytearray(length)
            memory = self._memory[-1]
        self._body, self._num_read = memoryview(memory)[:length], 0

    def _end_record(self) -> Received:
        record = parse_record(bytes(self._prefix), self._body, self._at)
        if record is None:
            raise BadInput(f"the record at byte {self._at} is damaged", code="malformed_frame")
        is_update = not self._prefix.startswith(_SENDER)
        self._at = record.end
        self._prefix, self._body = bytearray(), memoryview(b"")
        if is_update:
            if not record.follows(self.chain):
                text = f"the record at byte {record.begin} does not continue the updates before it"
                raise BadInput(text, code="malformed_frame")
            self.chain = record.chain
            return record
        metadata = record.frame.metadata
        if "end" in metadata:
            return End(error_from_problem(json.loads(metadata["end"])))
        return Idle(int(metadata["round"]))
