"""Changes of a model after it was wrapped are refused if its parameters would no longer be trained."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from ps_protocol.errors import BadModel
from trainer_client.engines.model_tensors import BufferAverages
from trainer_client.optimizer.parameter_watch import ModelPlaces


def make_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))


def places_of(model: nn.Module) -> ModelPlaces:
    trained = dict(model.named_parameters())
    return ModelPlaces(model, trained, BufferAverages(model, trained).owners)


def replace_linear(model: nn.Sequential) -> None:
    model[3] = nn.Linear(8, 2)


def replace_norm(model: nn.Sequential) -> None:
    """With one that has the same parameters, and buffers of its own."""
    norm = nn.BatchNorm1d(8)
    norm.weight, norm.bias = model[1].weight, model[1].bias  # type: ignore[assignment]
    model[1] = norm


@pytest.mark.parametrize(("replace", "name"), [(replace_linear, "3.weight"), (replace_norm, "1.running_mean")])
def test_a_module_that_was_replaced_is_refused(replace: Callable[[nn.Sequential], None], name: str) -> None:
    model = make_model()
    places = places_of(model)
    places.check()
    replace(model)
    with pytest.raises(BadModel, match=f"{name}.* was replaced in the model"):
        places.check()


def replace_activation(model: nn.Sequential) -> None:
    model[2] = nn.ReLU()


def compile_module(model: nn.Sequential) -> None:
    model[3] = torch.compile(model[3], backend="eager")  # type: ignore[assignment]


def parametrize(model: nn.Sequential) -> None:
    nn.utils.parametrize.register_parametrization(model[0], "weight", nn.Identity())


def share_buffers(model: nn.Sequential) -> None:
    model[1] = nn.SyncBatchNorm.convert_sync_batchnorm(model[1])


def remove_norm(model: nn.Sequential) -> None:
    model[1] = nn.Identity()


@pytest.mark.parametrize("change", [replace_activation, remove_norm, compile_module, parametrize, share_buffers])
def test_a_module_may_be_wrapped_or_removed(change: Callable[[nn.Sequential], None]) -> None:
    model = make_model()
    places = places_of(model)
    change(model)
    places.check()
    places.check()
    replace_linear(model)
    with pytest.raises(BadModel, match="was replaced in the model"):
        places.check()
