"""The export of a run to a tracker: the curves and the parameters' statistics, from the coordinator's API."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

from ps_protocol.errors import NotFound, TryAgain, Unreachable
from ps_protocol.vocabulary import Round
from services.coordinator.history import HistoryRecord, RunHistory
from trainer_client.client.inspection import ClusterView

from ..output import count, print_line, warn
from ..state_folder import history_folder, named_root
from ..status import asking

POLL_SECONDS = 2.0
RECONNECT_SECONDS = 60.0  # for a coordinator that has been reached before
NUM_CONCURRENT = 4  # requests, each of which may wait for the parameter's next update
PARAMETERS = "parameters"  # the source of the statistics; `trainer-0` is that of the curves of trainer 0


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """The name of a run, and its settings."""

    name: str
    settings: Mapping[str, str | int]

    def metric(self, source: str, name: str) -> str:
        """Return the name of a metric for a tracker in which all sources share one list of names.

        >>> TrackedRun("5f0c", {"num_trainers": 2}).metric("trainer-0", "loss")
        'trainer-0/loss'
        >>> TrackedRun("5f0c", {"num_trainers": 1}).metric("trainer-0", "loss")
        'loss'
        """
        return name if source == PARAMETERS or self.settings["num_trainers"] == 1 else f"{source}/{name}"


class Tracker(Protocol):
    """A tracker with one open run. The rounds of a source increase until `discard` names an earlier one."""

    def discard(self, source: str, round_: Round) -> None:
        """Hide what the source has written from this round on, if the tracker can. It precedes the first value."""

    def write_values(self, source: str, round_: Round, at: float, values: Mapping[str, float]) -> None:
        """Write values of a round, which the coordinator has received at `at`, in seconds since 1970."""

    def flush(self) -> None:
        """Write buffered values."""

    def close(self, *, is_failed: bool) -> None:
        """Write buffered values, and end the tracker's run."""


def export_run(
    coordinator: str | None,
    token_file: Path | None,
    open_tracker: Callable[[TrackedRun], Tracker],
    every_seconds: float,
    place: str,
    hint: str = "",
) -> None:
    """Export until the run is over or Ctrl-C, with statistics every so many seconds (0: none). Raises CommandError."""
    with asking(coordinator, token_file) as view:
        print_line(f"run {view.status().run} goes to {place}{hint}", flush=True)
        export = Export(open_tracker)
        is_failed = False
        try:
            with suppress(KeyboardInterrupt):
                is_failed = _follow_run(view, export, every_seconds)
        finally:
            export.close(is_failed=is_failed)
        print_line(f"{place}: {count(export.num_points, 'point')} of curves")


def _follow_run(view: ClusterView, export: Export, every_seconds: float) -> bool:
    """Export until the run is over. Returns whether it has failed."""
    next_statistics, reached_at, is_unreachable = time.monotonic(), time.monotonic(), False
    seen, seen_at = "", 0.0  # the newest run, and when it was requested
    while True:
        asked_at = time.time()
        try:
            status = view.status()  # requested first, so that the curves are complete
            is_over = status.state in ("finished", "failed")
            settings = status.model_dump(include={"mode", "num_pservers", "num_trainers"})
            export.continue_run(TrackedRun(status.run, settings))
            export.add_curves(view.curves())
            if every_seconds and (is_over or time.monotonic() >= next_statistics):
                next_statistics = time.monotonic() + every_seconds
                export.add_parameters(_read_parameters(view))
            export.flush()
            if is_over:
                return status.state == "failed"
            reached_at, is_unreachable = time.monotonic(), False
            seen, seen_at = status.run, asked_at
        except Unreachable as error:
            if (ended := _find_end(seen, seen_at)) is not None:
                export.add_curves(ended.curves.model_dump())
                return ended.status.state != "finished"
            if time.monotonic() - reached_at > RECONNECT_SECONDS:
                raise
            if not is_unreachable:
                warn(f"{error}; trying again for {RECONNECT_SECONDS:g} s")
            is_unreachable = True
        time.sleep(POLL_SECONDS)


def _find_end(run: str, after: float) -> HistoryRecord | None:
    """Return the record of a run of `gradpost up` in this folder that ended `after` a time, in seconds since 1970."""
    with suppress(NotFound):
        record = RunHistory(history_folder(named_root())).read(run)
        return record if record.ended_at >= after else None  # otherwise it is of the run before it was resumed
    return None


def _read_parameters(view: ClusterView) -> list[dict[str, Any]]:
    """Return the statistics of each parameter; an empty list before the run has a model."""

    def read(name: str) -> dict[str, Any] | None:
        with suppress(TryAgain, NotFound):  # members change, or another run has begun
            return view.statistics(name)
        return None

    with suppress(TryAgain), ThreadPoolExecutor(NUM_CONCURRENT) as threads:
        names = [one["name"] for one in view.parameters()["parameters"]]
        return [found for found in threads.map(read, names) if found is not None]
    return []


class Export:
    """The export of the newest run to a tracker. A value of an earlier round follows a rollback."""

    def __init__(self, open_tracker: Callable[[TrackedRun], Tracker]) -> None:
        self.num_points = 0
        self._open_tracker = open_tracker
        self._run: TrackedRun | None = None
        self._tracker: Tracker | None = None
        self._points: dict[str, tuple[float, float]] = {}  # newest of each source: time and round
        self._versions: dict[str, Round] = {}  # newest of each parameter

    def continue_run(self, run: TrackedRun) -> None:
        """Export to this run of the tracker, which is opened unless it is open."""
        if self._run is not None and self._run.name == run.name:
            return
        self.close(is_failed=False)
        self._run, self._tracker = run, self._open_tracker(run)
        self._points.clear()
        self._versions.clear()

    def add_curves(self, found: Mapping[str, Any]) -> None:
        """Write the new points in a response of `/v1/curves`. All points of a heartbeat are written at once."""
        if (tracker := self._tracker_of(found)) is None:
            return
        fresh = sorted(
            (at, f"trainer-{rank}", round_, name, math.nan if value is None else value)
            for name, by_rank in found["curves"].items()
            for rank, curve in by_rank.items()
            for round_, at, value in zip(curve["round"], curve["at"], curve["value"], strict=True)
            if at > self._points.get(f"trainer-{rank}", (0.0,))[0]
        )
        for (at, source, round_), points in groupby(fresh, key=lambda point: point[:3]):
            if round_ < self._points.get(source, (0.0, math.inf))[1]:
                tracker.discard(source, round_)
            values = {name: value for *_, name, value in points}
            tracker.write_values(source, round_, at, values)
            self._points[source] = at, round_
            self.num_points += len(values)

    def add_parameters(self, found: Sequence[Mapping[str, Any]]) -> None:
        """Write the new statistics in responses of `/v1/statistics`, one response for each parameter."""
        for one in sorted(found, key=lambda one: int(one["version"])):
            name, round_ = one["name"], one["version"]
            if (tracker := self._tracker_of(one)) is None or round_ == (newest := self._versions.get(name, -1)):
                continue
            if round_ < newest or not self._versions:
                tracker.discard(PARAMETERS, round_)
                self._versions.clear()  # the rollback concerns all of them, and is handled once
            self._versions[name] = round_
            values = {f"norm/{name}": one["norm"], f"update_ratio/{name}": one["update_ratio"]}
            known = {key: value for key, value in values.items() if value is not None}
            tracker.write_values(PARAMETERS, round_, time.time(), known)

    def flush(self) -> None:
        """Write what the tracker buffers."""
        if self._tracker is not None:
            self._tracker.flush()

    def close(self, *, is_failed: bool) -> None:
        """End the tracker's run."""
        tracker, self._tracker = self._tracker, None
        if tracker is not None:
            tracker.close(is_failed=is_failed)

    def _tracker_of(self, found: Mapping[str, Any]) -> Tracker | None:
        """Return the tracker if the response is about its run. The next status names another run."""
        return self._tracker if self._run is not None and found["run"] == self._run.name else None
