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
from typing import Any, NamedTuple

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

PIECE = 1 << 18  # elements: 1 MiB of float32


class StepState(NamedTuple):
    """What a rule remembers of a block besides its slots. Blocks of equal state are stepped together."""

    steps: int = 0  # how often the block was stepped; not counted by SGD, which does not want to know
    has_momentum: bool = False  # SGD: the momentum buffer holds something
    mu_product: float = 1.0  # NAdam: product of its momenta so far, rounded to float32 as torch keeps it


@dataclass(frozen=True, slots=True)
class Operands:
    """Parallel lists of 1-D float32 views: what one call steps. All have the same `state`."""

    values: list[Tensor]
    gradients: list[Tensor]  # not written
    slots: Mapping[str, list[Tensor]]
    state: StepState

    def scalars(self, value: float) -> list[Tensor]:
        """A 0-dimensional float32 tensor for each view, as torch wants the numbers that it counts itself."""
        return list(torch.full((len(self.values),), value, dtype=torch.float32).unbind())

    def stepped(self) -> StepState:
        """The state after one more step."""
        return self.state._replace(steps=self.state.steps + 1)


Options = dict[str, Any]  # the numbers and the flags of one parameter group


@dataclass(frozen=True, slots=True)
class UpdateRule:
    """One optimizer: the slots that it needs under these options, and how it steps."""

    slots: Callable[[Options], tuple[str, ...]]
    step: Callable[[Operands, Options], StepState]  # writes values and slots, returns the new state
    max_elements: int | None = PIECE  # of one view; None if one call may step any number


def _sgd_slots(options: Options) -> tuple[str, ...]:
    return ("momentum_buffer",) if options["momentum"] != 0 else ()


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


def _adam_slots(options: Options) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if options["amsgrad"] else ()))


def _step_adam(on: Operands, options: Options) -> StepState:
    adam(
        on.values, on.gradients, on.slots["exp_avg"], on.slots["exp_avg_sq"], on.slots.get("max_exp_avg_sq", []),
        on.scalars(on.state.steps), fused=True, **_split_betas(options),
    )  # fmt: skip
    return on.stepped()


def _step_adagrad(on: Operands, options: Options) -> StepState:
    numbers = {key: value for key, value in options.items() if key != "initial_accumulator_value"}
    if on.state.steps == 0:
        for slot in on.slots["sum"]:
            slot.fill_(options["initial_accumulator_value"])
    adagrad(on.values, on.gradients, on.slots["sum"], on.scalars(on.state.steps), fused=True, **numbers)
    return on.stepped()


def _rmsprop_slots(options: Options) -> tuple[str, ...]:
    centered = ("grad_avg",) if options["centered"] else ()
    momentum = ("momentum_buffer",) if options["momentum"] > 0 else ()
    return ("square_avg", *centered, *momentum)


def _step_rmsprop(on: Operands, options: Options) -> StepState:
    rmsprop(
        on.values, on.gradients, on.slots["square_avg"], on.slots.get("grad_avg", []),
        on.slots.get("momentum_buffer", []), on.scalars(on.state.steps), foreach=False, **options,
    )  # fmt: skip
    return on.stepped()


def _step_adadelta(on: Operands, options: Options) -> StepState:
    adadelta(
        on.values, on.gradients, on.slots["square_avg"], on.slots["acc_delta"], on.scalars(on.state.steps),
        foreach=False, **options,
    )  # fmt: skip
    return on.stepped()


def _step_adamax(on: Operands, options: Options) -> StepState:
    adamax(
        on.values, on.gradients, on.slots["exp_avg"], on.slots["exp_inf"], on.scalars(on.state.steps),
        foreach=False, **_split_betas(options),
    )  # fmt: skip
    return on.stepped()


def _step_nadam(on: Operands, options: Options) -> StepState:
    mu_products = on.scalars(on.state.mu_product)
    nadam(
        on.values, on.gradients, on.slots["exp_avg"], on.slots["exp_avg_sq"], mu_products,
        on.scalars(on.state.steps), foreach=False, **_split_betas(options),
    )  # fmt: skip
    return on.stepped()._replace(mu_product=mu_products[0].item())


def _step_radam(on: Operands, options: Options) -> StepState:
    radam(
        on.values, on.gradients, on.slots["exp_avg"], on.slots["exp_avg_sq"], on.scalars(on.state.steps),
        foreach=False, **_split_betas(options),
    )  # fmt: skip
    return on.stepped()


def _split_betas(options: Options) -> Options:
    numbers = dict(options)
    numbers["beta1"], numbers["beta2"] = numbers.pop("betas")
    return numbers


def _always(*names: str) -> Callable[[Options], tuple[str, ...]]:
    return lambda options: names


UPDATE_RULES: Mapping[str, UpdateRule] = {
    "SGD": UpdateRule(_sgd_slots, _step_sgd, max_elements=None),
    "Adam": UpdateRule(_adam_slots, _step_adam, max_elements=None),
    "AdamW": UpdateRule(_adam_slots, _step_adam, max_elements=None),  # a flag tells them apart
    "Adagrad": UpdateRule(_always("sum"), _step_adagrad, max_elements=None),
    "RMSprop": UpdateRule(_rmsprop_slots, _step_rmsprop),
    "Adadelta": UpdateRule(_always("square_avg", "acc_delta"), _step_adadelta),
    "Adamax": UpdateRule(_always("exp_avg", "exp_inf"), _step_adamax),
    "NAdam": UpdateRule(_always("exp_avg", "exp_avg_sq"), _step_nadam),
    "RAdam": UpdateRule(_always("exp_avg", "exp_avg_sq"), _step_radam),
}
