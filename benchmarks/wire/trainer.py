"""A trainer that prints the seconds and the bytes of each of its steps.

Computation is emulated by sleeping, as if an accelerator worked. Each rank has a constant multiple of the same normal
gradient, so that the result is known.
"""

from __future__ import annotations

import argparse
import json
import time

import torch

from trainer_client import RemoteOptimizer, connect

from .machines import count_bytes

LEARNING_RATE = 0.1
MEASURED = "measured: "  # before the JSON, on the last line


def make_parameters(
    num_elements: int, rank: int, *, num_layers: int = 1, is_half_frozen: bool = False
) -> list[tuple[str, torch.nn.Parameter]]:
    """Make layers of the same size, with gradients; or two layers, of which the first has none."""
    num_layers = 2 if is_half_frozen else num_layers
    sizes = [num_elements // num_layers] * (num_layers - 1)
    sizes.append(num_elements - sum(sizes))
    named = [(f"weight{index}", torch.nn.Parameter(torch.zeros(size))) for index, size in enumerate(sizes)]
    for _, parameter in named[is_half_frozen:]:
        parameter.grad = torch.randn(len(parameter), generator=torch.Generator().manual_seed(0)).mul_(rank + 1)
    return named


def relative_error(trained: torch.nn.Parameter, rank: int, num_trainers: int, num_steps: int) -> float:
    """Return the relative distance from the result of so many steps of SGD from 0."""
    assert trained.grad is not None
    mean = (num_trainers + 1) / 2 / (rank + 1)  # of all trainers' gradients, in those of this one
    expected = trained.grad * (-LEARNING_RATE * mean * num_steps)
    return float((trained.detach() - expected).norm() / expected.norm())


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--elements", type=int, required=True)
    arguments.add_argument("--half-frozen", action="store_true", help="half of the elements get no gradients")
    arguments.add_argument("--layers", type=int, default=1)
    arguments.add_argument("--push", default="float32")
    arguments.add_argument("--pull", default="float32")
    arguments.add_argument("--compute-seconds", type=float, default=0.0, help="of a step")
    arguments.add_argument("--warm-up", type=int, default=0, help="steps that are not measured")
    arguments.add_argument("--steps", type=int, required=True, help="that are measured")
    options = arguments.parse_args()
    torch.set_num_threads(1)  # all machines share the processors
    session = connect(push_type=options.push, pull_type=options.pull)
    named = make_parameters(
        options.elements, session.rank, num_layers=options.layers, is_half_frozen=options.half_frozen
    )
    optimizer = RemoteOptimizer(torch.optim.SGD(named, lr=LEARNING_RATE))
    seconds, sent, received = [], [], []
    begun = time.process_time()
    for number in range(options.warm_up + options.steps):
        begin, before = time.perf_counter(), count_bytes()
        time.sleep(options.compute_seconds)
        optimizer.step()
        after = count_bytes()
        if number >= options.warm_up:
            seconds.append(time.perf_counter() - begin)
            sent.append(after[0] - before[0])
            received.append(after[1] - before[1])
    cpu_seconds = time.process_time() - begun
    error = relative_error(named[-1][1], session.rank, session.world_size, options.warm_up + options.steps)
    measured = {"seconds": seconds, "sent_bytes": sent, "received_bytes": received, "relative_error": error}
    print(MEASURED + json.dumps({**measured, "cpu_seconds": cpu_seconds}), flush=True)


if __name__ == "__main__":
    main()
