"""The measures of a step, against the norms of whole tensors; and the script in words."""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import structlog
import torch
from torch import Tensor, nn

from trainer_client.client.output import describe_script
from trainer_client.engines.combined_optimizer import CombinedOptimizer
from trainer_client.optimizer.step_measures import SAMPLED, StepMeasures
from trainer_client.optimizer.wrapped_optimizer import describe_hyper_parameters


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


def test_each_of_several_optimizers_has_curves_of_its_own() -> None:
    parameters = {name: nn.Parameter(torch.ones(4)) for name in ("D.w", "G.w")}
    optimizer = CombinedOptimizer(
        {"D": torch.optim.SGD([parameters["D.w"]], lr=0.5), "G": torch.optim.Adam([parameters["G.w"]], lr=0.1)}
    )
    reported = steps(optimizer, parameters, [["D.w"], ["G.w"], []])
    assert reported["gradpost/learning_rate/D"] == [0.5]
    assert reported["gradpost/learning_rate/G"] == [0.1]
    assert reported["gradpost/update_ratio/D"] == pytest.approx([0.01], rel=1e-4)
    assert reported["gradpost/update_ratio/G"] == pytest.approx([0.01], rel=1e-4)
    assert 0 < reported["gradpost/waiting_share"][0] <= 1
    assert describe_hyper_parameters(optimizer) == "D: SGD(lr=0.5), G: Adam(lr=0.1)"


def test_an_optimizer_is_shown_as_it_was_made() -> None:
    groups = [{"params": [nn.Parameter(torch.ones(1))]}, {"params": [nn.Parameter(torch.ones(1))], "lr": 1.0}]
    adamw = torch.optim.AdamW(groups, lr=torch.tensor(1e-3), betas=(0.8, 0.999), amsgrad=True)
    assert describe_hyper_parameters(adamw) == (
        "AdamW(lr=0.001, betas=(0.8, 0.999), amsgrad=True) and 1 more parameter groups"
    )


def test_a_script_is_shown_from_the_working_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "sub" / "train.py"), "--name", "two \udcff words"])
    assert describe_script("nightly").command == "sub/train.py --name 'two ? words'"
