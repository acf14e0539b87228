"""A model of two towers, each an embedding table with sparse gradients and two layers: real passes over Zipf ids."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from .work import LEARNING_RATE, WIDTH, Work


class TwoTowers(nn.Module):
    """The two towers. The scores are inner products of what they return."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        torch.manual_seed(0)  # the same values in all trainers
        tables = [nn.Embedding(count // WIDTH, WIDTH, sparse=True) for count in work.elements]
        self.towers = nn.ModuleList(
            nn.Sequential(table, nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)) for table in tables
        )

    def forward(self, ids: Tensor) -> Tensor:
        """Return the scores, (batch,), of the ids, (2, batch)."""
        users, items = (tower(its) for tower, its in zip(self.towers, ids, strict=True))
        return (users * items).sum(1)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.named_parameters(), lr=LEARNING_RATE)


def make_step(
    work: Work, rank: int, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[Callable[[], None], Callable[[], list[Tensor]]]:
    """Return a step of the next batch, and a check that the loss is finite and has fallen."""
    batches = work.make_batches(rank)
    labels = (batches.sum(1) % 2).float()
    losses: list[float] = []

    def step() -> None:
        number = len(losses) % len(batches)
        optimizer.zero_grad()
        loss = binary_cross_entropy_with_logits(model(batches[number]), labels[number])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    def check() -> list[Tensor]:
        newest, first = losses[-len(batches) :], losses[: len(batches)]
        if len(losses) > len(batches) and not sum(newest) < sum(first):
            raise RuntimeError(f"the loss has not fallen: {first} before, {newest} now")
        return []

    return step, check
