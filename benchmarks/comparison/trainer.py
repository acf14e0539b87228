"""A trainer of Gradpost that takes steps of `RemoteOptimizer` with fixed gradients."""

from __future__ import annotations

import argparse

import torch

from benchmarks.comparison.paced import take_rounds
from benchmarks.comparison.work import LEARNING_RATE, Work
from trainer_client import RemoteOptimizer, connect


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--work", type=Work.load, required=True)
    work: Work = arguments.parse_args().work
    torch.set_num_threads(1)
    session = connect()
    parameters = []
    for gradient in work.make_gradients(session.rank):
        parameter = torch.nn.Parameter(torch.zeros_like(gradient))
        parameter.grad = gradient
        parameters.append(parameter)
    kind = torch.optim.SGD if work.optimizer == "sgd" else torch.optim.Adam
    named = [(f"weight{i}", parameter) for i, parameter in enumerate(parameters)]
    optimizer = RemoteOptimizer(kind(named, lr=LEARNING_RATE))
    take_rounds(session.rank, optimizer.step, lambda num_rounds: work.check(list(parameters), num_rounds))


if __name__ == "__main__":
    main()
