"""Statistics of merged pieces equal those of the whole, and the load of a pserver."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from services.pserver import statistics
from services.pserver.metrics import LoadMeter, PserverMetrics
from services.pserver.statistics import describe_values
from services.runtime.compute import ComputeExecutor
from services.runtime.statistics import MAX_BINS, Histogram, Statistics

FLOATS = st.floats(width=32)  # NaN, infinities and what is below the normal numbers included


def merged(pieces: list[list[float]]) -> Statistics:
    total = Statistics(version=9, num_elements=0)
    for piece in pieces:
        total = total.merge(describe_values(torch.tensor(piece), 7))
    return total


@given(st.lists(st.lists(FLOATS, max_size=20), min_size=1, max_size=5))
def test_pieces_make_the_whole(pieces: list[list[float]]) -> None:
    found = merged(pieces)
    values = np.array([value for piece in pieces for value in piece], dtype=np.float64)
    finite = values[np.isfinite(values)]
    assert (found.num_elements, found.num_finite) == (len(values), len(finite))
    assert (found.num_nan, found.num_infinite) == (int(np.isnan(values).sum()), int(np.isinf(values).sum()))
    assert found.num_zero == int((values == 0).sum())
    if not len(finite):
        assert (found.minimum, found.maximum, found.describe()["mean"]) == (None, None, None)
        return
    size = float(np.abs(finite).max())
    assert (found.minimum, found.maximum) == (finite.min(), finite.max())
    assert math.isclose(found.mean, finite.mean(), rel_tol=1e-9, abs_tol=1e-12 * size)
    assert math.isclose(found.describe()["norm"], math.hypot(*finite), rel_tol=1e-9)
    assert math.isclose(found.describe()["deviation"], finite.std(), rel_tol=1e-6, abs_tol=1e-9 * size)
    assert_counts(found.histogram, finite)


def assert_counts(histogram: Histogram, values: np.ndarray) -> None:
    numbers = [math.floor(math.ldexp(float(value), -histogram.exponent)) - histogram.first for value in values]
    assert list(histogram.counts) == np.bincount(numbers, minlength=len(histogram.counts)).tolist()
    assert len(histogram.counts) <= MAX_BINS


@given(st.lists(FLOATS, min_size=1, max_size=50), st.integers(1, 5))
def test_large_blocks_are_described_in_pieces(values: list[float], size: int) -> None:
    tensor = torch.tensor(values)
    whole = describe_values(tensor, 1, tensor.flip(0))
    before, statistics.PIECE = statistics.PIECE, size
    try:
        cut = describe_values(tensor, 1, tensor.flip(0))
    finally:
        statistics.PIECE = before
    assert (cut.minimum, cut.maximum, cut.num_nan) == (whole.minimum, whole.maximum, whole.num_nan)
    assert cut.before_squares == pytest.approx(whole.before_squares, nan_ok=True)
    assert sum(cut.histogram.counts) == sum(whole.histogram.counts)


def test_the_size_of_an_update() -> None:
    before = torch.tensor([3.0, 4.0])
    found = describe_values(before + torch.tensor([0.3, 0.4]), 2, before).describe()
    assert found["update_ratio"] == pytest.approx(0.1)
    both = describe_values(before, 2, before).merge(describe_values(before, 2))
    assert both.describe()["update_ratio"] is None  # of one of them no update was seen


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_an_update_is_seen_though_some_values_are_no_numbers(odd: float) -> None:
    before, after = torch.tensor([1.0, odd, 2.0]), torch.tensor([4.0, odd, 2.0])
    found = Statistics.model_validate_json(describe_values(after, 7, before).model_dump_json())
    assert (found.update_squares, found.before_squares) == (9.0, 5.0)
    assert found.num_nan + found.num_infinite == 1


def test_the_load_counts_since_the_run_began() -> None:
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
