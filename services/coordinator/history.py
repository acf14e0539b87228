"""The curves of the newest run, in memory, and the history: one file for each run that has trained.

The folder may be shared by several coordinators, such as those of several `gradpost up`.
"""

from __future__ import annotations

import asyncio
import math
import os
import threading
import time
from bisect import bisect_right
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import reduce
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from ps_protocol.errors import NotFound, UnsupportedFormat
from ps_protocol.fields import ByOrdinal, Identifier, Label, Mean, Message, Name, Note, Number, Real, Round
from ps_protocol.messages import ClusterStatus, RunState, RunSummary, TrainerHeartbeat
from ps_protocol.vocabulary import Mode, Rank
from services.runtime.logs import get_logger
from services.runtime.storage import seal, unseal, write_file

from .checkpoints import RunResult
from .shell import Shell
from .state.status import describe_status

MAX_POINTS = 1000  # of one curve; beyond it neighbours are merged in pairs
MAX_CURVES = 1000
MAX_ANSWERED = 100_000  # points in one answer, which takes about 0.1 s to encode


class Curve(BaseModel):
    """The points of one result of one trainer, in columns.

    A point is the mean of `count` reported values. A mean that JSON cannot express is null.
    """

    round: list[Round]
    at: list[float]  # seconds since 1970
    value: list[float | None]
    count: list[int]


class CurveList(BaseModel):
    """The curves of the newest run, by name and rank."""

    run: str
    curves: dict[str, ByOrdinal[Curve]]


@dataclass(frozen=True, slots=True)
class Point:
    """The mean of the values that a trainer reported up to a round and a time, since the point before."""

    round: Round
    at: float
    mean: Mean


class Curves:
    """The curves of the newest run: one for each trainer and result."""

    def __init__(self, run: str = "") -> None:
        self.run = run
        self._points: dict[tuple[str, Rank], list[Point]] = {}

    def copy(self) -> Curves:
        """Return a copy, which another thread may use."""
        copy = Curves(self.run)
        copy._points = {key: list(points) for key, points in self._points.items()}
        return copy

    def restore(self, earlier: CurveList) -> None:
        """Continue curves that `describe` has returned in an earlier process."""
        self.run = earlier.run
        for name, by_rank in earlier.curves.items():
            for rank, curve in by_rank.items():
                columns = zip(curve.round, curve.at, curve.value, curve.count, strict=True)
                self._points[name, rank] = [
                    Point(round_, at, Mean(count=count, value=math.nan if value is None else value))
                    for round_, at, value, count in columns
                ]

    def add(self, rank: Rank, message: TrainerHeartbeat) -> None:
        """Add the means of a heartbeat. A client without means reports `results` once for each round."""
        if message.run != self.run:
            self.run = message.run
            self._points.clear()
        now, means = time.time(), message.means
        if means is None:
            means = {name: Mean(count=1, value=value) for name, value in message.results.items()}
        for name, mean in means.items():
            points = self._points.get((name, rank))
            if points is None:
                if len(self._points) >= MAX_CURVES:
                    continue
                points = self._points[name, rank] = []
            del points[bisect_right(points, message.round, key=_round_of) :]  # a rollback
            if points and points[-1].round == message.round:
                if message.means is None:
                    continue
                mean = points.pop().mean.merge(mean)
            points.append(Point(message.round, now, mean))
            if len(points) > MAX_POINTS:
                points[:] = _thin_out(points, MAX_POINTS // 2 + 1)

    def describe(self, max_points: int = MAX_POINTS, max_answered: int = MAX_ANSWERED) -> dict[str, Any]:
        """Return the curves by name and rank, with at most `max_points` points, which are means of the stored points.

        With many curves each curve has fewer points, so that the answer has at most `max_answered` points.
        """
        max_points = min(max_points, max_answered // max(1, len(self._points)))
        curves: dict[str, dict[Rank, dict[str, list[float]]]] = {}
        for (name, rank), points in sorted(self._points.items()):
            thin = _thin_out(points, max_points)
            curves.setdefault(name, {})[rank] = {
                "round": [point.round for point in thin],
                "at": [point.at for point in thin],
                "value": [point.mean.value for point in thin],
                "count": [point.mean.count for point in thin],
            }
        return {"run": self.run, "curves": curves}


_round_of = attrgetter("round")


def _thin_out(points: list[Point], most: int) -> list[Point]:
    """Return at most `most` points. The first is kept, and each other one is the mean of the points up to it."""
    if len(points) <= most:
        return points
    ends = [i * (len(points) - 1) // (most - 1) for i in range(most)]
    merged = [reduce(Mean.merge, (p.mean for p in points[a + 1 : b + 1])) for a, b in pairwise([-1, *ends])]
    return [replace(points[end], mean=mean) for end, mean in zip(ends, merged, strict=True)]


log = get_logger()

MAX_RUNS = 100
MAX_KEPT_POINTS = 300  # of one curve in a file
MAX_ALL_POINTS = 20_000  # of all curves in a file, which then has about 1 MB


class HistoryEntry(Message):
    """A run of the history, as `GET /v1/history` lists it. Times are in seconds since 1970."""

    run: Identifier
    name: Label | None = Field(description="name that the script gave to the run")
    state: RunState = Field(description="`training`: the coordinator stopped while the run trained")
    mode: Mode
    optimizer: Note | None = Field(description="optimizer with the hyperparameters that are not its defaults")
    command: Note | None = Field(description="command line of the script")
    started_at: Real
    ended_at: Real
    earlier_seconds: Real
    rounds: Round
    results: dict[Name, Number] = Field(description="newest reported results; those of the lowest rank win")
    failure: Note | None = Field(description="reason of a failed or stopped run")


class HistoryRecord(Message):
    """A run of the history. Times are in seconds since 1970."""

    status: ClusterStatus = Field(description="answer of `GET /v1/status` at the end of the run")
    started_at: Real = Field(description="when training began, in the newest process of the coordinator")
    ended_at: Real
    earlier_seconds: Real = Field(
        default=0.0, description="duration of the run in earlier processes of the coordinator"
    )
    summary: RunSummary | None = Field(description="null if the coordinator stopped before it was made")
    curves: CurveList = Field(description=f"results that trainers reported, with at most {MAX_KEPT_POINTS} points each")

    @property
    def seconds(self) -> float:
        """The duration of the run, without the time between processes of the coordinator."""
        return self.earlier_seconds + self.ended_at - self.started_at

    @property
    def entry(self) -> HistoryEntry:
        """The record in short."""
        status, results = self.status, dict[str, float]()
        for trainer in sorted(status.trainers, key=lambda trainer: -trainer.rank):
            results.update(trainer.heartbeat.results)
        scripts = [trainer.heartbeat.script for trainer in status.trainers if trainer.heartbeat.script is not None]
        return HistoryEntry(
            run=status.run,
            name=next((script.run_name for script in scripts if script.run_name), None),
            state=status.state,
            mode=status.mode,
            optimizer=next((script.optimizer for script in scripts if script.optimizer), None),
            command=next((script.command for script in scripts), None),
            started_at=self.started_at,
            ended_at=self.ended_at,
            earlier_seconds=self.earlier_seconds,
            rounds=self.summary.rounds if self.summary else status.round,
            results=results,
            failure=status.failure and str(status.failure.get("detail")),
        )


class RunHistory:
    """The folder of records. Its methods block on the disk, and may be called by any thread."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()  # of writes, whose temporary file has the name of the run
        self._entries: dict[tuple[str, int], HistoryEntry | None] = {}  # by file and time of its last change

    def entries(self) -> list[HistoryEntry]:
        """Return the entries of all readable records, newest first. An unreadable file is logged once."""
        entries: dict[tuple[str, int], HistoryEntry | None] = {}
        for file, stat in self._files().items():
            key = file.name, stat.st_mtime_ns
            entries[key] = self._entries[key] if key in self._entries else _read_entry(file)
        self._entries = entries
        return sorted(filter(None, entries.values()), key=lambda entry: entry.started_at, reverse=True)

    def read(self, run: str) -> HistoryRecord:
        """Return the record of a run. Raises NotFound."""
        with suppress(OSError, UnsupportedFormat):  # damaged, of another version, or deleted by another process
            for file in self._files():  # a name with `..` or `/` is none of these
                if file.name == f"{run}.json":
                    return _read_record(file)
        raise NotFound(f"the history has no readable record of run {run!r:.80}; GET /v1/history lists all runs")

    def write(self, record: HistoryRecord) -> None:
        """Write a record, or replace that of its run, and delete the oldest beyond `MAX_RUNS`. Raises OSError."""
        with self._lock:
            write_file(self.folder / f"{record.status.run}.json", [seal(record)])
            files = self._files()
            for old in sorted(files, key=lambda file: files[file].st_mtime_ns)[:-MAX_RUNS]:
                old.unlink(missing_ok=True)

    def _files(self) -> dict[Path, os.stat_result]:
        found = {}
        for file in self.folder.glob("*.json"):
            with suppress(FileNotFoundError):  # deleted by another process
                found[file] = file.stat()
        return found


def _read_record(file: Path) -> HistoryRecord:
    return unseal(file.read_bytes(), HistoryRecord, str(file))


def _read_entry(file: Path) -> HistoryEntry | None:
    try:
        return _read_record(file).entry
    except (OSError, UnsupportedFormat) as error:
        log.warning("a run is left out of the history, because its file cannot be read", error=str(error))
        return None


class HistoryWriter:
    """Writes the record of each run that ends. Used on the event loop alone.

    A record is written when the run is over, and again when its trainers have left and when its result is saved.
    """

    def __init__(self, history: RunHistory, shell: Shell, curves: Curves, result: RunResult) -> None:
        self._history = history
        self._shell = shell
        self._cluster = shell.cluster
        self._curves = curves
        self._result = result
        self._earlier: HistoryRecord | None = None  # of the restored run, by an earlier process
        self._noted: tuple[object, ...] = ()
        self._make_record: Callable[[], HistoryRecord] | None = None  # of the newest change, until it is written

    def restore(self, earlier: HistoryRecord) -> None:
        """Continue the record that an earlier process of the coordinator has written of the restored run."""
        self._earlier = earlier
        self._curves.restore(earlier.curves)

    def note(self, *, is_stopping: bool = False) -> None:
        """Note the end of the run, or with `is_stopping` the end of the process, before another run begins.

        A run keeps its file if it was restored after its end, or has no heartbeats or no new rounds in this process.
        """
        run, record = self._cluster.run, self._cluster.run.record
        stage = record.name, record.state, record.is_deserted, run.is_result_saved
        if stage == self._noted or not (record.is_over or is_stopping):
            return
        is_restored = run.started_at == run.ended_at
        if not record.has_begun or is_restored or self._curves.run != record.name:
            return
        earlier = self._earlier if self._earlier is not None and self._earlier.status.run == record.name else None
        if earlier is not None and not run.has_new_rounds:
            return
        self._noted, now = stage, self._shell.now()
        since_1970 = time.time() - now
        started_at = since_1970 + (run.started_at or 0.0)
        ended_at = since_1970 + (now if run.ended_at is None else run.ended_at)
        status = describe_status(run, self._cluster.registry, now, since_1970 + now)
        summary = self._result.find_summary(record.name)
        curves = self._curves.copy()  # means of thousands of points take too long for the event loop

        def make_record() -> HistoryRecord:
            return HistoryRecord(
                status=status,
                started_at=started_at,
                ended_at=ended_at,
                earlier_seconds=0.0 if earlier is None else earlier.seconds,
                summary=summary,
                curves=CurveList.model_validate(curves.describe(MAX_KEPT_POINTS, MAX_ALL_POINTS)),
            )

        self._make_record = make_record

    async def write_notes(self) -> None:
        """Write each noted record until the task is cancelled."""
        seen = -1
        while True:
            seen = await self._shell.wait_for_change(seen)
            await self.flush()

    async def flush(self) -> None:
        """Write the noted record, if any. A failure is logged."""
        if (make_record := self._make_record) is None:
            return
        try:
            await asyncio.to_thread(lambda: self._history.write(make_record()))
        except OSError as error:
            log.error("the run is missing in the history, because its file cannot be written", error=str(error))
        if self._make_record is make_record:  # otherwise, there is a newer one
            self._make_record = None
