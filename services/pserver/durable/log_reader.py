"""Reads of the log's files while they are written: the whole records behind a round, up to the newest update.

The files are read, from the page cache as a rule, so that a slow reader takes no memory. A segment that is not needed
any more is deleted instead of becoming the spare one while a reader has it open.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator

from ps_protocol.errors import Conflict, FutureRound, UpdatesGone
from ps_protocol.vocabulary import Round

from .records import PREFIX, PREVIOUS_KEY
from .update_log import Position, Segment, UpdateLog, list_segments

MAX_READ_BYTES = 1 << 23  # of records that are read together, unless the first one is larger
_LENGTH_BYTES = 8  # of a frame's header


class Records:
    """Whole records, one behind the other, in an open file of the log. Any thread may read them. Close it."""

    def __init__(self, log: UpdateLog, segment: Segment) -> None:
        self.begin = self.end = 0
        self.fd = log.open_segment(segment)
        self._log = log
        self._segment = segment

    def read(self, at: int, num_bytes: int) -> bytes:
        """Return bytes from this position in the file on, up to the end of the last record.

        Raises OSError, also once the log is closed: another attempt may overwrite the file.
        """
        data = os.pread(self.fd, min(num_bytes, self.end - at), at)
        if not data or self._log.tail is None:
            raise OSError(f"{self._segment.path} ends before its records, or is closed")
        return data

    def close(self) -> None:
        """Close the file."""
        self._log.close_segment(self._segment, self.fd)


def is_at_end(log: UpdateLog, after: Round, chain: str | None) -> bool:
    """Return whether the update of round `after`, which has this chain, if it is known, is the newest one.

    Reads no file. Raises FutureRound, and Conflict (`diverged`) for another chain.
    """
    tail = log.tail
    if tail is None or after > tail.round:
        raise FutureRound(f"the log ends before round {after}", current=0 if tail is None else tail.round)
    if after == tail.round:
        _check_chain(tail, chain)
    return after == tail.round


def find_records(log: UpdateLog, after: Round, chain: str | None, find_newest: Callable[[], Round]) -> Records:
    """Return the records behind the update of round `after`, which is not the newest one: see `is_at_end`.

    Blocks. `find_newest` returns the round of the newest snapshot. Raises UpdatesGone, Conflict (`diverged`) and
    OSError.
    """
    segment, known = log.positions[0], log.positions[1][:]
    if not known:
        raise FutureRound(f"the log ends before round {after}", current=0)
    limit = known[-1].end
    try:
        if after < known[0].round:
            older = [each for each in list_segments(log.folder) if each.base <= after]
            if not older:
                raise FileNotFoundError
            limit = limit if older[-1] == segment else older[-1].path.stat().st_size  # which was cut to its records
            segment = older[-1]
        assert segment is not None
        records = Records(log, segment)
    except FileNotFoundError:
        raise _make_gone(after, find_newest()) from None
    try:
        positions = known if after >= known[0].round else list(_read_positions(records.fd, segment, limit))
        found = positions[after - positions[0].round :]  # their rounds follow one another
        if len(found) < 2:  # a part of the log was lost
            raise _make_gone(after, find_newest())
        _check_chain(found[0], chain)
        records.begin = found[0].end
        ends = (position.end for position in found[2:] if position.end - records.begin <= MAX_READ_BYTES)
        records.end = max(ends, default=found[1].end)
    except BaseException:
        records.close()
        raise
    return records


def _check_chain(position: Position, chain: str | None) -> None:
    if chain not in (None, position.chain):
        text = f"the updates up to round {position.round} are others here"
        raise Conflict(text, code="diverged", current=position.round)


def _make_gone(after: Round, newest: Round) -> UpdatesGone:
    return UpdatesGone(f"the log does not reach back to round {after}; begin with a later copy", begin=newest)


def _read_positions(fd: int, segment: Segment, limit: int) -> Iterator[Position]:
    """Yield the position behind each update of a segment, whose data is not read; the chain of the last is empty."""
    begin, round_ = 0, segment.base
    while begin < limit:
        prefix = os.pread(fd, PREFIX.size + _LENGTH_BYTES, begin)
        if len(prefix) < PREFIX.size + _LENGTH_BYTES or not prefix.startswith(segment.mark):
            break
        end = begin + PREFIX.size + PREFIX.unpack_from(prefix)[1]
        header = os.pread(fd, int.from_bytes(prefix[PREFIX.size :], "little"), begin + len(prefix))
        metadata = json.loads(header)["__metadata__"] if end <= limit else {}
        if int(metadata.get("round", 0)) != round_ + 1:
            break
        yield Position(round_, begin, metadata[PREVIOUS_KEY])
        begin, round_ = end, round_ + 1
    yield Position(round_, begin, "")
