"""Benchmarks judge their targets by the median, and check that each system has done exactly its steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.comparison.cases import CASES
from benchmarks.comparison.contestant import Repetition
from benchmarks.comparison.results import OURS, CaseResult, judge
from benchmarks.comparison.work import LEARNING_RATE, Work
from benchmarks.wire.pairs import EIGHT_BITS, FLOAT32
from benchmarks.wire.results import Rate, Run, make_table
from benchmarks.wire.results import judge as judge_rates
from benchmarks.wire.trainer import LEARNING_RATE as WIRE_LEARNING_RATE
from benchmarks.wire.trainer import make_parameters, relative_error


@pytest.mark.parametrize(("ours", "verdict"), [([0.8, 0.84, 1.0], "met"), ([0.8, 0.9, 1.0], "missed")])
def test_a_target_is_met_when_the_median_is(ours: list[float], verdict: str) -> None:
    [case] = [case for case in CASES if case.name == "sync_100mb_fp32"]
    names = (OURS, "torch_rpc_tcp_keeping", "http1")
    seconds = {OURS: ours, "torch_rpc_tcp_keeping": [1.0] * 3}
    figures = {name: [Repetition(one, 1.0, {}, 0.0) for one in its] for name, its in seconds.items()}
    above = {OURS: 200_000_000, "torch_rpc_tcp_keeping": 0}
    result = CaseResult(case, dict.fromkeys(names, case.ours.work), figures, {}, above)
    lines = judge([result]).splitlines()
    [line] = [line for line in lines if "torch_rpc_tcp_keeping" in line]
    assert line.startswith("| sync_100mb_fp32 / torch_rpc_tcp_keeping | 0.85 | 0.7 | ")
    assert line.endswith(f" {verdict} |")
    assert "| MB of a pserver above idle, sync_100mb_fp32 | 264 | | 200 | met |" in lines


SGD = Work((1000, 24))


def train(work: Work, num_rounds: int) -> list[torch.Tensor]:
    """Return the values after these rounds in one process."""
    contributions = [work.make_gradients(rank) for rank in range(work.num_trainers)]
    parameters = [torch.nn.Parameter(torch.zeros(count)) for count in work.elements]
    kind = torch.optim.Adam if work.optimizer == "adam" else torch.optim.SGD
    optimizer = kind(parameters, lr=LEARNING_RATE)
    for _ in range(num_rounds):
        for parameter, *gradients in zip(parameters, *contributions, strict=True):
            parameter.grad = torch.stack(gradients).mean(0)
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


@pytest.mark.parametrize("work", [SGD, replace(SGD, num_trainers=4), replace(SGD, optimizer="adam")])
@pytest.mark.parametrize("num_rounds", [10, 100, 700])
def test_a_round_too_many_or_too_few_is_noticed(work: Work, num_rounds: int) -> None:
    values = train(work, num_rounds)
    work.check(values, num_rounds)
    for wrong in (num_rounds - 1, num_rounds + 1):
        with pytest.raises(AssertionError):
            work.check(values, wrong)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_step_too_many_over_a_link_is_noticed(rank: int) -> None:
    (_, frozen), (_, trained) = make_parameters(1001, rank, is_half_frozen=True)
    assert (frozen.grad, len(frozen), len(trained)) == (None, 500, 501)
    parameters = [torch.nn.Parameter(torch.zeros(501)) for _ in range(2)]
    gradients = [make_parameters(1001, other, is_half_frozen=True)[1][1].grad for other in range(2)]
    parameters[rank].grad = gradients[rank]
    with torch.no_grad():
        for _ in range(4):
            parameters[rank] -= WIRE_LEARNING_RATE * (gradients[0] + gradients[1]) / 2
    assert relative_error(parameters[rank], rank, num_trainers=2, num_steps=4) < 1e-6
    assert relative_error(parameters[rank], rank, num_trainers=2, num_steps=5) == pytest.approx(0.2)


def run(seconds: float, moved_bytes: int) -> Run:
    return Run([seconds] * 3, [moved_bytes] * 3, [moved_bytes] * 3, 0.0, 0.0)


def test_a_target_of_a_link_is_judged_where_it_was_measured() -> None:
    runs = {
        str(FLOAT32): [run(17.0, 100_000_000), run(18.0, 100_000_000)],
        str(EIGHT_BITS): [run(5.0, 25_000_000), run(4.5, 25_000_000)],
    }
    rate = Rate(100, {"trainer to pserver": 96.0, "pserver to trainer": 95.0}, runs)
    assert rate.times_as_fast(str(EIGHT_BITS)) == pytest.approx((3.4 + 4.0) / 2)
    assert rate.least_seconds(str(EIGHT_BITS)) == pytest.approx(8 * 50 / 95)
    assert judge_rates([rate]).endswith("as float32: 3.70, met.\n")
    assert judge_rates([Rate(1000, rate.plain, runs)]) == ""
    assert "| int8 / int8 | 4.750 | 4.500 – 5.000 | 4.211 | 3.70 | 25.00 | 25.00 |" in make_table(rate)
