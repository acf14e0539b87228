"""A trainer of Gradpost that takes steps of `RemoteOptimizer` with fixed gradients."""

from __future__ import annotations

import argparse

import torch

from benchmarks.comparison.embeddings import TwoTowers, make_optimizer, make_step
from benchmarks.comparison.emulated import compute, make_model
from benchmarks.comparison.paced import take_rounds
from benchmarks.comparison.work import LEARNING_RATE, Work
from gradpost import RemoteOptimizer, connect


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--work", type=Work.load, required=True)
    work: Work = arguments.parse_args().work
    torch.set_num_threads(1)
    session = connect()
    if work.batch:
        towers = TwoTowers(work)
        remote = RemoteOptimizer(make_optimizer(towers), model=towers)
        take_rounds(work, session.rank, *make_step(work, session.rank, towers, remote))
        return
    if work.compute_seconds:
        train_model(work, session.rank)
        return
    parameters = []
    for gradient in work.make_gradients(session.rank):
        parameter = torch.nn.Parameter(torch.zeros_like(gradient))
        parameter.grad = gradient
        parameters.append(parameter)
    kind = torch.optim.SGD if work.optimizer == "sgd" else torch.optim.Adam
    named = [(f"weight{i}", parameter) for i, parameter in enumerate(parameters)]
    optimizer = RemoteOptimizer(kind(named, lr=LEARNING_RATE))
    take_rounds(work, session.rank, optimizer.step, lambda: [*parameters])


def train_model(work: Work, rank: int) -> None:
    """Train the emulated model, whose passes pushes and pulls may overlap with."""
    model = make_model(work, rank)
    optimizer = RemoteOptimizer(torch.optim.SGD(model.named_parameters(), lr=LEARNING_RATE), model=model)

    def one_round() -> None:
        optimizer.zero_grad()
        compute(model)
        optimizer.step()

    def read_values() -> list[torch.Tensor]:
        optimizer.synchronize()  # with `overlap_pulls` some are on their way
        return [*model.parameters()]

    take_rounds(work, rank, one_round, read_values, computes=True)


if __name__ == "__main__":
    main()
