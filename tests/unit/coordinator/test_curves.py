"""The curves of a run."""

from __future__ import annotations

import math

import pytest

from ps_protocol.fields import Mean
from ps_protocol.messages import TrainerHeartbeat
from services.coordinator.history import MAX_POINTS, Curves

from .support import alive


def report(round_: int, *, run: str = "run1", **values: list[float]) -> TrainerHeartbeat:
    """Return the heartbeat of a trainer that has reported these values."""
    means = {name: Mean(count=len(all_), value=sum(all_) / len(all_)) for name, all_ in values.items()}
    newest = {name: all_[-1] for name, all_ in values.items()}
    return alive(1, run, round_, **newest).model_copy(update={"means": means})


def weigh(curve: dict[str, list[float]]) -> float:
    """Return the sum of all values in a curve of means."""
    return sum(value * count for value, count in zip(curve["value"], curve["count"], strict=True))


def test_a_point_is_the_mean_of_all_reported_values():
    curves = Curves()
    curves.add(0, report(3, loss=[1.0, 2.0, 6.0]))
    curves.add(0, report(4))  # nothing was reported
    curves.add(0, report(5, loss=[4.0]))
    curves.add(0, report(5, loss=[1.0, 1.0, 2.0]))  # in the same round
    curves.add(0, report(6, loss=[math.nan, 1.0]))
    found = curves.describe()["curves"]["loss"][0]
    assert (found["round"], found["count"]) == ([3, 5, 6], [3, 4, 2])
    assert found["value"][:2] == [3.0, 2.0]
    assert math.isnan(found["value"][2])


def test_a_long_curve_contains_all_values_and_follows_a_rollback():
    curves = Curves()
    for round_ in range(3 * MAX_POINTS):
        curves.add(0, report(round_, loss=[float(round_)]))
    found = curves.describe()["curves"]["loss"][0]
    assert found["round"] == sorted(set(found["round"]))
    assert MAX_POINTS / 3 < len(found["round"]) <= MAX_POINTS
    assert (found["round"][0], found["round"][-1]) == (0, 3 * MAX_POINTS - 1)
    assert (sum(found["count"]), weigh(found)) == (3 * MAX_POINTS, pytest.approx(sum(range(3 * MAX_POINTS))))
    curves.add(0, report(7, loss=[5.0]))
    assert curves.describe()["curves"]["loss"][0]["round"] == [r for r in found["round"] if r < 7] + [7]
    curves.add(1, report(1, run="run2", loss=[5.0]))
    found = curves.describe()["curves"]
    at = found["loss"][1]["at"]
    assert found == {"loss": {1: {"round": [1], "at": at, "value": [5.0], "count": [1]}}}


def test_curves_are_thinned_out_evenly_on_request():
    curves = Curves()
    for round_ in range(101):
        curves.add(0, report(round_, loss=[float(round_)]))
    thin = curves.describe(5)["curves"]["loss"][0]
    assert thin["round"] == [0, 25, 50, 75, 100]
    assert thin["count"] == [1, 25, 25, 25, 25]
    assert thin["value"] == pytest.approx([0.0, 13.0, 38.0, 63.0, 88.0])
    assert len(curves.describe(101)["curves"]["loss"][0]["round"]) == 101
