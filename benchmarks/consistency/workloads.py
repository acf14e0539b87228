"""The workloads: a network on scikit-learn's digits, a small transformer on Python's source text, one matrix."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

CONTEXT = 64  # characters
WIDTH = 64
MAX_TEXT = 1_000_000  # characters


@dataclass(frozen=True)
class Workload:
    """A model, its batches and its held-out loss, which depend on seed, rank and step only."""

    model: nn.Module
    optimizer: type[torch.optim.Optimizer]
    rate: float  # in the synchronous mode
    loss: Callable[[nn.Module, tuple[Tensor, Tensor]], Tensor]
    batches: Iterator[tuple[Tensor, Tensor]]
    held_out: tuple[Tensor, Tensor]

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Return the mean loss over the held-out data."""
        return self.loss(self.model, self.held_out).item()


def make_workload(name: str, seed: int, rank: int, num_trainers: int) -> Workload:
    """Make a trainer's part of the data, and a model with the same initial values for all trainers."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if name == "digits":
        return _digits(generator, rank, num_trainers)
    if name == "characters":
        return _characters(generator, rank, num_trainers)
    return _large(generator)


def _digits(generator: torch.Generator, rank: int, num_trainers: int) -> Workload:
    images, labels = load_digits(return_X_y=True)
    inputs, targets = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    train, held_out = train_test_split(range(len(inputs)), test_size=0.2, random_state=0, stratify=labels)
    own = torch.tensor(train[rank::num_trainers])

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            order = own[torch.randperm(len(own), generator=generator)]
            for chosen in order.split(16):
                yield inputs[chosen], targets[chosen]

    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    return Workload(
        model, torch.optim.SGD, 0.3, lambda net, batch: cross_entropy(net(batch[0]), batch[1]), batches(),
        (inputs[held_out], targets[held_out]),
    )  # fmt: skip


class CharacterModel(nn.Module):
    """Two layers of causal self-attention over characters."""

    def __init__(self, num_characters: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(num_characters, WIDTH)
        self.position = nn.Parameter(torch.zeros(CONTEXT, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(WIDTH, num_characters)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT), persistent=False)

    def forward(self, characters: Tensor) -> Tensor:
        """Return the logits of the next character at each place: (batch, CONTEXT, characters)."""
        return self.out(self.layers(self.embed(characters) + self.position, mask=self.mask))


def _characters(generator: torch.Generator, rank: int, num_trainers: int) -> Workload:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = "".join(file.read_text(encoding="utf-8", errors="ignore") for file in files)[:MAX_TEXT]
    text = text.encode("ascii", errors="replace").decode()
    codes = torch.tensor([min(ord(character), 127) for character in text])
    split = len(codes) * 9 // 10
    part = split // num_trainers
    own, rest = codes[rank * part : (rank + 1) * part], codes[split:]

    def cut(source: Tensor, begins: Tensor) -> tuple[Tensor, Tensor]:
        windows = torch.stack([source[begin : begin + CONTEXT + 1] for begin in begins.tolist()])
        return windows[:, :-1], windows[:, 1:]

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield cut(own, torch.randint(len(own) - CONTEXT - 1, (8,), generator=generator))

    def loss(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return cross_entropy(net(batch[0]).flatten(0, 1), batch[1].flatten())

    begins = torch.linspace(0, len(rest) - CONTEXT - 2, 32).long()
    return Workload(CharacterModel(128), torch.optim.AdamW, 0.002, loss, batches(), cut(rest, begins))


def _large(generator: torch.Generator) -> Workload:
    """Make a model of one parameter of 17 MB and little computation, so that its transport dominates."""
    inputs = torch.randn(1, 1024, generator=generator)
    model = nn.Linear(1024, 4096, bias=False)
    return Workload(
        model,
        torch.optim.SGD,
        1e-4,
        lambda net, batch: net(batch[0]).square().mean(),
        repeat((inputs, inputs)),
        (inputs, inputs),
    )
