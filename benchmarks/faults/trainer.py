"""A trainer that prints `round N TIME` after each step, by the machine's clock.

    python trainer.py [--elements 10000] [--tensors 1] [--compute-seconds 0.1] [--rounds 20]

Computation is emulated by sleeping, as if an accelerator worked. The gradient is constant.
"""

from __future__ import annotations

import argparse
import time

import torch

from gradpost import RemoteOptimizer, connect


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--elements", type=int, default=10_000, help="parameters, of all tensors")
    arguments.add_argument("--tensors", type=int, default=1, help="of the same size")
    arguments.add_argument("--compute-seconds", type=float, default=0.0, help="of a step")
    arguments.add_argument("--rounds", type=int, help="number of rounds; without it, until the process is ended")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    named = []
    for index in range(options.tensors):
        parameter = torch.nn.Parameter(torch.zeros(options.elements // options.tensors))
        parameter.grad = torch.full_like(parameter, 1e-3)
        named.append((f"weight{index}", parameter))
    local = torch.optim.Adam(named, lr=1e-3)  # it imports for seconds, so before the trainer joins
    connect()
    optimizer = RemoteOptimizer(local)
    while options.rounds is None or optimizer.round < options.rounds:
        time.sleep(options.compute_seconds)
        optimizer.step()
        print(f"round {optimizer.round} {time.time():.6f}", flush=True)


if __name__ == "__main__":
    main()
