"""A trainer on a machine of its own: it takes steps, and prints what each of them took and moved.

Its computation is emulated: it sleeps, as a process does whose accelerator works. The gradient is always the same, a
normal one, and a multiple of it for each rank, so that what comes out is known.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from pathlib import Path

import torch

from trainer_client import RemoteOptimizer, connect

from .machines import INTERFACE

LEARNING_RATE = 0.1
MEASURED = "measured: "  # before the JSON, on the last line


def count_bytes() -> tuple[int, int]:
    """Sent and received by this machine until now."""
    [line] = re.findall(rf"^ *{INTERFACE}:(.*)$", Path("/proc/self/net/dev").read_text(), re.MULTILINE)
    columns = line.split()
    return int(columns[8]), int(columns[0])


def make_parameters(num_elements: int, rank: int, *, is_half_frozen: bool) -> list[tuple[str, torch.nn.Parameter]]:
    """One tensor; or two of half its size, of which the first gets no gradients."""
    sizes = [num_elements // 2, num_elements - num_elements // 2] if is_half_frozen else [num_elements]
    named = [(f"weight{index}", torch.nn.Parameter(torch.zeros(size))) for index, size in enumerate(sizes)]
    trained = named[-1][1]
    trained.grad = torch.randn(sizes[-1], generator=torch.Generator().manual_seed(0)).mul_(rank + 1)
    return named


def relative_error(trained: torch.nn.Parameter, rank: int, num_trainers: int, num_steps: int) -> float:
    """How far it is from where so many steps of SGD lead from 0."""
    assert trained.grad is not None
    mean = (num_trainers + 1) / 2 / (rank + 1)  # of all trainers' gradients, in those of this one
    expected = trained.grad * (-LEARNING_RATE * mean * num_steps)
    return float((trained.detach() - expected).norm() / expected.norm())


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--elements", type=int, required=True)
    arguments.add_argument("--half-frozen", action="store_true", help="half of the elements get no gradients")
    arguments.add_argument("--push", required=True)
    arguments.add_argument("--pull", required=True)
    arguments.add_argument("--compute-seconds", type=float, required=True, help="of a step")
    arguments.add_argument("--warm-up", type=int, required=True, help="steps that are not measured")
    arguments.add_argument("--steps", type=int, required=True, help="that are measured")
    options = arguments.parse_args()
    torch.set_num_threads(1)  # all machines share the processors
    session = connect(push_type=options.push, pull_type=options.pull)
    named = make_parameters(options.elements, session.rank, is_half_frozen=options.half_frozen)
    optimizer = RemoteOptimizer(torch.optim.SGD(named, lr=LEARNING_RATE))
    seconds, sent, received = [], [], []
    for number in range(options.warm_up + options.steps):
        begin, before = time.perf_counter(), count_bytes()
        time.sleep(options.compute_seconds)
        optimizer.step()
        after = count_bytes()
        if number >= options.warm_up:
            seconds.append(time.perf_counter() - begin)
            sent.append(after[0] - before[0])
            received.append(after[1] - before[1])
    error = relative_error(named[-1][1], session.rank, session.world_size, options.warm_up + options.steps)
    measured = {"seconds": seconds, "sent_bytes": sent, "received_bytes": received, "relative_error": error}
    print(MEASURED + json.dumps(measured), flush=True)


if __name__ == "__main__":
    main()
