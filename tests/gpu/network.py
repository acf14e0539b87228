"""A convolutional network on the GPU, and the same training by one process and by trainers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from gradpost import RemoteOptimizer, Session

DEVICE = "cuda"
STEPS = 6
MAX_NORM = 0.2
SCALING: dict[str, Any] = {"init_scale": 2.0**10, "growth_interval": 2}
OVERFLOW = 3  # the step in which the scaled gradients of the last trainer overflow


def make_model() -> nn.Sequential:
    """Return a model with the same weights at each call, in any thread."""
    model = nn.Sequential(
        *(nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()),
        *(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(64 * 64, 512), nn.ReLU(), nn.Linear(512, 10)),
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, parameter[0].numel() ** -0.5, generator=generator)
            else:
                parameter.fill_(0.5)
    return model.to(DEVICE, memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def batch(step: int, rank: int, part: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10_000 * part + 100 * step + rank)
    inputs = torch.randn(8, 3, 8, 8, generator=generator)
    return inputs.to(DEVICE), torch.randint(0, 10, (8,), generator=generator).to(DEVICE)


def losses(
    model: nn.Module, step: int, ranks: Sequence[int], parts: int = 1, dtype: torch.dtype | None = None
) -> Iterator[Tensor]:
    """Yield losses whose sum is the mean over all batches of this step."""
    for part in range(parts):
        for rank in ranks:
            inputs, labels = batch(step, rank, part)
            with nullcontext() if dtype is None else torch.autocast(DEVICE, dtype):
                loss = nn.functional.cross_entropy(model(inputs).float(), labels)
            yield loss / (len(ranks) * parts)


def values_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}


def train_alone(
    *, ranks: Sequence[int] = (0, 1), scaled: bool = False, max_norm: float | None = None, **how: Any
) -> dict[str, Tensor]:
    """Train on the batches of these trainers in one process."""
    model = make_model()
    optimizer = make_optimizer(model)
    scaler = torch.amp.GradScaler(DEVICE, enabled=scaled, **SCALING)
    for step in range(STEPS):
        optimizer.zero_grad()
        for loss in losses(model, step, ranks, **how):
            factor = float("inf") if scaled and step == OVERFLOW else 1.0
            scaler.scale(loss * factor).backward()  # type: ignore[no-untyped-call]
        if max_norm is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
    return values_of(model)


def train_remotely(
    session: Session, settings: Mapping[str, Any], *, scaled: bool = False, **how: Any
) -> dict[str, Tensor]:
    """Train as one of two trainers."""
    model = make_model()
    optimizer = RemoteOptimizer(make_optimizer(model), model=model, session=session, **settings)
    scaler = torch.amp.GradScaler(DEVICE, enabled=scaled, **SCALING)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part, loss in enumerate(losses(model, step, [session.rank], **how), 1):
            factor = float("inf") if scaled and (step, session.rank) == (OVERFLOW, 1) else 1.0
            with optimizer.accumulate() if part < how.get("parts", 1) else nullcontext():
                scaler.scale(loss * factor).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
    optimizer.synchronize()
    return values_of(model)
