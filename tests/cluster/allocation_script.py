"""Trains in several ways, one run after the other, and prints how many bytes of fresh memory each step was given."""

from __future__ import annotations

import json
import resource
import sys
from typing import Any

import torch
from torch import Tensor, nn

from trainer_client import RemoteOptimizer, connect

ELEMENTS, STEPS = 1 << 20, 10


class Layer(nn.Module):
    """Its gradient is made without any memory, so that all that is counted is ours."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(ELEMENTS))
        self.weight.grad = torch.zeros(ELEMENTS)
        self.given = torch.full((ELEMENTS,), 0.01)

    def forward(self, x: Tensor) -> Tensor:
        given = self.given

        class Give(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
                return x.clone()

            @staticmethod
            def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
                return gradient, given

        return Give.apply(x, self.weight)  # type: ignore[no-any-return, no-untyped-call]


def fresh_bytes() -> int:
    """That the kernel has given this process so far: pages that were touched for the first time."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt * resource.getpagesize()


def measure(arguments: dict[str, Any]) -> list[int]:
    with connect() as session:
        model = nn.Sequential(*(Layer() for _ in range(4)))
        optimizer = RemoteOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1, fused=True), model=model, session=session, **arguments
        )
        found = []
        for _ in range(STEPS):
            optimizer.zero_grad(set_to_none=False)
            before = fresh_bytes()
            model(torch.zeros((), requires_grad=True)).backward()
            optimizer.step()
            found.append(fresh_bytes() - before)
        optimizer.synchronize()
        return found


def main() -> None:
    torch.set_num_threads(1)
    for arguments in json.loads(sys.argv[1]):
        print(json.dumps([arguments, measure(arguments)]), flush=True)


if __name__ == "__main__":
    main()
