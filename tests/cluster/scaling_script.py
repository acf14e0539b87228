"""As fault_script.py, with a GradScaler; the losses of some trainers are infinite in some rounds.

    python scaling_script.py ROUNDS PAUSE_SECONDS [NAN_AT]

Prints `scale ROUND SCALE`: by what the loss of a round was multiplied.
"""

from __future__ import annotations

import sys
import time

import torch

from tests.cluster.fault_script import digest_of, loss_of, make_model
from trainer_client import GradScaler, RemoteOptimizer, connect

INIT_SCALE, GROWTH_INTERVAL = 2.0**10, 3


def overflows(rank: int, round_: int) -> bool:
    return round_ % 7 == 5 and rank == round_ // 7 % 2


def main() -> None:
    rounds, pause = int(sys.argv[1]), float(sys.argv[2])
    torch.set_num_threads(1)
    session = connect()
    model = make_model()
    optimizer = RemoteOptimizer(torch.optim.Adam(model.named_parameters(), lr=0.01), model=model)
    scaler = GradScaler(optimizer, "cpu", init_scale=INIT_SCALE, growth_interval=GROWTH_INTERVAL)
    print(f"begin {optimizer.round}", flush=True)
    while (begun := optimizer._steps.begun) < rounds:  # with `max_delay` more than optimizer.round
        round_ = begun + 1
        optimizer.zero_grad()
        loss = loss_of(model, session.rank, round_)
        scaler.scale(loss * float("inf") if overflows(session.rank, round_) else loss).backward()
        now = optimizer._steps.begun + 1  # another one if the run went back meanwhile
        print(f"scale {now} {scaler.get_scale()}", flush=True)
        scaler.step(optimizer)
        scaler.update()
        if optimizer._steps.begun == rounds:
            optimizer.synchronize()
        print(f"round {optimizer.round}", flush=True)
        time.sleep(pause)  # stands for computation
    print(f"result {digest_of(model)} {optimizer.round}", flush=True)


if __name__ == "__main__":
    main()
