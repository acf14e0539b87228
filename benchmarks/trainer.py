"""One trainer of a measurement: rounds of `RemoteOptimizer` on fixed gradients; rank 0 prints seconds a round."""

from __future__ import annotations

import argparse
import json
import time

import torch

from trainer_client import RemoteOptimizer, connect


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--elements", type=int, default=25_000_000, help="parameters, in one tensor")
    arguments.add_argument("--rounds", type=int, default=10)
    arguments.add_argument("--warmup", type=int, default=20)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    session = connect()
    parameter = torch.nn.Parameter(torch.zeros(options.elements))
    parameter.grad = torch.full((options.elements,), 1e-3 * (session.rank + 1))
    optimizer = RemoteOptimizer(torch.optim.SGD([("weight", parameter)], lr=0.1))
    seconds = []
    for _ in range(options.warmup + options.rounds):
        begin = time.perf_counter()
        optimizer.step()
        seconds.append(time.perf_counter() - begin)
    expected = -0.1 * 1.5e-3 * (options.warmup + options.rounds)
    assert torch.allclose(parameter[:: options.elements // 100], torch.tensor(expected), rtol=1e-3), "wrong result"
    if session.rank == 0:
        print("RESULT " + json.dumps({"seconds": seconds[options.warmup :]}), flush=True)


if __name__ == "__main__":
    main()
