"""The arithmetic of `benchmarks/wire`: links, intervals, batches, and verdicts on targets."""

from __future__ import annotations

import doctest
import importlib
import re
import time

import pytest
import torch

from benchmarks.wire.digits import BATCH_SIZE, TRAINERS, load_folds, make_batches
from benchmarks.wire.emulated import GRADIENT, make_model
from benchmarks.wire.machines import MIN_BURST_BYTES, check_requirements, token_bucket
from benchmarks.wire.overlap import Point
from benchmarks.wire.pairs import EIGHT_BITS, FLOAT32, Difference
from benchmarks.wire.results import Rate, Run, judge, make_table
from benchmarks.wire.trainer import LEARNING_RATE, make_parameters, relative_error
from ps_protocol.vocabulary import ParameterSpec


@pytest.mark.parametrize("name", ["machines", "pairs", "strategies"])
def test_doctests(name: str) -> None:
    done = doctest.testmod(importlib.import_module(f"benchmarks.wire.{name}"))
    assert done.attempted > 0
    assert done.failed == 0


@pytest.mark.parametrize("megabits", [1, 10, 100, 1000, 10_000])
def test_a_packet_of_tcp_fits_into_the_bucket_and_several_into_the_queue(megabits: int) -> None:
    found = re.fullmatch(r"tbf rate (\d+)bit burst (\d+) limit (\d+)", token_bucket(megabits * 1_000_000))
    assert found
    rate, burst, limit = map(int, found.groups())
    assert rate == megabits * 1_000_000
    assert burst >= MIN_BURST_BYTES > 64 * 1024
    assert limit - burst >= 4 * MIN_BURST_BYTES


def test_missing_requirements_of_machines_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(OSError, match="need root"):
        check_requirements()
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda tool: None if tool == "tc" else f"/sbin/{tool}")
    with pytest.raises(OSError, match=r"^not installed: tc \(Debian"):
        check_requirements()


def test_equal_differences_have_an_interval_without_width() -> None:
    baseline = [97.0, 95.5, 98.25]
    assert str(Difference.between([value - 0.5 for value in baseline], baseline)) == "-0.50 [-0.50, -0.50]"
    assert str(Difference.between(baseline, baseline)) == "+0.00 [+0.00, +0.00]"


def test_an_interval_has_the_width_of_that_of_a_normal_mean() -> None:
    values = torch.randn(400, generator=torch.Generator().manual_seed(0)).tolist()
    difference = Difference.between(values, [0.0] * 400)
    assert difference.low < difference.mean < difference.high
    assert difference.high - difference.low == pytest.approx(2 * 1.96 / 20, rel=0.1)
    assert difference.num_worse + difference.num_better == 400
    assert difference == Difference.between(values, [0.0] * 400)


def test_each_image_is_held_out_once() -> None:
    folds = load_folds()
    assert sum(len(held_out) for _, _, held_out, _ in folds) == 1797
    assert all(len(inputs) + len(held_out) == 1797 for inputs, _, held_out, _ in folds)


def test_trainers_share_each_epoch() -> None:
    batches = [list(make_batches(200, 0, rank, epochs=2)) for rank in range(TRAINERS)]
    steps_per_epoch = 200 // (TRAINERS * BATCH_SIZE)
    assert [len(own) for own in batches] == [2 * steps_per_epoch] * TRAINERS
    first = torch.cat([batch for own in batches for batch in own[:steps_per_epoch]])
    assert len(first.unique()) == len(first) == steps_per_epoch * TRAINERS * BATCH_SIZE
    assert not torch.equal(batches[0][0], batches[0][steps_per_epoch])


@pytest.mark.parametrize("rank", [0, 1])
def test_the_result_of_steps_is_known(rank: int) -> None:
    (_, frozen), (_, trained) = make_parameters(1001, rank, is_half_frozen=True)
    assert (frozen.grad, len(frozen), len(trained)) == (None, 500, 501)
    parameters = [torch.nn.Parameter(torch.zeros(501)) for _ in range(2)]
    gradients = [make_parameters(1001, other, is_half_frozen=True)[1][1].grad for other in range(2)]
    parameters[rank].grad = gradients[rank]
    with torch.no_grad():
        for _ in range(4):
            parameters[rank] -= LEARNING_RATE * (gradients[0] + gradients[1]) / 2
    assert relative_error(parameters[rank], rank, num_trainers=2, num_steps=4) < 1e-6
    assert relative_error(parameters[rank], rank, num_trainers=2, num_steps=5) == pytest.approx(0.2)


def run(seconds: float, moved_bytes: int) -> Run:
    return Run([seconds] * 3, [moved_bytes] * 3, [moved_bytes] * 3, 0.0, 0.0)


def test_a_target_is_judged_where_it_was_measured() -> None:
    runs = {
        str(FLOAT32): [run(17.0, 100_000_000), run(18.0, 100_000_000)],
        str(EIGHT_BITS): [run(5.0, 25_000_000), run(4.5, 25_000_000)],
    }
    rate = Rate(100, {"trainer to pserver": 96.0, "pserver to trainer": 95.0}, runs)
    assert rate.times_as_fast(str(EIGHT_BITS)) == pytest.approx((3.4 + 4.0) / 2)
    assert rate.least_seconds(str(EIGHT_BITS)) == pytest.approx(8 * 50 / 95)
    assert judge([rate]).endswith("as float32: 3.70, met.\n")
    assert judge([Rate(1000, rate.plain, runs)]) == ""
    assert "| int8 / int8 | 4.750 | 4.500 – 5.000 | 4.211 | 3.70 | 25.00 | 25.00 |" in make_table(rate)


def test_hidden_time_is_a_share_of_the_time_that_can_be_hidden() -> None:
    steps = {"none": 3.0, "pushes": 2.4, "both": 1.8}
    point = Point(forward=0.4, backward=0.8, steps=steps, push=0.9, pull=0.3)
    assert point.hideable == pytest.approx(0.8 + 0.3)
    assert point.hidden("both") == pytest.approx(1.2 / 1.1)


def test_an_emulated_model_sleeps_for_its_time_and_has_known_gradients() -> None:
    parameters = [
        ParameterSpec("a.weight", (3, 2)),
        ParameterSpec("norm.weight", (2,)),
        ParameterSpec("b.weight", (2, 2)),
    ]
    model = make_model(parameters, forward_seconds=0.06, backward_seconds=0.04)
    begin = time.perf_counter()
    model(torch.zeros(1, requires_grad=True)).sum().backward()
    assert 0.1 <= time.perf_counter() - begin < 5
    assert [tuple(parameter.shape) for parameter in model.parameters()] == [spec.shape for spec in parameters]
    assert all(bool((parameter.grad == GRADIENT).all()) for parameter in model.parameters())
