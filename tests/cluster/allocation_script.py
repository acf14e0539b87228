"""Trains in several ways, one run after the other, and prints how many bytes of fresh memory each step was given."""

from __future__ import annotations

import json
import resource
import sys
from typing import Any

import torch
from torch import Tensor, nn

from trainer_client import RemoteOptimizer, connect

SHAPE, STEPS = (1024, 64, 4, 4), 10
ELEMENTS = 1024 * 64 * 4 * 4


class Layer(nn.Module):
    """Its gradient is made without any memory, so that all that is counted is ours."""

    def __init__(self, *, channels_last: bool) -> None:
        super().__init__()
        weight = torch.zeros(SHAPE)
        if channels_last:
            weight = weight.contiguous(memory_format=torch.channels_last)
        self.weight = nn.Parameter(weight)
        self.weight.grad = torch.zeros_like(weight)
        self.given = torch.full_like(weight, 0.01)

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


def measure(arguments: dict[str, Any], *, channels_last: bool, passes: int) -> list[int]:
    with connect() as session:
        model = nn.Sequential(*(Layer(channels_last=channels_last) for _ in range(4)))
        optimizer = RemoteOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1, foreach=False), model=model, session=session, **arguments
        )
        found = []
        for _ in range(STEPS):
            optimizer.zero_grad(set_to_none=False)
            before = fresh_bytes()
            for _ in range(passes):
                model(torch.zeros((), requires_grad=True)).backward()
            optimizer.step()
            found.append(fresh_bytes() - before)
        optimizer.synchronize()
        return found


def main() -> None:
    torch.set_num_threads(1)
    for arguments in json.loads(sys.argv[1]):
        ours = {name: value for name, value in arguments.items() if name != "channels_last"}
        counts = measure(ours, channels_last="channels_last" in arguments, passes=arguments.get("accumulate_steps", 1))
        print(json.dumps([arguments, counts]), flush=True)


if __name__ == "__main__":
    main()
