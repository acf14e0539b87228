"""The model, gradients and optimizers that parity is measured on, for tests and for the fresh processes they start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_client import RemoteOptimizer, Session

T = TypeVar("T")

STEPS = 10
LR = 0.01
# Odd sizes, a scalar, a matrix that is cut; small blocks make cuts at odd places. Torch uses several threads from
# 32768 elements on.
SHAPES = {"embed": (101, 37), "scale": (), "bias": (129,), "out": (10, 1000), "wide": (331, 401)}

# Name -> class and arguments; the fused ones are compared with fused=True, the others with foreach=False.
OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {}),
    "SGD-momentum": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}),
    "SGD-nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "Adam": (torch.optim.Adam, {"weight_decay": 0.01}),
    "Adam-amsgrad": (torch.optim.Adam, {"amsgrad": True, "betas": (0.8, 0.99)}),
    "AdamW": (torch.optim.AdamW, {"weight_decay": 0.05}),
    "Adagrad": (torch.optim.Adagrad, {"lr_decay": 0.01, "initial_accumulator_value": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "Adadelta": (torch.optim.Adadelta, {"rho": 0.8}),
    "Adamax": (torch.optim.Adamax, {"weight_decay": 0.01}),
    "NAdam": (torch.optim.NAdam, {"weight_decay": 0.01, "decoupled_weight_decay": True}),
    "RAdam": (torch.optim.RAdam, {"weight_decay": 0.01}),
}
FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)


def make_parameters(seed: int = 0) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def make_optimizer(name: str, parameters: dict[str, nn.Parameter], *, local: bool) -> Optimizer:
    """Two groups with rates of their own; `local` picks the implementation that the pservers run."""
    cls, options = OPTIMIZERS[name]
    if local:
        options = {**options, "fused": True} if cls in FUSED else {**options, "foreach": False}
    items = list(parameters.items())
    groups: list[dict[str, Any]] = [{"params": items[:2]}, {"params": items[2:], "lr": 3 * LR}]
    return cls(groups, lr=LR, **options)


def set_gradients(parameters: dict[str, nn.Parameter], step: int, contributor: int = 0) -> None:
    """Gradients that are a function of (step, contributor); one parameter has none in some steps."""
    generator = torch.Generator().manual_seed(1000 * step + contributor)
    for name, parameter in parameters.items():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
        if name == "bias" and step % 4 == 1:
            parameter.grad = None


def change_rates(optimizer: Optimizer, step: int) -> None:
    """What a scheduler does: other numbers in every step."""
    for group in optimizer.param_groups:
        group["lr"] *= 0.9 if step % 2 else 1.05


def train_locally(name: str) -> dict[str, Tensor]:
    """The oracle: torch.optim in one process."""
    parameters = make_parameters()
    optimizer = make_optimizer(name, parameters, local=True)
    for step in range(STEPS):
        set_gradients(parameters, step)
        optimizer.step()
        change_rates(optimizer, step)
    return {key: value.detach().clone() for key, value in parameters.items()}


def train_remotely(
    name: str,
    session: Session,
    *,
    contributor: int = 0,
    before_step: Callable[[int], None] = lambda step: None,
) -> dict[str, Tensor]:
    """The same training as one trainer of a cluster; starts from other values, which the first pull replaces."""
    parameters = make_parameters(seed=session.rank)
    optimizer = RemoteOptimizer(make_optimizer(name, parameters, local=False), session=session)
    for step in range(STEPS):
        set_gradients(parameters, step, contributor)
        before_step(step)
        optimizer.step()
        change_rates(optimizer, step)
    return {key: value.detach().clone() for key, value in parameters.items()}


def run_trainers(coordinator: str, work: Sequence[Callable[[Session], T]], **arguments: Any) -> list[T]:
    """Run one trainer a thread, each with a session of its own, and return what they return in the order of ranks."""

    def run(rank: int) -> T:
        with Session(coordinator=coordinator, rank=rank, world_size=len(work), **arguments) as session:
            return work[rank](session)

    with ThreadPoolExecutor(len(work)) as threads:
        return list(threads.map(run, range(len(work))))


def assert_identical(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, tensor in expected.items():
        different = (actual[name] != tensor).sum().item()
        assert different == 0, f"{different} of {tensor.numel()} elements of {name!r} differ"
