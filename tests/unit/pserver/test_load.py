"""What a pserver tells of its load: counted since the run began, though metrics count for longer."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from services.pserver.metrics import LoadMeter, PserverMetrics
from services.runtime.compute import ComputeExecutor


def test_only_what_was_added_since_counts() -> None:
    metrics = PserverMetrics(CollectorRegistry(), ComputeExecutor())
    metrics.apply_seconds.observe(5.0)
    metrics.staleness.observe(1)
    meter = LoadMeter(metrics)
    assert meter.read()["num_applies"] == 0
    assert not any(number for _, number in meter.read()["staleness"])
    for seconds in (0.25, 0.5):
        metrics.apply_seconds.observe(seconds)
    for value in (0, 1, 1, 5, 6, 1000):
        metrics.staleness.observe(value)
    found = meter.read()
    assert (found["num_applies"], found["apply_seconds"]) == (2, pytest.approx(0.75))
    assert (found["num_waits"], found["wait_seconds"]) == (0, 0)
    counts = dict(found["staleness"])
    assert {bound: number for bound, number in counts.items() if number} == {0: 1, 1: 2, 6: 2, None: 1}
    assert meter.num_held == 0
    with metrics.held_pushes.track_inprogress():
        assert meter.num_held == 1
