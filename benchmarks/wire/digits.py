"""The training whose accuracy is compared: a perceptron on scikit-learn's handwritten digits, cross-validated."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import StratifiedKFold
from torch import Tensor, nn

from trainer_client import RemoteOptimizer, Session

from .pairs import Pair

FOLDS = 5
TRAINERS = 2
EPOCHS = 15
BATCH_SIZE = 64  # of each trainer

OptimizerName: TypeAlias = Literal["AdamW", "SGD"]
OPTIMIZERS = {  # class, peak of the rate (the best of three for float32 in one process), others
    "AdamW": (torch.optim.AdamW, 0.01, {"weight_decay": 0.01}),
    "SGD": (torch.optim.SGD, 0.3, {"momentum": 0.9}),
}


@dataclass(frozen=True)
class Training:
    """One training: its optimizer, held-out fold, seed and wire types."""

    optimizer: OptimizerName
    fold: int
    seed: int
    pair: Pair


def make_model() -> nn.Sequential:
    """Return a perceptron of 50,826 parameters."""
    return nn.Sequential(
        *(nn.Linear(64, 256), nn.ReLU()),
        *(nn.Linear(256, 128), nn.ReLU()),
        nn.Linear(128, 10),
    )


@functools.cache
def load_folds() -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Return inputs and labels of each fold, for training and held out."""
    images, labels = load_digits(return_X_y=True)
    inputs, targets = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=0).split(images, labels)
    return [(inputs[train], targets[train], inputs[test], targets[test]) for train, test in folds]


def make_batches(num_images: int, seed: int, rank: int, epochs: int) -> Iterator[Tensor]:
    """Yield the image indices of a trainer's steps. No image is in two batches of an epoch."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        order = torch.randperm(num_images, generator=generator)
        yield from order[: num_images // (TRAINERS * BATCH_SIZE) * TRAINERS * BATCH_SIZE].split(BATCH_SIZE)[
            rank::TRAINERS
        ]


def train(training: Training, coordinator: str, rank: int, epochs: int) -> float:
    """Train as this rank, and return the accuracy on the held-out images."""
    torch.set_num_threads(1)
    inputs, labels, held_out, expected = load_folds()[training.fold]
    torch.manual_seed(training.seed)
    model = make_model()
    steps = list(make_batches(len(inputs), training.seed, rank, epochs))
    kind, rate, options = OPTIMIZERS[training.optimizer]
    types = {"push_type": training.pair.push, "pull_type": training.pair.pull}
    with Session(coordinator=coordinator, rank=rank, world_size=TRAINERS, metrics_port=None, **types) as session:
        optimizer = RemoteOptimizer(kind(model.named_parameters(), lr=rate, **options), session=session)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=len(steps), cycle_momentum=False)
        for batch in steps:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs[batch]), labels[batch]).backward()
            optimizer.step()
            schedule.step()
    with torch.no_grad():
        return float((model(held_out).argmax(1) == expected).double().mean())
