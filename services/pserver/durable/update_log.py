"""The log: every update of a shard, written before it is applied, in files that are reused.

    000000000128-9f3c5e2a7b1d4c60.log    a segment: the updates after round 128, one record each, in order
    spare                                a segment that is not needed any more, and becomes the next one

Every checkpoint begins a new segment. A shard is restored from a checkpoint and the later updates.

Overwriting a file takes a fraction of the time of writing a new one: the kernel already has its pages, and the disk its
blocks. Its old records do not count, since every record begins with its segment's **mark**, a random number in the
file's name: the new name makes them void.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import NamedTuple

from ps_protocol.errors import Conflict, FutureRound, UpdatesGone
from ps_protocol.frames import encode_header
from ps_protocol.norms import ShardNorm
from ps_protocol.optimizers import HyperParameters
from ps_protocol.vocabulary import Durability, Rank, Round
from services.runtime.failpoints import reach_failpoint
from services.runtime.logs import get_logger
from services.runtime.storage import Buffer, check_format, sync_folder

from .records import MARK_BYTES, PREVIOUS_KEY, Ending, Record, append_record, read_records

FORMAT = 3

log = get_logger()


@dataclass(frozen=True, slots=True, order=True)
class Segment:
    """A file with the updates after round `base`."""

    base: Round
    path: Path

    @property
    def mark(self) -> bytes:
        """The bytes that its records begin with."""
        return bytes.fromhex(self.path.stem.partition("-")[2])


def list_segments(folder: Path) -> list[Segment]:
    """Return the segments in a folder, ordered by base."""
    return sorted(Segment(int(path.stem.partition("-")[0]), path) for path in folder.glob("*-*.log"))


@dataclass(frozen=True, slots=True)
class LoggedUpdate:
    """The update of a round without its gradient. `present` names the blocks that it steps; None is all of them."""

    round: Round
    ranks: tuple[Rank, ...]
    hyper_parameters: list[HyperParameters]
    present: tuple[str, ...] | None
    nonfinite: tuple[Rank, ...] = ()  # the ranks because of which the round stepped nothing
    norm: ShardNorm | None = None  # before clipping
    shard: str | None = None  # digest of the shard before the update, in some updates
    loaded: str | None = None  # describes the loaded optimizer state, which is the end of the data
    rows: dict[str, int] = field(default_factory=dict)  # the numbers of rows by block of a sparse parameter

    def to_metadata(self) -> dict[str, str]:
        """Return the metadata of a record."""
        numbers = {field.name: json.dumps(getattr(self, field.name)) for field in fields(self)}
        if not self.rows:
            del numbers["rows"]
        return {"format": str(FORMAT), **numbers}

    @classmethod
    def from_record(cls, record: Record) -> LoggedUpdate:
        """Return the update in a record. Raises UnsupportedFormat."""
        metadata = record.frame.metadata
        check_format(metadata.get("format"), FORMAT, "the log")
        values = {field.name: json.loads(metadata[field.name]) for field in fields(cls) if field.name in metadata}
        for name in ("ranks", "present", "nonfinite"):
            values[name] = None if values[name] is None else tuple(values[name])
        if values["norm"] is not None:
            values["norm"] = ShardNorm(*values["norm"])
        return cls(**values)


class Position(NamedTuple):
    """The end of an update in a segment, and its chain."""

    round: Round
    segment: Segment
    end: int
    chain: str


MAX_POSITIONS = 4096  # of updates that can be read by standbys
MAX_READ_BYTES = 1 << 23  # of records that are read together, unless the first one is larger


class UpdateLog:
    """One pserver's log of one run. Synchronous; used by one thread at a time. Every method may raise OSError.

    Readers on other threads use `tail` and `wakers`, and the methods that name readers.
    """

    def __init__(self, folder: Path, durability: Durability) -> None:
        self.folder = folder
        self.is_short = False  # whether the updates that were read last end before the log did
        self.wakers: set[Callable[[], None]] = set()  # of readers; called after each update, on its thread
        self._reading = threading.Lock()  # held while a file is read that may become the spare one
        self._spare = folder / "spare"
        self.durability = durability
        self._newest: tuple[Segment, int] | None = None  # and its descriptor
        self.positions: list[Position] = []  # the first may be the round that the log begins after
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def tail(self) -> Position | None:
        """The newest update, or the round that the log begins after; None before that, and once the log is closed."""
        positions = self.positions
        return positions[-1] if positions else None

    @property
    def num_bytes(self) -> int:
        """Size of the newest segment's records; its file may be longer."""
        tail, newest = self.tail, self._newest
        return tail.end if tail is not None and newest is not None and tail.segment == newest[0] else 0

    def append(self, update: LoggedUpdate, gradient: Sequence[Buffer]) -> None:
        """Write an update; `gradient` are the float32 elements of the present blocks, in the order of the layout.

        Behind them are the rows of sparse parameters, and the optimizer state that the update loads.

        With durability `fsync` it is on the disk when this returns, else in the kernel's memory, which outlives the
        process. On an OSError nothing of it was written.
        """
        assert self.tail is not None
        num_elements = sum(map(len, gradient)) // 4
        metadata = {**update.to_metadata(), PREVIOUS_KEY: self.tail.chain}
        header = encode_header([("gradient", "F32", (num_elements,))], metadata)
        self.append_frame(update.round, [header, *gradient])

    def append_frame(self, round_: Round, frame: Sequence[Buffer], chain: str | None = None) -> None:
        """Write an update as `append` does: the frame of a record, which may be that of another process.

        `chain` is that of the record, if it is known.
        """
        assert self._newest is not None
        segment, fd = self._newest
        try:
            reach_failpoint("log.append.before")
            end, chain = append_record(fd, self.num_bytes, segment.mark, frame, chain)
            if self.durability == "fsync":
                self._sync(fd)
        except OSError as error:
            error.filename = str(segment.path)  # which no error of a file descriptor names
            raise
        self.positions.append(Position(round_, segment, end, chain))
        if len(self.positions) > 2 * MAX_POSITIONS:
            self.positions = self.positions[MAX_POSITIONS:]
        self.wake_readers()
        reach_failpoint("log.append.after")

    def _sync(self, fd: int) -> None:
        try:
            os.fdatasync(fd)
        except OSError:
            # The kernel may have dropped these pages, and would report no error the next time.
            os.ftruncate(fd, self.num_bytes)
            raise

    def begin_segment(self, round_: Round, chain: str | None = None) -> None:
        """Write the updates after this round to a new file, or go on with the old one if there can be none.

        `chain` is that of the round, by default that of the newest update. With it earlier updates cannot be read.
        """
        if self._newest is not None and self._newest[0].base == round_:
            return  # nothing was applied since it was begun
        try:
            if self._newest is not None:
                os.ftruncate(self._newest[1], self.num_bytes)  # no file stays longer than its records
            segment, fd = self._create_segment(round_)
        except OSError as error:
            if self._newest is None:
                raise
            log.warning("the log cannot begin a new file and continues in the old one", round=round_, error=str(error))
            return
        self.close()
        self._newest = segment, fd
        if chain is not None:
            self.positions = [Position(round_, segment, 0, chain)]

    def _create_segment(self, base: Round) -> tuple[Segment, int]:
        """Return a segment without records, made of the spare one if there is one, and its open file.

        The name is on the disk when this returns; after an error there is no such segment.
        """
        segment = Segment(base, self.folder / f"{base:012}-{secrets.token_hex(MARK_BYTES)}.log")
        with contextlib.suppress(FileNotFoundError):
            self._spare.rename(segment.path)
        fd = -1
        try:
            fd = os.open(segment.path, os.O_WRONLY | os.O_CREAT, 0o600)
            sync_folder(self.folder)
        except OSError:
            if fd >= 0:
                os.close(fd)
            segment.path.unlink(missing_ok=True)  # later updates would be expected in it
            raise
        return segment, fd

    def resume(self, round_: Round, chain: str) -> None:
        """Continue after this round, which has this chain, and cut off later records, such as a torn tail."""
        self.close()
        segments = list_segments(self.folder)
        while segments and segments[-1].base > round_:
            segments.pop().path.unlink()
        if not segments:
            self.begin_segment(round_, chain)
            return
        segment = segments[-1]
        positions: list[Position] = []
        for item in _read_segment(segment):
            if isinstance(item, Ending):
                break
            if (logged := LoggedUpdate.from_record(item).round) > round_:
                log.warning("cutting off the end of the log", file=segment.path.name, round=round_)
                break
            before = Position(logged - 1, segment, item.begin, item.frame.metadata[PREVIOUS_KEY])
            positions = positions or [before]
            positions.append(Position(logged, segment, item.end, item.chain))
        self.positions = positions or [Position(segment.base, segment, 0, chain)]
        newest = self.positions[-1]
        fd = os.open(segment.path, os.O_WRONLY)
        self._newest = segment, fd
        os.ftruncate(fd, newest.end)
        os.fsync(fd)
        # Otherwise a part of the log is lost, and the next record follows none.
        if (newest.round, newest.chain) != (round_, chain):
            self.close()
            self.begin_segment(round_, chain)

    def read_after(self, round_: Round, chain: str | None = None) -> Iterator[tuple[LoggedUpdate, Record]]:
        """Yield the updates after a round and their records, without a gap, up to the end of the log or to damage.

        Damage, a missing file, and an update that does not continue the chain of the round set `is_short`; a torn tail,
        which was never acknowledged, does not. A record is valid until the next update is read.
        """
        segments = list_segments(self.folder)
        newest_start = max((segment.base for segment in segments if segment.base <= round_), default=None)
        self.is_short = newest_start is None
        for segment in segments:
            if newest_start is None or segment.base < newest_start:
                continue
            if segment.base > round_:
                self.is_short = True
                return
            for item in _read_segment(segment):
                if isinstance(item, Ending):
                    if item.kind != "clean":
                        log.warning(f"the log is {item.kind}", file=segment.path.name, at=item.at)
                    self.is_short = item.kind == "damaged"
                    break
                update = LoggedUpdate.from_record(item)
                if update.round == round_ + 1 and item.follows(chain):
                    yield update, item
                    round_, chain = update.round, item.chain
                elif update.round > round_:
                    self.is_short = True
                    return

    def prune(self, oldest: Round) -> None:
        """Make a spare segment of those that only contain updates before the checkpoint of this round."""
        for segment, following in itertools.pairwise(list_segments(self.folder)):
            if following.base > oldest:
                break
            with self._reading:
                segment.path.replace(self._spare)

    # ------------------------------------------------------------------ readers

    def wake_readers(self) -> None:
        """Call all wakers."""
        for wake in list(self.wakers):
            wake()

    def is_newest(self, round_: Round, chain: str | None) -> bool:
        """Return whether the update of this round, which has this chain, if it is known, is the newest one.

        Reads no file. Raises FutureRound, and Conflict (`diverged`) for another chain.
        """
        tail = self.tail
        if tail is None or round_ > tail.round:
            raise FutureRound(f"the log ends before round {round_}", current=0 if tail is None else tail.round)
        if round_ == tail.round:
            _check_chain(tail, chain)
        return round_ == tail.round

    def read_behind(self, round_: Round, chain: str | None) -> bytes:
        """Return whole records behind the update of this round, which is not the newest one: see `is_newest`.

        Blocks. Raises UpdatesGone, Conflict (`diverged`), and OSError, also once the log is closed.
        """
        known = self.positions[:]
        gone = UpdatesGone(f"the log does not reach back to round {round_}; begin with a later copy")
        if not known or round_ < known[0].round:
            raise gone
        before, *later = known[round_ - known[0].round :]  # their rounds follow one another
        _check_chain(before, chain)
        segment = later[0].segment
        begin = before.end if before.segment == segment else 0
        ends = [each.end for each in later if each.segment == segment and each.end - begin <= MAX_READ_BYTES]
        end = max(ends, default=later[0].end)
        try:
            with self._reading, segment.path.open("rb") as file:
                file.seek(begin)
                data = file.read(end - begin)
        except FileNotFoundError:
            raise gone from None
        if len(data) < end - begin or self.tail is None:  # another attempt may overwrite the file of a closed log
            raise OSError(f"{segment.path} ends before its records, or is closed")
        return data

    # ------------------------------------------------------------------ the end

    def shrink(self) -> None:
        """Delete unused space, since no more records will be written."""
        self._spare.unlink(missing_ok=True)
        if self._newest is not None:
            os.ftruncate(self._newest[1], self.num_bytes)

    def close(self) -> None:
        """Close the file; appended updates stay. An error is only logged, since the file is closed all the same."""
        if self._newest is None:
            return
        (segment, fd), self._newest = self._newest, None
        try:
            os.close(fd)
        except OSError as error:  # of a network file system: the next reader finds the missing records
            log.warning("the end of a log file may be lost", file=segment.path.name, error=str(error))


def _read_segment(segment: Segment) -> Iterator[Record | Ending]:
    """Yield the records of a segment and its ending."""
    with segment.path.open("rb", buffering=0) as file:
        yield from read_records(file.fileno(), segment.mark)


def _check_chain(position: Position, chain: str | None) -> None:
    if chain not in (None, position.chain):
        text = f"the updates up to round {position.round} are others here"
        raise Conflict(text, code="diverged", current=position.round)
