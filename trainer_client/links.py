"""How fast a trainer reaches each pserver: measured on what it sends and gets anyhow, and told with heartbeats."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter

from ps_protocol.messages import Link, Traffic

WINDOW_SECONDS = 10.0  # of traffic; when there is more, all of it counts for half beside what comes


@dataclass(slots=True)
class TrafficMeter:
    """One direction. Requests that are on their way at once share their time, so that bytes a second are the link's."""

    _num_requests: float = 0.0
    _num_bytes: float = 0.0
    _seconds: float = 0.0
    _in_flight: int = 0
    _busy_since: float = 0.0

    @contextmanager
    def transfer(self) -> Iterator[None]:
        """The block lasts as long as the bytes are on their way."""
        if self._in_flight == 0:
            self._busy_since = perf_counter()
        self._in_flight += 1
        try:
            yield
        finally:
            self._in_flight -= 1
            now = perf_counter()
            self._seconds += now - self._busy_since
            self._busy_since = now

    def add(self, num_bytes: int) -> None:
        """So many have arrived in one request, whose time is over."""
        self._num_requests += 1
        self._num_bytes += num_bytes
        if self._seconds > WINDOW_SECONDS:
            self._num_requests, self._num_bytes, self._seconds = (
                self._num_requests / 2, self._num_bytes / 2, self._seconds / 2,
            )  # fmt: skip

    def describe(self) -> Traffic:
        """As it travels."""
        return Traffic(num_requests=round(self._num_requests), num_bytes=round(self._num_bytes), seconds=self._seconds)


@dataclass(slots=True)
class LinkMeter:
    """Of one pserver."""

    is_local: bool = False  # the newest answer came over a Unix socket
    round_trip_seconds: float | None = None  # of a small request over a connection that is open
    pushes: TrafficMeter = field(default_factory=TrafficMeter)
    pulls: TrafficMeter = field(default_factory=TrafficMeter)

    def describe(self) -> Link:
        """As it travels."""
        return Link(
            is_local=self.is_local,
            round_trip_seconds=self.round_trip_seconds,
            pushes=self.pushes.describe(),
            pulls=self.pulls.describe(),
        )
