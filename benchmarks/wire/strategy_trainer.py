"""A trainer of `strategies`: it takes steps with a gradient that is always the same, and prints what they took."""

from __future__ import annotations

import argparse
import json
import time

import torch

from trainer_client import RemoteOptimizer, connect

from .trainer import MEASURED

NUM_LAYERS = 4
LEARNING_RATE = 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)  # all machines share the processors
    session = connect()
    layers = [torch.nn.Parameter(torch.zeros(options.elements // NUM_LAYERS)) for _ in range(NUM_LAYERS)]
    optimizer = RemoteOptimizer(
        torch.optim.SGD([(f"layer{i}", layer) for i, layer in enumerate(layers)], lr=LEARNING_RATE)
    )
    for layer in layers:
        layer.grad = torch.full_like(layer, session.rank + 1.0)
    seconds = []
    begun = time.process_time()
    for _ in range(options.steps):
        before = time.perf_counter()
        optimizer.step()
        seconds.append(time.perf_counter() - before)
    cpu_seconds = time.process_time() - begun
    expected = -LEARNING_RATE * options.steps * (session.world_size + 1) / 2
    assert all(abs(layer[0].item() - expected) < 1e-4 for layer in layers), layers[0][0]
    print(MEASURED + json.dumps({"seconds": seconds, "cpu_seconds": cpu_seconds}), flush=True)


if __name__ == "__main__":
    main()
