"""Benchmarks judge their targets by the median, and check that each system has done exactly its steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.comparison.cases import CASES
from benchmarks.comparison.contestant import Repetition
from benchmarks.comparison.results import OURS, CaseResult, judge
from benchmarks.comparison.work import LEARNING_RATE, Work


@pytest.mark.parametrize(("ours", "verdict"), [([0.9, 0.99, 1.2], "met"), ([0.9, 1.01, 1.2], "missed")])
def test_a_target_is_met_when_the_median_is(ours: list[float], verdict: str) -> None:
    [case] = [case for case in CASES if case.name == "sync_100mb_fp32"]
    names = (OURS, "torch_rpc_tcp_keeping", "http1")
    seconds = {OURS: ours, "torch_rpc_tcp_keeping": [1.0] * 3}
    cpu = {"server": 0.6, "trainer": 0.4}
    figures = {name: [Repetition(one, 1.0, cpu, 0.0) for one in its] for name, its in seconds.items()}
    above = {OURS: 200_000_000, "torch_rpc_tcp_keeping": 0}
    result = CaseResult(case, dict.fromkeys(names, case.ours.work), figures, {}, above)
    lines = judge([result]).splitlines()
    seconds_line, cpu_line = (line for line in lines if "torch_rpc_tcp_keeping" in line)
    assert seconds_line.startswith("| seconds, sync_100mb_fp32: ours / torch_rpc_tcp_keeping | 1.0 | ")
    assert seconds_line.endswith(f" {verdict} |")
    assert cpu_line == "| CPU-seconds a GB, sync_100mb_fp32: ours / torch_rpc_tcp_keeping | 1.1 | 1 [1, 1] | met |"
    assert "| MB of a pserver above idle, sync_100mb_fp32 | 264 | 200 | met |" in lines


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
