"""The measures of a step, against the norms of whole tensors; and the script in words."""

from __future__ import annotations

import math
from collections import defaultdict

import pytest
import structlog
import torch
from torch import Tensor, nn

from trainer_client.optimizer.step_measures import SAMPLED, StepMeasures


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_measures_are_those_of_whole_tensors_at_most_once_a_second(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = {"large": (64, 3, 50, 50), "small": (7,), "empty": (0,)}  # the first is sampled
    parameters = {
        name: nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for name, shape in shapes.items()
    }
    assert parameters["large"].numel() > 10 * SAMPLED
    large = parameters["large"].data
    parameters["large"].data = large.contiguous(memory_format=torch.channels_last)
    reported = steps(torch.optim.SGD(parameters.values(), lr=0.25), parameters, [list(parameters)] * 3)
    assert list(reported) == ["gradpost/gradient_norm", "gradpost/learning_rate", "gradpost/update_ratio"]
    assert reported["gradpost/gradient_norm"] == pytest.approx([math.sqrt(large.numel() + 7)])
    assert reported["gradpost/learning_rate"] == [0.25]
    assert reported["gradpost/update_ratio"] == pytest.approx([0.01], rel=1e-4)
    assert torch.equal(parameters["large"], large.mul(1.01).mul(1.01).mul(1.01))


def test_a_measure_that_fails_is_left_out() -> None:
    weight = nn.Parameter(torch.ones(4))
    without_rate = torch.optim.SGD([{"params": [weight], "lr": None}], lr=0.1)
    assert list(steps(without_rate, {"weight": weight}, [["weight"]])) == ["gradpost/gradient_norm"]
    measures = StepMeasures(without_rate, {"weight": weight}, lambda _: 1 / 0, structlog.get_logger())
    with measures.step({"weight": weight}):
        weight.data.zero_()
    assert not weight.any()
