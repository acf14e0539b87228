"""The measures of a step."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from trainer_client.client.telemetry import StepMeasures


@pytest.mark.parametrize("rate", [0.25, torch.tensor(0.25), None])
def test_a_step_is_measured_at_most_once_a_second(rate: Any) -> None:
    gradients = {"large": torch.ones(192), "empty": torch.ones(0)}
    reported: list[dict[str, float]] = []
    measures = StepMeasures(reported.append)
    for _ in range(3):
        with measures.step(gradients, rate):
            pass
    [measured] = reported
    assert measured["gradpost/gradient_norm"] == pytest.approx(math.sqrt(192))
    assert measured.get("gradpost/learning_rate") == (None if rate is None else 0.25)
    assert measured["gradpost/waiting_share"] == 0.0
