"""The update rules: `torch.optim`'s own functional forms, run on views of a shard's flat float32 tensors.

Constructing an optimizer class would import dynamo (1.5 s and 80 MB in every pserver); the functions do not.
Numbers and flags have the names of https://docs.pytorch.org/docs/stable/optim.html, which are also those of the
functions' arguments. Slots have the names under which `torch.optim` keeps them in its state.

SGD, Adam, AdamW and Adagrad have a fused kernel, which reads each tensor once. The others are a dozen passes with
temporaries of the tensor's size; cut into pieces that fit the cache they take, for 12.5 M elements on one thread
(EPYC, torch 2.13, milliseconds, weight decay and momentum off):

                      RMSprop   Adadelta   Adamax   NAdam   RAdam
    plain                  70        147       79     108     328
    foreach                70        147       61      86      84
    plain, in pieces       23         45       26      41      61
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.optim.adadelta import adadelta
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam
from torch.optim.adamax import adamax
from torch.optim.nadam import nadam
from torch.optim.radam import radam
from torch.optim.rmsprop import rmsprop
from torch.optim.sgd import sgd

from ps_protocol.optimizers import BUFFER_RULES, Options, StepState

PIECE = 1 << 18  # elements: 1 MiB of float32


@dataclass(frozen=True, slots=True)
class Operands:
    """Parallel lists of 1-D float32 views that one call steps. All have the same `state`."""

    values: list[Tensor]
    gradients: list[Tensor]  # not written
    slots: Mapping[str, list[Tensor]]
    state: StepState

    def scalars(self, value: float) -> list[Tensor]:
        """Return a 0-dimensional float32 tensor for each view, the form of torch's own step counts."""
        return list(torch.full((len(self.values),), value, dtype=torch.float32).unbind())

    def stepped(self) -> StepState:
        """Return the state after one more step."""
        return self.state._replace(steps=self.state.steps + 1)


Step: TypeAlias = Callable[[Operands, Options], StepState]  # writes values and slots, returns the new state


@dataclass(frozen=True, slots=True)
class UpdateRule:
    """The step function of one optimizer; `ps_protocol.optimizers` has the slots that it needs."""

    step: Step
    max_elements: int | None = PIECE  # of one view; None if one call may step any number


def _step_sgd(on: Operands, options: Options) -> StepState:
    kept = on.slots.get("momentum_buffer", [])
    # None makes torch start a buffer with the gradient itself, undampened; it allocates it, this once.
    buffers: list[Tensor | None] = [*kept] if on.state.has_momentum else [None] * len(on.values)
    sgd(on.values, on.gradients, buffers, fused=True, **options)
    if not kept or on.state.has_momentum:
        return on.state
    for slot, buffer in zip(kept, buffers, strict=True):
        assert buffer is not None
        slot.copy_(buffer)
    return on.state._replace(has_momentum=True)


def _make_step(function: Callable[..., None], *slots: str, fused: bool = False) -> Step:
    """Return the step of a torch function that takes these slots, in this order, and the step counts."""
    implementation = {"fused": True} if fused else {"foreach": False}

    def step(on: Operands, options: Options) -> StepState:
        tensors = (on.slots.get(name, []) for name in slots)
        counts = on.scalars(on.state.steps)
        function(on.values, on.gradients, *tensors, counts, **implementation, **_split_betas(options))
        return on.stepped()

    return step


def _step_adagrad(on: Operands, options: Options) -> StepState:
    numbers = {key: value for key, value in options.items() if key != "initial_accumulator_value"}
    if on.state.steps == 0:
        for slot in on.slots["sum"]:
            slot.fill_(options["initial_accumulator_value"])
    adagrad(on.values, on.gradients, on.slots["sum"], on.scalars(on.state.steps), fused=True, **numbers)
    return on.stepped()


def _step_nadam(on: Operands, options: Options) -> StepState:
    mu_products = on.scalars(on.state.mu_product)
    nadam(
        on.values, on.gradients, on.slots["exp_avg"], on.slots["exp_avg_sq"], mu_products,
        on.scalars(on.state.steps), foreach=False, **_split_betas(options),
    )  # fmt: skip
    return on.stepped()._replace(mu_product=mu_products[0].item())


def _step_buffer(on: Operands, options: Options) -> StepState:
    for value, pushed in zip(on.values, on.gradients, strict=True):
        # Infinity minus infinity is not a number, and a buffer may begin with infinity.
        value.copy_(torch.where(value.isfinite(), value.lerp(pushed, options["lr"]), pushed))
    return on.state


def _split_betas(options: Options) -> Options:
    split = dict(options)
    if "betas" in split:
        split["beta1"], split["beta2"] = split.pop("betas")
    return split


_ADAM = UpdateRule(_make_step(adam, "exp_avg", "exp_avg_sq", "max_exp_avg_sq", fused=True), max_elements=None)

UPDATE_RULES: Mapping[str, UpdateRule] = {
    **dict.fromkeys(BUFFER_RULES, UpdateRule(_step_buffer, max_elements=None)),
    "SGD": UpdateRule(_step_sgd, max_elements=None),
    "Adam": _ADAM,
    "AdamW": _ADAM,  # a flag tells them apart
    "Adagrad": UpdateRule(_step_adagrad, max_elements=None),
    "RMSprop": UpdateRule(_make_step(rmsprop, "square_avg", "grad_avg", "momentum_buffer")),
    "Adadelta": UpdateRule(_make_step(adadelta, "square_avg", "acc_delta")),
    "Adamax": UpdateRule(_make_step(adamax, "exp_avg", "exp_inf")),
    "NAdam": UpdateRule(_step_nadam),
    "RAdam": UpdateRule(_make_step(radam, "exp_avg", "exp_avg_sq")),
}
