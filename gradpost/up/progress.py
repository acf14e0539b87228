"""The live line of `gradpost up`, and its final report."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType

from rich.console import RenderableType
from rich.spinner import Spinner
from rich.text import Text

from ps_protocol.errors import GradpostError
from ps_protocol.messages import ClusterStatus, PserverHeartbeat, RunSummary
from ps_protocol.printable import printable
from trainer_client.client.inspection import ClusterView

from ..output import Column, print_json, print_line, print_table

PERIOD_SECONDS = 0.5
RATE_SECONDS = 5.0  # the time over which rates are measured
SLOW_ROUND_SECONDS = 2.0  # the line names the missing trainers of a round that waits longer
REPORTED_SECONDS = 10.0  # a line of its own does, also without a terminal


def describe(
    status: ClusterStatus, summary: RunSummary, earlier: ClusterStatus | None, *, is_interrupted: bool = False
) -> str:
    """Return the live line: the run's state, round, speed, throughput, time and results.

    Rates are those since the `earlier` status, if there is one.
    """
    if status.state == "gathering":
        return "waiting for " + ", ".join(status.waiting_for)
    state = "interrupted" if is_interrupted else "paused" if status.is_paused else status.state
    parts = [f"{state}: round {summary.rounds:,}"]
    left = None
    if status.state == "training" and earlier is not None:
        seconds = status.at - earlier.at
        parts.append(f"{max(0, status.round - earlier.round) / seconds:.1f} rounds/s")
        parts.append(f"{max(0, _count_bytes(status) - _count_bytes(earlier)) / seconds / 1e6:.1f} MB/s")
        left = _find_remaining_seconds(status, earlier)
    parts.append(f"elapsed {_clock(summary.seconds)}")
    if left is not None:
        parts.append(f"remaining {_clock(left)}")
    if (slowest := _find_wait(status, SLOW_ROUND_SECONDS)) is not None:
        parts.append(f"waiting for {_name_missing(slowest)} ({slowest.waiting_seconds:.0f} s)")
    parts += [f"{name} {value:.4g}" for name, value in sorted(summary.results.items())]  # last: a terminal may cut them
    return "  ".join(parts)


def _count_bytes(status: ClusterStatus) -> int:
    return sum(pserver.heartbeat.pushed_bytes + pserver.heartbeat.pulled_bytes for pserver in status.pservers)


def _find_remaining_seconds(status: ClusterStatus, earlier: ClusterStatus) -> float | None:
    """Return the time until the slowest trainer has taken its steps; None if no script has declared their number."""
    before = {trainer.rank: trainer.heartbeat.round for trainer in earlier.trainers}
    left = []
    for trainer in status.trainers:
        script, round_ = trainer.heartbeat.script, trainer.heartbeat.round
        steps = round_ - before.get(trainer.rank, round_)
        if script is not None and script.total_rounds is not None and steps > 0:
            left.append((script.total_rounds - round_) * (status.at - earlier.at) / steps)
    return max(left, default=None)


def _find_wait(status: ClusterStatus, seconds: float) -> PserverHeartbeat | None:
    """Return the pserver whose round has waited longest for trainers, if that is longer than `seconds`."""
    waiting = [p.heartbeat for p in status.pservers if p.heartbeat.missing and p.heartbeat.waiting_seconds > seconds]
    return max(waiting, key=lambda one: one.waiting_seconds, default=None)


def _name_missing(pserver: PserverHeartbeat) -> str:
    return ", ".join(f"trainer {rank}" for rank in pserver.missing)


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


class Progress:
    """The live line and the newest summary, which a thread updates from the coordinator during the block.

    It calls `report` once with each set of trainers that a round waits for.
    """

    def __init__(self, view: ClusterView, is_interrupted: Callable[[], bool], report: Callable[[str], None]) -> None:
        self.summary: RunSummary | None = None
        self._view = view
        self._is_interrupted = is_interrupted
        self._report = report
        self._reported: set[str] = set()
        self._spinner = Spinner("dots", style="green")
        self._text = "starting"
        self._statuses: deque[ClusterStatus] = deque()  # of the newest seconds of this attempt
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="progress", daemon=True)

    def __enter__(self) -> Progress:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def render(self) -> RenderableType:
        """Return the live line."""
        self._spinner.text = Text(printable(self._text), "bold", no_wrap=True, overflow="ellipsis")
        return self._spinner

    def _watch(self) -> None:
        while not self._stop.wait(PERIOD_SECONDS):
            try:
                self.summary = self._view.summary()
                status = self._view.status()
            except GradpostError:
                continue  # `LocalRun` detects processes that have ended
            earlier = self._find_earlier(status)
            self._text = describe(status, self.summary, earlier, is_interrupted=self._is_interrupted())
            waiting = _find_wait(status, REPORTED_SECONDS)
            if waiting is not None and (names := _name_missing(waiting)) not in self._reported:
                self._reported.add(names)
                self._report(f"round {waiting.round + 1:,} has waited for {names} for {waiting.waiting_seconds:.0f} s")

    def _find_earlier(self, status: ClusterStatus) -> ClusterStatus | None:
        """Add the status, and return the one of `RATE_SECONDS` before; None if the run has not trained for so long."""
        statuses = self._statuses
        if status.round == 0 or (statuses and (statuses[-1].run, statuses[-1].attempt) != (status.run, status.attempt)):
            statuses.clear()  # no rate includes the time before the first round
        if status.round:
            statuses.append(status)
        while len(statuses) > 1 and statuses[1].at <= status.at - RATE_SECONDS:
            statuses.popleft()
        return statuses[0] if statuses and statuses[0].at <= status.at - RATE_SECONDS else None


def print_summary(summary: RunSummary, outcome: str | None = None, *, as_json: bool) -> None:
    """Print tables and the final line of the run, or JSON. `outcome` is the first word of the line."""
    if as_json:
        print_json({**json.loads(summary.model_dump_json()), "seconds_a_round": seconds_a_round(summary)})
        return
    print_line()
    shown = {"rounds": f"{summary.rounds:,}"}
    if summary.earlier_rounds:
        shown["new rounds"] = f"{summary.new_rounds:,}"
    shown["seconds"] = f"{summary.seconds:.1f}"
    shown["seconds a round"] = f"{seconds_a_round(summary):.4f}" if summary.new_rounds else "–"
    columns = [*shown.items(), *((name, f"{value:.4g}") for name, value in sorted(summary.results.items()))]
    print_table([Column(title, "right") for title, _ in columns], [tuple(text for _, text in columns)])
    if summary.shards:  # not with strategy ring
        print_table(
            [Column(title, "right") for title in ("pserver", "shard bytes", "pushed bytes", "pulled bytes")],
            [
                (str(shard.index), *(f"{n:,}" for n in (shard.shard_bytes, shard.pushed_bytes, shard.pulled_bytes)))
                for shard in summary.shards
            ],
        )
    print_line(summary.line(outcome))


def seconds_a_round(summary: RunSummary) -> float:
    """Return the mean time of a round since the run was started or resumed; 0 without rounds."""
    return summary.seconds / summary.new_rounds if summary.new_rounds else 0.0
