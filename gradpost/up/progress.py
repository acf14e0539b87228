"""The live line of `gradpost up`: what the coordinator says about the run, twice a second."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field
from types import TracebackType

from rich.console import RenderableType
from rich.spinner import Spinner
from rich.text import Text

from ps_protocol.errors import GradpostError
from ps_protocol.messages import ClusterStatus, RunSummary
from ps_protocol.printable import printable
from trainer_client.inspection import ClusterView

PERIOD_SECONDS = 0.5
WINDOW_SECONDS = 3.0
SLOW_ROUND_SECONDS = 2.0  # from here on it is worth saying whom a round waits for


@dataclass
class RateMeter:
    """Rounds and bytes a second over the last few seconds."""

    window_seconds: float = WINDOW_SECONDS
    _samples: deque[tuple[float, int, int]] = field(default_factory=deque)

    def add(self, now: float, rounds: int, num_bytes: int) -> None:
        """Take a reading of the counters; counters that went back belong to another run."""
        if self._samples and rounds < self._samples[-1][1]:
            self._samples.clear()
        self._samples.append((now, rounds, num_bytes))
        while now - self._samples[0][0] > self.window_seconds and len(self._samples) > 2:
            self._samples.popleft()

    @property
    def rates(self) -> tuple[float, float]:
        """(rounds, bytes) a second; zero until there are two readings."""
        if len(self._samples) < 2:
            return 0.0, 0.0
        (begin, rounds, num_bytes), (end, more_rounds, more_bytes) = self._samples[0], self._samples[-1]
        seconds = max(end - begin, 1e-9)
        return (more_rounds - rounds) / seconds, (more_bytes - num_bytes) / seconds


def describe(status: ClusterStatus, summary: RunSummary, rates: tuple[float, float]) -> str:
    """The live line in words: the run's state, then round, speed, throughput, time and what scripts reported."""
    if status.state == "gathering":
        return "waiting for " + ", ".join(status.waiting_for)
    rounds_per_second, bytes_per_second = rates
    parts = [f"{status.state}: round {summary.rounds:,}"]
    if status.state == "training":
        parts += [f"{rounds_per_second:.1f} rounds/s", f"{bytes_per_second / 1e6:.1f} MB/s"]
    parts += [f"{name} {value:.4g}" for name, value in sorted(summary.results.items())]
    parts.append(f"{int(summary.seconds) // 60}:{int(summary.seconds) % 60:02}")
    slowest = max(status.pservers, key=lambda p: p.waiting_seconds, default=None)
    if slowest is not None and slowest.missing and slowest.waiting_seconds > SLOW_ROUND_SECONDS:
        names = ", ".join(f"trainer {rank}" for rank in slowest.missing)
        parts.append(f"waiting for {names} ({slowest.waiting_seconds:.0f} s)")
    return "  ".join(parts)


class Progress:
    """Asks the coordinator from a thread while the block lasts, and renders the newest answer."""

    def __init__(self, view: ClusterView) -> None:
        self._view = view
        self._meter = RateMeter()
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
        """The live line."""
        self._spinner.text = Text(printable(self._text), "bold", no_wrap=True, overflow="ellipsis")
        return self._spinner

    def _watch(self) -> None:
        while not self._stop.wait(PERIOD_SECONDS):
            try:
                status, summary = self._view.status(), self._view.summary()
            except GradpostError:
                continue  # the line is a convenience; what has died is noticed by other means
            num_bytes = sum(shard.pushed_bytes + shard.pulled_bytes for shard in summary.shards)
            self._meter.add(time.monotonic(), summary.rounds, num_bytes)
            self._text = describe(status, summary, self._meter.rates)
