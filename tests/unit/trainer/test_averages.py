"""The warning of averaged buffers that trainers write differently."""

from __future__ import annotations

import pytest
import structlog
import torch
from torch import nn

from trainer_client.engines.model_tensors import BufferAverages, stored_tensors


@pytest.mark.parametrize(
    ("choices", "mean", "expected"),
    [({}, 2.0, ["warning"]), ({}, 1.0, []), ({"queue": "average"}, 2.0, [])],
    ids=["other values", "the same values", "chosen"],
)
def test_a_buffer_that_trainers_write_differently_is_named_once(
    choices: dict[str, str], mean: float, expected: list[str]
) -> None:
    model = nn.Module()
    model.register_buffer("queue", torch.zeros(4))
    model.norm = nn.BatchNorm1d(2)  # whose statistics differ in any case
    averages = BufferAverages(model, stored_tensors(model, {}), choices)
    with structlog.testing.capture_logs() as logs:
        for value in (1.0, 3.0):
            with torch.no_grad():
                for buffer in averages.means:
                    model.get_buffer(buffer).fill_(value)
            averages.changed_values()
            for name in averages.means:
                averages.means[name].fill_(mean * value if name == "queue" else 9.0)
            averages.warn_of_differences(structlog.get_logger())
            averages.write_back()
    assert [entry["log_level"] for entry in logs] == expected
    assert all("buffers={'queue': 'lowest_rank'}" in entry["event"] for entry in logs)
