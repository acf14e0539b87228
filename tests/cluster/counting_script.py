"""A trainer that counts: each of its contributions adds 1 to its own row of every parameter.

    python counting_script.py ROUNDS [PAUSE_SECONDS]

So the parameters say how often each trainer's contribution was applied. Prints `round N` for each step, and in the end
`result COUNTS ROUND`: the row of every trainer, `7` or `6/7` if its elements do not agree.
"""

from __future__ import annotations

import sys
import time

import torch

from trainer_client import RemoteOptimizer, connect

SIZES = (40, 100, 7)  # of rows: several blocks, on every pserver


def main() -> None:
    rounds, pause = int(sys.argv[1]), float(sys.argv[2])
    torch.set_num_threads(1)
    session = connect()
    tensors = [torch.nn.Parameter(torch.zeros(session.world_size, size)) for size in SIZES]
    parameters = [(f"p{i}", tensor) for i, tensor in enumerate(tensors)]
    optimizer = RemoteOptimizer(torch.optim.SGD(parameters, lr=1.0))
    print(f"begin {optimizer.round}", flush=True)
    while optimizer.round < rounds:
        optimizer.zero_grad()
        for tensor in tensors:
            tensor.grad = torch.zeros_like(tensor)
            tensor.grad[session.rank] = -1.0
        optimizer.step()
        print(f"round {optimizer.round}", flush=True)
        time.sleep(pause)  # stands for computation
    optimizer.synchronize()
    rows = [{value for tensor in tensors for value in tensor[rank].tolist()} for rank in range(session.world_size)]
    counts = ["/".join(f"{value:.0f}" for value in sorted(row)) for row in rows]
    print(f"result {','.join(counts)} {optimizer.round}", flush=True)


if __name__ == "__main__":
    main()
