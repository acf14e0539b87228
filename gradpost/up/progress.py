"""The live line of `gradpost up`, and its final report."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from rich.console import RenderableType
from rich.spinner import Spinner
from rich.text import Text

from ps_protocol.errors import GradpostError
from ps_protocol.messages import ClusterStatus, RunSummary
from ps_protocol.printable import printable
from trainer_client.client.inspection import ClusterView

from ..output import Column, print_json, print_line, print_table

PERIOD_SECONDS = 0.5
RATE_SECONDS = 5.0  # the time over which the coordinator measures rates
SLOW_ROUND_SECONDS = 2.0  # the line names the missing trainers of a round that waits longer


def describe(
    status: ClusterStatus, summary: RunSummary, activity: Mapping[str, Any], *, is_interrupted: bool = False
) -> str:
    """Return the live line: the run's state, round, speed, throughput, time and results."""
    if status.state == "gathering":
        return "waiting for " + ", ".join(status.waiting_for)
    state = "interrupted" if is_interrupted else "paused" if status.is_paused else status.state
    parts = [f"{state}: round {summary.rounds:,}"]
    has_rate = _has_rate(activity)
    if status.state == "training":
        rates = ("pushed_bytes_per_second", "pulled_bytes_per_second")
        bytes_per_second = sum(pserver[rate] or 0.0 for pserver in activity["pservers"] for rate in rates)
        parts += [f"{activity['rounds_per_second'] or 0.0:.1f} rounds/s"] if has_rate else []
        parts.append(f"{bytes_per_second / 1e6:.1f} MB/s")
    parts.append(f"elapsed {_clock(summary.seconds)}")
    if has_rate and activity["remaining_seconds"] is not None:
        parts.append(f"remaining {_clock(activity['remaining_seconds'])}")
    slowest = max(status.pservers, key=lambda p: p.waiting_seconds, default=None)
    if slowest is not None and slowest.missing and slowest.waiting_seconds > SLOW_ROUND_SECONDS:
        names = ", ".join(f"trainer {rank}" for rank in slowest.missing)
        parts.append(f"waiting for {names} ({slowest.waiting_seconds:.0f} s)")
    parts += [f"{name} {value:.4g}" for name, value in sorted(summary.results.items())]  # last: a terminal may cut them
    return "  ".join(parts)


def _has_rate(activity: Mapping[str, Any]) -> bool:
    """Return whether the run has trained for so long that the rates do not include the time before its first round."""
    rates = activity["rates"]
    training = (at for at, rate in zip(rates["at"], rates["rounds_per_second"], strict=True) if rate)
    now: float = activity["at"]
    return now - next(training, math.inf) >= RATE_SECONDS


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


class Progress:
    """The live line and the newest summary, which a thread updates from the coordinator during the block."""

    def __init__(self, view: ClusterView, is_interrupted: Callable[[], bool]) -> None:
        self.summary: RunSummary | None = None
        self._view = view
        self._is_interrupted = is_interrupted
        self._spinner = Spinner("dots", style="green")
        self._text = "starting"
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
                self._text = describe(
                    self._view.status(), self.summary, self._view.activity(), is_interrupted=self._is_interrupted()
                )
            except GradpostError:
                continue  # `LocalRun` detects processes that have ended


def print_summary(summary: RunSummary, outcome: str | None = None, *, as_json: bool) -> None:
    """Print tables and the final line of the run, or JSON. `outcome` is the first word of the line."""
    if as_json:
        print_json(summary_to_json(summary))
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
                (str(shard.pserver), *(f"{n:,}" for n in (shard.shard_bytes, shard.pushed_bytes, shard.pulled_bytes)))
                for shard in summary.shards
            ],
        )
    print_line(summary.line(outcome))


def summary_to_json(summary: RunSummary) -> dict[str, Any]:
    """Return the document that `--json` prints: the summary with the mean time of a round."""
    return {**json.loads(summary.model_dump_json()), "seconds_a_round": seconds_a_round(summary)}


def seconds_a_round(summary: RunSummary) -> float:
    """Return the mean time of a round since the run was started or resumed; 0 without rounds."""
    return summary.seconds / summary.new_rounds if summary.new_rounds else 0.0
