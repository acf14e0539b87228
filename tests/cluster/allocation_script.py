"""Trains in several ways, one run after the other, and prints what memory the steps took.

Fresh memory that the kernel gave the process in each step, in bytes; and the size of each tensor that torch made on the
script's thread in two more steps. Memory that the allocator reuses is not in the former; the latter is exact.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from trainer_client import RemoteOptimizer, connect

SHAPE, STEPS = (1024, 64, 4, 4), 10
FIRST_STEPS = 2  # with local steps the first push is in the second
ELEMENTS = 1024 * 64 * 4 * 4


class Layer(nn.Module):
    """A layer whose gradient is made without any memory, so that all memory that is counted is ours."""

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
    """Return the bytes of pages that this process has touched for the first time so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt * resource.getpagesize()


def made_tensors(profiled: profile) -> list[int]:
    """Return the bytes of each tensor."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiled.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = [event["args"]["Bytes"] for event in events if event["name"] == "[memory]"]
    return [change for change in changes if change > 0]


def measure(arguments: dict[str, Any], *, channels_last: bool, passes: int) -> tuple[int, list[int], list[int]]:
    """Return this trainer's rank, the fresh memory and the tensors of its steps."""
    with connect() as session:
        model = nn.Sequential(*(Layer(channels_last=channels_last) for _ in range(4)))
        optimizer = RemoteOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1, foreach=False), model=model, session=session, **arguments
        )

        def step() -> int:
            optimizer.zero_grad(set_to_none=False)
            before = fresh_bytes()
            for _ in range(passes):
                model(torch.zeros((), requires_grad=True)).backward()
            optimizer.step()
            return fresh_bytes() - before

        for _ in range(FIRST_STEPS):
            step()
        fresh = [step() for _ in range(STEPS - FIRST_STEPS)]
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            for _ in range(2):
                step()
        optimizer.synchronize()
        return session.rank, fresh, made_tensors(profiled)


def main() -> None:
    torch.set_num_threads(1)
    for arguments in json.loads(sys.argv[1]):
        ours = {name: value for name, value in arguments.items() if name != "channels_last"}
        passes = arguments.get("accumulate_steps", 1)
        rank, fresh, tensors = measure(ours, channels_last="channels_last" in arguments, passes=passes)
        # The processes of a host share a pipe: print() could write the line and its end separately.
        sys.stdout.write(json.dumps([arguments, rank, fresh, tensors]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
