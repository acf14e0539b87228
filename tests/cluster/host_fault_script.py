"""A process of a host whose gradients are a function of (rank, round), as those of fault_script.py.

    torchrun … host_fault_script.py ROUNDS PAUSE_SECONDS [RANK:ROUND[:done]]

In RANK there is an exception after ROUND, or it is done. Prints `process RANK PID`, `round N`, and in the end
`result DIGEST ROUND` or `ended RANK ERROR: TEXT`.
"""

from __future__ import annotations

import os
import sys
import time

import torch

from tests.cluster.fault_script import digest_of, loss_of, make_model
from trainer_client import RemoteOptimizer, connect


def say(text: str) -> None:
    sys.stdout.write(text + "\n")  # at once: others write to the same pipe
    sys.stdout.flush()


def main() -> None:
    rounds, pause, fails_at = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    with connect() as session:
        model = make_model()
        optimizer = RemoteOptimizer(torch.optim.Adam(model.named_parameters(), lr=0.01), model=model)
        say(f"process {session.rank} {os.getpid()}")
        try:
            while optimizer.round < rounds:
                optimizer.zero_grad()
                loss_of(model, session.rank, optimizer.round + 1).backward()
                optimizer.step()
                say(f"round {optimizer.round}")
                time.sleep(pause)  # stands for computation
                if fails_at == f"{session.rank}:{optimizer.round}":
                    raise ValueError("no data")
                if fails_at == f"{session.rank}:{optimizer.round}:done":
                    break
            say(f"result {digest_of(model)} {optimizer.round}")
        except Exception as error:
            say(f"ended {session.rank} {type(error).__name__}: {error}")
            raise


if __name__ == "__main__":
    main()
