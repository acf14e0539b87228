"""What `make bench` makes sure of: that each system has done all of its rounds, and none twice."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.comparison.work import LEARNING_RATE, Work

SGD = Work((1000, 24))


def train(work: Work, num_rounds: int) -> list[torch.Tensor]:
    """In one process."""
    contributions = [work.make_gradients(rank) for rank in range(work.num_trainers)]
    parameters = [torch.nn.Parameter(torch.zeros(count)) for count in work.elements]
    kind = torch.optim.Adam if work.optimizer == "adam" else torch.optim.SGD
    optimizer = kind(parameters, lr=LEARNING_RATE)
    for _ in range(num_rounds):
        for parameter, *gradients in zip(parameters, *contributions, strict=True):
            parameter.grad = torch.stack(gradients).mean(0)
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


@pytest.mark.parametrize("work", [SGD, replace(SGD, num_trainers=4), replace(SGD, optimizer="adam")])
@pytest.mark.parametrize("num_rounds", [10, 100, 700])
def test_a_round_too_many_or_too_few_is_noticed(work: Work, num_rounds: int) -> None:
    values = train(work, num_rounds)
    work.check(values, num_rounds)
    for wrong in (num_rounds - 1, num_rounds + 1):
        with pytest.raises(AssertionError):
            work.check(values, wrong)


def test_nothing_is_said_of_what_is_not_known() -> None:
    replace(SGD, is_exact=False).check(train(SGD, 3), 5)
