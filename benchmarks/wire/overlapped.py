"""A trainer of an emulated model, which prints the seconds of its steps with or without overlap."""

from __future__ import annotations

import argparse
import json
import time

import torch

from benchmarks.placement import MODELS, model_parameters
from trainer_client import RemoteOptimizer, connect
from trainer_client.client.metrics import TrainerMetrics

from .emulated import GRADIENT, make_model
from .trainer import LEARNING_RATE, MEASURED

WAYS = ("none", "pushes", "both")  # what overlaps


def seconds_spent(metrics: TrainerMetrics) -> tuple[float, float]:
    """Return the seconds spent until now on pushes, and on barriers and pulls."""
    found = [metrics.registry.get_sample_value(f"gradpost_trainer_{kind}_seconds_sum") for kind in ("push", "pull")]
    push, pull = (value or 0.0 for value in found)
    return push, pull


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--model", choices=MODELS, required=True)
    arguments.add_argument("--way", choices=WAYS, required=True)
    arguments.add_argument("--forward-seconds", type=float, required=True)
    arguments.add_argument("--backward-seconds", type=float, required=True)
    arguments.add_argument("--bucket-bytes", type=int)
    arguments.add_argument("--warm-up", type=int, required=True, help="steps that are not measured")
    arguments.add_argument("--steps", type=int, required=True, help="that are measured")
    options = arguments.parse_args()
    torch.set_num_threads(1)  # all machines share the processors
    session = connect(
        overlap=options.way != "none", overlap_pulls=options.way == "both", bucket_bytes=options.bucket_bytes
    )
    model = make_model(model_parameters(options.model), options.forward_seconds, options.backward_seconds)
    optimizer = RemoteOptimizer(torch.optim.SGD(model.parameters(), lr=LEARNING_RATE), model=model)
    seconds, pushes, pulls = [], [], []
    for number in range(options.warm_up + options.steps):
        begin, before = time.perf_counter(), seconds_spent(session.client.metrics)
        optimizer.zero_grad()
        model(torch.zeros(1, requires_grad=True)).sum().backward()
        optimizer.step()
        after = seconds_spent(session.client.metrics)
        if number >= options.warm_up:
            seconds.append(time.perf_counter() - begin)
            pushes.append(after[0] - before[0])
            pulls.append(after[1] - before[1])
    optimizer.synchronize()
    expected = -LEARNING_RATE * GRADIENT * (options.warm_up + options.steps)
    error = max(float((parameter - expected).abs().max()) for parameter in model.parameters())
    measured = {"seconds": seconds, "push_seconds": pushes, "pull_seconds": pulls, "error": error}
    print(MEASURED + json.dumps(measured), flush=True)


if __name__ == "__main__":
    main()
