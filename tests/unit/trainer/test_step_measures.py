"""The measures of a step, against the norms of whole tensors; and the script in words."""

from __future__ import annotations

import math
from collections import defaultdict

import pytest
import structlog
import torch
from torch import Tensor, nn

from trainer_client.optimizer.step_measures import StepMeasures


def steps(
    optimizer: torch.optim.Optimizer, parameters: dict[str, nn.Parameter], contributions: list[list[str]]
) -> dict[str, list[float]]:
    """Return what is reported for steps in which the parameters of these names have gradients of ones."""
    reported: dict[str, list[float]] = defaultdict(list)

    def report(measures: dict[str, float]) -> None:
        for name, value in measures.items():
            reported[name].append(value)

    measures = StepMeasures(optimizer, parameters, report, structlog.get_logger())
    for names in contributions:
        gradients: dict[str, Tensor] = {name: torch.ones(parameters[name].numel()) for name in names}
        with torch.no_grad(), measures.step(gradients):
            for name in names:
                parameters[name].mul_(1.01)
    return reported


def test_a_step_is_measured_at_most_once_a_second() -> None:
    parameters = {"large": nn.Parameter(torch.ones(64, 3)), "empty": nn.Parameter(torch.ones(0))}
    reported = steps(torch.optim.SGD(parameters.values(), lr=0.25), parameters, [list(parameters)] * 3)
    assert reported == {"gradpost/gradient_norm": [pytest.approx(math.sqrt(192))], "gradpost/learning_rate": [0.25]}


def test_a_measure_that_fails_is_left_out() -> None:
    weight = nn.Parameter(torch.ones(4))
    without_rate = torch.optim.SGD([{"params": [weight], "lr": None}], lr=0.1)
    assert list(steps(without_rate, {"weight": weight}, [["weight"]])) == ["gradpost/gradient_norm"]
    measures = StepMeasures(without_rate, {"weight": weight}, lambda _: 1 / 0, structlog.get_logger())
    with measures.step({"weight": weight}):
        weight.data.zero_()
    assert not weight.any()
