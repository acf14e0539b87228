"""How a trainer measures its way to a pserver."""

from __future__ import annotations

import pytest

from trainer_client import links
from trainer_client.links import LinkMeter, TrafficMeter


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Its only element is what the clock shows."""
    now = [100.0]
    monkeypatch.setattr(links, "perf_counter", lambda: now[0])
    return now


def test_what_is_on_its_way_at_once_shares_its_time(clock: list[float]) -> None:
    meter = TrafficMeter()
    with meter.transfer():
        clock[0] += 1
        with meter.transfer():
            clock[0] += 2
        meter.add(10)
        clock[0] += 3
    meter.add(20)
    clock[0] += 50  # nothing is on its way
    with meter.transfer():
        clock[0] += 1  # and brought nothing: it was refused
    described = meter.describe()
    assert (described.num_requests, described.num_bytes, described.seconds) == (2, 30, 7.0)


def test_what_was_long_ago_fades(clock: list[float]) -> None:
    meter = TrafficMeter()
    for num_bytes, times in ((100, 50), (10, 100)):
        for _ in range(times):
            with meter.transfer():
                clock[0] += 1
            meter.add(num_bytes)
    described = meter.describe()
    assert described.seconds < 12
    assert described.num_bytes / described.seconds == pytest.approx(10, rel=0.01)


def test_a_way_that_was_never_gone() -> None:
    described = LinkMeter().describe()
    assert (described.round_trip_seconds, described.pushes.num_requests, described.pulls.seconds) == (None, 0, 0)
