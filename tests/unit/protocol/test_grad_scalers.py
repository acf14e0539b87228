"""The arithmetic of a GradScaler's scale is torch's, and its state survives the wire."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ps_protocol.grad_scalers import ScalerState

from ...raising import raises_code

pytestmark = pytest.mark.amp


@settings(deadline=None)
@given(
    scale=st.floats(2.0**-140, 2.0**127, width=32),
    growth_factor=st.floats(1.01, 8),
    backoff_factor=st.floats(0.1, 0.99),
    growth_interval=st.integers(1, 4),
    outcomes=st.lists(st.booleans(), max_size=30),
)
def test_it_is_torchs_scale(
    scale: float, growth_factor: float, backoff_factor: float, growth_interval: int, outcomes: list[bool]
) -> None:
    factors = {"growth_factor": growth_factor, "backoff_factor": backoff_factor}
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=growth_interval, **factors)
    weight = torch.nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    state = ScalerState(0, scale, 0)
    for number, is_skipped in enumerate(outcomes, start=1):
        scaler.scale(torch.ones(()))
        weight.grad = torch.tensor(float("nan") if is_skipped else 1.0)
        scaler.step(optimizer)
        scaler.update()
        state = state.next(is_skipped=is_skipped, growth_interval=growth_interval, **factors)
        assert state == ScalerState(number, scaler.get_scale(), scaler.state_dict()["_growth_tracker"])
        assert ScalerState.from_json(state.to_json()) == state


GOOD = {"after": 7, "scale": 1024.0, "growth_tracker": 3}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[" * 100_000,
        "7",
        "{}",
        json.dumps({**GOOD, "more": 1}),
        json.dumps({**GOOD, "after": -1}),
        json.dumps({**GOOD, "after": True}),
        json.dumps({**GOOD, "after": 1 << 63}),
        json.dumps({**GOOD, "scale": "1024"}),
        json.dumps({**GOOD, "scale": float("inf")}),
        json.dumps({**GOOD, "scale": -1.0}),
        json.dumps({**GOOD, "scale": float("nan")}),
        json.dumps({**GOOD, "scale": 10**400}),
        json.dumps({**GOOD, "growth_tracker": 3.0}),
        json.dumps({**GOOD, "growth_tracker": None}),
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with raises_code("malformed_frame", match="no state of a GradScaler"):
        ScalerState.from_json(text)
