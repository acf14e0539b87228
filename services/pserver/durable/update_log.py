"""The log: every update of a shard, written before it is applied.

A segment holds the updates after a round, one record each, in the order of rounds; a new one begins with every
checkpoint. A shard is restored from a checkpoint and the updates behind it. In asynchronous modes the round of an
update is its number: how many contributions this pserver has taken with it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ps_protocol.frames import encode_header
from ps_protocol.norms import ShardNorm
from ps_protocol.optimizers import HyperParameters
from ps_protocol.routes import GRAD_SCALER_KEY
from ps_protocol.vocabulary import Durability, Incarnation, Rank, Round
from services.runtime.failpoints import reach_failpoint
from services.runtime.logs import get_logger
from services.runtime.storage import sync_folder

from .records import MARK_BYTES, Buffer, Ending, Record, append_record, read_records

_SPARE = "spare"


@dataclass(frozen=True, slots=True, order=True)
class Segment:
    """A file with the updates after round `base`."""

    base: Round
    path: Path

    @property
    def mark(self) -> bytes:
        """With which its records begin."""
        return bytes.fromhex(self.path.stem.partition("-")[2])


def list_segments(folder: Path) -> list[Segment]:
    """Those that are there, by their bases."""
    return sorted(Segment(int(path.stem.partition("-")[0]), path) for path in folder.glob("*-*.log"))


def create_segment(folder: Path, base: Round) -> tuple[Segment, int]:
    """A segment without records, out of the spare one if there is one, and its open file. Raises OSError.

    The name is on the disk when this returns; if it does not get there, there is no such segment.
    """
    segment = Segment(base, folder / f"{base:012}-{secrets.token_hex(MARK_BYTES)}.log")
    with contextlib.suppress(FileNotFoundError):
        (folder / _SPARE).rename(segment.path)
    fd = -1
    try:
        fd = os.open(segment.path, os.O_WRONLY | os.O_CREAT, 0o600)
        sync_folder(folder)
    except OSError:
        if fd >= 0:
            os.close(fd)
        segment.path.unlink(missing_ok=True)  # what stands behind its base would be looked for in it
        raise
    return segment, fd


def retire_segment(segment: Segment) -> None:
    """It is not needed any more. The file may be a later segment; of several the last one is kept."""
    segment.path.replace(segment.path.with_name(_SPARE))


def delete_spare(folder: Path) -> None:
    """Delete the spare file: no further segment is needed."""
    (folder / _SPARE).unlink(missing_ok=True)


log = get_logger()


@dataclass(frozen=True, slots=True)
class Update:
    """One update without its gradient. `present` names the blocks that it steps, None all of them.

    An asynchronous one is one trainer's contribution: `origin` is the life that took the step, and the step.
    """

    round: Round
    ranks: tuple[Rank, ...]
    hyper_parameters: list[HyperParameters]
    present: tuple[str, ...] | None
    nonfinite: tuple[Rank, ...] = ()  # for whose gradients the round stepped nothing
    origin: tuple[Incarnation, Round] | None = None
    counter: Rank | None = None  # whose steps the optimizer counts; None: everybody's, also in logs of earlier versions
    norm: ShardNorm | None = None  # that was told of it before it was clipped
    loaded: str | None = None  # describes the slots that came with it, which stand behind all else

    def to_metadata(self) -> dict[str, str]:
        """As it stands in a record."""
        return {
            "round": str(self.round),
            "ranks": json.dumps(self.ranks),
            "hyper_parameters": json.dumps(self.hyper_parameters),
            "present": json.dumps(self.present),
            "nonfinite": json.dumps(self.nonfinite),
            "origin": json.dumps(self.origin),
            "counter": json.dumps(self.counter),
            "norm": json.dumps(self.norm),
            "loaded": json.dumps(self.loaded),
        }

    @classmethod
    def from_record(cls, record: Record) -> Update:
        """The same back."""
        values = record.frame.metadata
        present, origin = json.loads(values["present"]), json.loads(values["origin"])
        norm = json.loads(values.get("norm", "null"))
        scaler = [json.loads(values[GRAD_SCALER_KEY])] if GRAD_SCALER_KEY in values else []  # of an earlier version
        return cls(
            round=int(values["round"]),
            ranks=tuple(json.loads(values["ranks"])),
            hyper_parameters=json.loads(values["hyper_parameters"]) + scaler,
            present=None if present is None else tuple(present),
            nonfinite=tuple(json.loads(values["nonfinite"])),
            origin=None if origin is None else (origin[0], origin[1]),
            counter=json.loads(values.get("counter", "null")),
            norm=None if norm is None else ShardNorm(*norm),
            loaded=json.loads(values.get("loaded", "null")),
        )


class UpdateLog:
    """One pserver's log of one run. Synchronous; used by one thread at a time. Every method may raise OSError."""

    def __init__(self, folder: Path, durability: Durability) -> None:
        self.num_bytes = 0  # of the newest segment's records: its file may be longer
        self.is_short = False  # whether what was read last ends before the log did
        self._folder = folder
        self._durability = durability
        self._newest: tuple[Segment, int] | None = None  # and its descriptor
        folder.mkdir(parents=True, exist_ok=True)

    def append(self, update: Update, gradient: Sequence[Buffer]) -> None:
        """Write an update; `gradient` are the float32 elements of the present blocks, in the order of the layout.

        With durability `fsync` it is on the disk when this returns, with `log` in the kernel's memory, which
        outlives the process. On an OSError nothing of it was written.
        """
        assert self._newest is not None
        segment, fd = self._newest
        reach_failpoint("log.append.before")
        num_elements = sum(map(len, gradient)) // 4
        header = encode_header([("gradient", "F32", (num_elements,))], update.to_metadata())
        end = append_record(fd, self.num_bytes, segment.mark, [header, *gradient])
        if self._durability == "fsync":
            self._sync(fd)
        self.num_bytes = end
        reach_failpoint("log.append.after")

    def _sync(self, fd: int) -> None:
        try:
            os.fdatasync(fd)
        except OSError:
            # The kernel may have dropped what it could not write, and say nothing of it the next time.
            os.ftruncate(fd, self.num_bytes)
            raise

    def begin_segment(self, round_: Round) -> None:
        """Write what comes after this round into a file of its own; if there can be none, go on with the one before."""
        if self._newest is not None and self._newest[0].base == round_:
            return  # nothing was applied since it was begun
        try:
            if self._newest is not None:
                os.ftruncate(self._newest[1], self.num_bytes)  # no file stays longer than its newest life was
            segment, fd = create_segment(self._folder, round_)
        except OSError as error:
            if self._newest is None:
                raise
            log.warning("the log gets no new file and goes on in the old one", round=round_, error=str(error))
            return
        self._open(segment, fd, 0)

    def _open(self, segment: Segment, fd: int, num_bytes: int) -> None:
        self.close()
        self._newest, self.num_bytes = (segment, fd), num_bytes

    def resume(self, round_: Round) -> None:
        """Go on after this round: cut off whatever stands behind it, such as a torn tail."""
        self.close()
        segments = list_segments(self._folder)
        while segments and segments[-1].base > round_:
            segments.pop().path.unlink()
        if not segments:
            self.begin_segment(round_)
            return
        segment, end = segments[-1], 0
        for item in _read_segment(segment):
            if isinstance(item, Ending):
                break
            if Update.from_record(item).round > round_:
                log.warning("cutting off the end of the log", file=segment.path.name, round=round_)
                break
            end = item.end
        fd = os.open(segment.path, os.O_WRONLY)
        self._open(segment, fd, end)
        os.ftruncate(fd, end)
        os.fsync(fd)

    def read_after(self, round_: Round) -> Iterator[tuple[Update, memoryview]]:
        """The updates behind a round with their gradients, without a gap; ends where the log does, or is damaged.

        Damage, or that there is no file where one must be, sets `is_short`. A torn tail was never acknowledged. A
        gradient holds until the next update is asked for.
        """
        segments = list_segments(self._folder)
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
                update = Update.from_record(item)
                if update.round == round_ + 1:
                    yield update, item.data
                    round_ += 1
                elif update.round > round_:
                    self.is_short = True
                    return

    def prune(self, oldest: Round) -> None:
        """Give up the segments that only reach back to before the checkpoint of this round."""
        for segment, following in itertools.pairwise(list_segments(self._folder)):
            if following.base <= oldest:
                retire_segment(segment)

    def shrink(self) -> None:
        """Delete what holds no records, since none will be written any more."""
        delete_spare(self._folder)
        if self._newest is not None:
            os.ftruncate(self._newest[1], self.num_bytes)

    def close(self) -> None:
        """Close the file; what was appended stays. An error is only logged, since the file is closed all the same."""
        if self._newest is None:
            return
        (segment, fd), self._newest = self._newest, None
        try:
            os.close(fd)
        except OSError as error:  # of a network file system: the next reader finds what is missing
            log.warning("the end of a log file may be lost", file=segment.path.name, error=str(error))


def _read_segment(segment: Segment) -> Iterator[Record | Ending]:
    """The records of a segment and its ending; a record that this version cannot replay counts as damage."""
    with segment.path.open("rb", buffering=0) as file:
        for item in read_records(file.fileno(), segment.mark):
            if isinstance(item, Record) and item.frame.metadata.get("replaced", "[]") != "[]":
                log.warning(
                    "the log ends where an earlier version has set a parameter's values; this one cannot repeat that",
                    file=segment.path.name, at=item.begin,
                )  # fmt: skip
                yield Ending("damaged", item.begin)
                return
            yield item
