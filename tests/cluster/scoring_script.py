"""A trainer that scores its model on held-out data after every round, and reports the score.

    python scoring_script.py ROUNDS [PAUSE_SECONDS]

Prints `round N` for each round, after it has reported `accuracy`, and `scored`, the round whose parameters have it.
"""

from __future__ import annotations

import sys
import time
from functools import cache

import torch
from sklearn.datasets import load_digits

from trainer_client import RemoteOptimizer, connect


@cache
def load_data() -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10))


@torch.no_grad()
def score(model: torch.nn.Module) -> float:
    inputs, labels = load_data()
    return (model(inputs[-300:]).argmax(1) == labels[-300:]).double().mean().item()


def main() -> None:
    rounds, pause = int(sys.argv[1]), float(sys.argv[2])
    torch.set_num_threads(1)
    session = connect()
    model = make_model()
    optimizer = RemoteOptimizer(torch.optim.SGD(model.named_parameters(), lr=0.05))
    inputs, labels = (tensor[:-300] for tensor in load_data())
    while optimizer.round < rounds:
        batch = torch.randint(len(labels), (32,), generator=torch.Generator().manual_seed(optimizer.round))
        mine = batch[session.rank :: session.world_size]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs[mine]), labels[mine]).backward()
        optimizer.step()
        session.report(accuracy=score(model), scored=optimizer.round)
        print(f"round {optimizer.round}", flush=True)
        time.sleep(pause)  # stands for computation


if __name__ == "__main__":
    main()
