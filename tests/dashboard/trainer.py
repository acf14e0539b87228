"""Trains until it is stopped, and reports: `trainer.py ROUNDS SECONDS_PER_ROUND`, as `FaultyRun` calls its scripts."""

from __future__ import annotations

import sys
import time

import torch
from torch import nn

from gradpost import RemoteOptimizer, connect


def make_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Module()
    model.embedding = nn.Linear(32, 96)
    model.layers = nn.ModuleList(nn.ModuleDict({"mix": nn.Linear(96, 96), "out": nn.Linear(96, 96)}) for _ in range(3))
    model.head = nn.Linear(96, 10)
    model.name = nn.Parameter(torch.zeros(3))  # as the page calls a part of itself
    return model


def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = model.embedding(x)
    for layer in model.layers:  # type: ignore[union-attr]
        x = x + layer["out"](torch.relu(layer["mix"](x))) / 2
    return model.head(x) + model.name.sum()  # type: ignore[no-any-return]


def main() -> None:
    rounds, seconds = int(sys.argv[1]), float(sys.argv[2])
    torch.set_num_threads(1)
    session = connect(run_name="nightly")
    model = make_model()
    optimizer = RemoteOptimizer(torch.optim.AdamW(model.named_parameters(), lr=3e-4))
    teacher = torch.randn(32, 10)
    noise = torch.Generator().manual_seed(1 + session.rank)
    for round_ in range(1, rounds + 1):
        inputs = torch.randn(64, 32, generator=noise)
        labels = (inputs @ teacher + torch.randn(64, 10, generator=noise)).argmax(1)
        optimizer.zero_grad()
        outputs = forward(model, inputs)
        loss = nn.functional.cross_entropy(outputs, labels)
        loss.backward()
        optimizer.step()
        session.report(loss=loss.item(), accuracy=(outputs.argmax(1) == labels).float().mean().item())
        print(f"round {round_}", flush=True)
        time.sleep(seconds)


if __name__ == "__main__":
    main()
