"""Statistics of merged pieces equal those of the whole, and the meters of a pserver."""

from __future__ import annotations

import math
from collections import Counter
from functools import reduce

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from services.pserver.metrics import PserverMetrics
from services.pserver.statistics import PIECE, describe_values
from services.runtime.compute import ComputeExecutor
from services.runtime.statistics import Statistics

FLOATS = st.floats(width=32)  # NaN, infinities and what is below the normal numbers included


def merged(pieces: list[list[float]]) -> Statistics:
    return reduce(Statistics.merge, (describe_values(torch.tensor(piece), 7) for piece in pieces))


@given(st.lists(st.lists(FLOATS, max_size=20), min_size=1, max_size=5))
def test_pieces_make_the_whole(pieces: list[list[float]]) -> None:
    found = Statistics.model_validate_json(merged(pieces).model_dump_json()).describe()
    values = np.array([value for piece in pieces for value in piece], dtype=np.float64)
    finite = values[np.isfinite(values)]
    assert (found["num_elements"], found["num_zero"]) == (len(values), int((values == 0).sum()))
    assert (found["num_nan"], found["num_infinite"]) == (int(np.isnan(values).sum()), int(np.isinf(values).sum()))
    assert found["norm"] == pytest.approx(math.hypot(*finite), rel=1e-9)
    if not len(finite):
        assert found["minimum"] is found["maximum"] is found["mean"] is found["deviation"] is None
        return
    size = float(np.abs(finite).max())
    assert (found["minimum"], found["maximum"]) == (finite.min(), finite.max())
    assert found["mean"] == pytest.approx(finite.mean(), rel=1e-9, abs=1e-12 * size)
    assert found["deviation"] == pytest.approx(finite.std(), rel=1e-6, abs=1e-7 * size)
    inner = [end if end < 0 else begin for begin, end, _ in found["histogram"]]
    assert inner == sorted(inner)
    normal = [x if abs(x) >= 2**-126 else 0.0 for x in finite.tolist()]
    powers = Counter(math.copysign(math.ldexp(1, math.frexp(x)[1] - 1), x) if x else 0.0 for x in normal)
    assert dict(zip(inner, (count for *_, count in found["histogram"]), strict=True)) == powers


def test_a_large_block_is_described_in_pieces() -> None:
    values = torch.arange(2 * PIECE + 3, dtype=torch.float32)
    found = describe_values(values, 1, 2 * values).describe()
    assert (found["maximum"], found["num_zero"]) == (2 * PIECE + 2, 1)
    assert found["mean"] == pytest.approx(PIECE + 1)
    assert found["update_ratio"] == pytest.approx(0.5)


def test_the_size_of_an_update() -> None:
    before = torch.tensor([3.0, 4.0])
    updated = describe_values(before + torch.tensor([0.3, 0.4]), 2, before)
    assert updated.describe()["update_ratio"] == pytest.approx(0.1)
    assert updated.merge(describe_values(before, 2)).describe()["update_ratio"] == pytest.approx(0.1)
    assert describe_values(before, 2).describe()["update_ratio"] is None  # no update was observed


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_an_update_is_seen_though_some_values_are_no_numbers(odd: float) -> None:
    before, after = torch.tensor([1.0, odd, 2.0]), torch.tensor([4.0, odd, 2.0])
    found = describe_values(after, 7, before)
    assert (found.update_squares, found.before_squares) == (9.0, 5.0)
    assert found.num_nan + found.num_infinite == 1


def test_meters_count_what_prometheus_gets() -> None:
    registry = CollectorRegistry()
    metrics = PserverMetrics(registry, ComputeExecutor())
    for seconds in (0.25, 0.5):
        metrics.apply_seconds.observe(seconds)
    for value in (0, 1, 1, 5, 6, 1000):
        metrics.staleness.observe(value)
    assert (metrics.apply_seconds.count, metrics.apply_seconds.total) == (2, 0.75)
    assert metrics.staleness.counts == {0: 1, 1: 2, 3: 2, 10: 1}
    samples = {"gradpost_apply_seconds_sum": 0.75, "gradpost_apply_seconds_count": 2, "gradpost_staleness_count": 6}
    assert {name: registry.get_sample_value(name) for name in samples} == samples
