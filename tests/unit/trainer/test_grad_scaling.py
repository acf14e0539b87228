"""What a GradScaler leaves to an optimizer: the scale, and whether a gradient has overflowed."""

from __future__ import annotations

import pytest
import torch

from trainer_client.amp.unscaling import unscale_gradients

pytestmark = pytest.mark.amp


class Scaled(torch.optim.SGD):
    _step_supports_amp_scaling = True
    has_overflowed: bool

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.has_overflowed = unscale_gradients(self, self.param_groups[0]["params"])


def step_with(scale: float, gradient: float, *, unscales: bool = False) -> Scaled:
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = Scaled([parameter], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    scaler.scale((parameter * gradient).sum()).backward()
    if unscales:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    return optimizer


def gradient_of(optimizer: Scaled) -> list[float]:
    found: list[float] = optimizer.param_groups[0]["params"][0].grad.tolist()
    return found


def test_gradients_are_divided_by_the_scale_once() -> None:
    for unscales in (False, True):
        optimizer = step_with(1024.0, 0.5, unscales=unscales)
        assert (optimizer.has_overflowed, gradient_of(optimizer)) == (False, [0.5] * 3)


def test_an_overflow_is_told_and_nothing_is_changed() -> None:
    for unscales in (False, True):
        optimizer = step_with(2.0**127, 1e10, unscales=unscales)
        assert optimizer.has_overflowed


def test_without_a_scaler_nothing_happens() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.grad = torch.ones(3)
    assert not unscale_gradients(torch.optim.SGD([parameter]), [parameter])
    assert parameter.grad.tolist() == [1.0] * 3
