"""A reader of the log's files while they are written: it returns their bytes from a round on, up to the newest update.

It always reads the files, from the page cache as a rule, so that a slow reader takes no memory. A segment that is not
needed any more is deleted instead of becoming the spare one while a reader has it open, and the reader finishes it.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator

from ps_protocol.errors import Conflict, FutureRound, UpdatesGone
from ps_protocol.vocabulary import Round

from .records import PREFIX, PREVIOUS_KEY
from .update_log import Segment, UpdateLog, list_segments

CHUNK_BYTES = 1 << 20
_LENGTH_BYTES = 8  # of a frame's header


class LogReader:
    """The position of one reader in a log. Any thread may call it; every method blocks, and may raise OSError."""

    def __init__(self, log: UpdateLog, after: Round, chain: str | None, find_newest: Callable[[], Round]) -> None:
        """Begin behind the update of round `after`, whose record, which may be pruned, has this chain.

        `find_newest` returns the round of the newest checkpoint. Raises UpdatesGone, FutureRound, and Conflict
        (`diverged`) for another chain.
        """
        self._log = log
        self._find_newest = find_newest
        self._guard = threading.Lock()
        self._fd = -1
        self._at = 0  # of the next byte
        self._record_end = 0  # of the record that contains the byte before it
        tail = log.tail
        if tail is None or after > tail.round:
            raise FutureRound(f"the log ends before round {after}", current=0 if tail is None else tail.round)
        bases = [segment for segment in list_segments(log.folder) if segment.base <= after]
        if not bases:
            raise self._make_gone(after)
        self._segment = bases[-1]
        try:
            self._open(self._segment)
            found = self._skip(after) or (tail.chain if after == tail.round else None)
            if chain is not None and found is None:
                raise self._make_gone(after)
            if chain not in (None, found):
                raise Conflict(f"the updates up to round {after} are others here", code="diverged", current=after)
        except BaseException:
            self.close()
            raise

    def _open(self, segment: Segment) -> None:
        try:
            fd = self._log.open_segment(segment)
        except FileNotFoundError:
            raise self._make_gone(segment.base) from None
        self._close_file()
        self._segment, self._fd, self._at, self._record_end = segment, fd, 0, 0

    def _skip(self, after: Round) -> str | None:
        """Go behind the update of round `after`. Return its chain if the file has the update behind it."""
        last, chain = self._segment.base, None
        for end, round_, previous in self._read_prefixes():
            if round_ > after:
                chain = previous
                break
            last, self._at, self._record_end = round_, end, end
        if last < after:  # a part of the log was lost before a later checkpoint
            raise self._make_gone(after)
        return chain

    def _make_gone(self, after: Round) -> UpdatesGone:
        newest = self._find_newest()
        return UpdatesGone(f"the log does not reach back to round {after}; begin with a later copy", begin=newest)

    def read(self) -> bytes:
        """Return the next bytes, at most `CHUNK_BYTES`, or none at the end of the log. Raises UpdatesGone."""
        with self._guard:
            while self._fd >= 0:
                limit, is_newest = self._find_limit()
                if self._at < limit:
                    data = os.pread(self._fd, min(CHUNK_BYTES, limit - self._at), self._at)
                    if not data:
                        raise OSError(f"{self._segment.path} ends before its records")
                    self._at += len(data)
                    self._find_record_end()
                    return data
                if is_newest:
                    break
                self._open_next()
            return b""

    @property
    def is_in_record(self) -> bool:
        """True if the bytes that were read end within a record."""
        return self._record_end != self._at

    def _find_record_end(self) -> None:
        while self._record_end < self._at:
            prefix = os.pread(self._fd, PREFIX.size, self._record_end)
            if len(prefix) < PREFIX.size:
                raise OSError(f"{self._segment.path} ends before its records")
            self._record_end += PREFIX.size + PREFIX.unpack(prefix)[1]

    def _find_limit(self) -> tuple[int, bool]:
        """Return where the complete records of the segment end, and whether it is the newest one."""
        tail = self._log.tail
        if tail is None:  # the log is closed
            return self._at, True
        if tail.segment == self._segment:
            return tail.end, True
        return os.fstat(self._fd).st_size, False  # it was cut to its records before the next one was begun

    def _open_next(self) -> None:
        last = max((round_ for _, round_, _ in self._read_prefixes()), default=self._segment.base)
        following = [segment for segment in list_segments(self._log.folder) if segment.base > self._segment.base]
        if not following or following[0].base != last:
            raise self._make_gone(last)
        self._open(following[0])

    def _read_prefixes(self) -> Iterator[tuple[int, Round, str | None]]:
        """Yield end, round and previous chain of the segment's records, whose data is not read."""
        begin, (limit, _) = 0, self._find_limit()
        while begin < limit:
            prefix = os.pread(self._fd, PREFIX.size + _LENGTH_BYTES, begin)
            if len(prefix) < PREFIX.size + _LENGTH_BYTES:
                return
            mark, length, _ = PREFIX.unpack_from(prefix)
            end = begin + PREFIX.size + length
            if mark != self._segment.mark or end > limit:
                return
            header = os.pread(self._fd, int.from_bytes(prefix[PREFIX.size :], "little"), begin + len(prefix))
            metadata = json.loads(header)["__metadata__"]
            yield end, int(metadata["round"]), metadata.get(PREVIOUS_KEY)
            begin = end

    def close(self) -> None:
        """Close the file. A running `read` ends first."""
        with self._guard:
            self._close_file()

    def _close_file(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._log.close_segment(self._segment, fd)
