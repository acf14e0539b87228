"""A trainer whose gradients are a function of (rank, round), so that a run's result does not depend on its faults.

    python fault_script.py ROUNDS [PAUSE_SECONDS [RANK:ROUND]]

In RANK's gradient of ROUND there is a NaN. Prints `round N` for each round, and in the end `result DIGEST ROUND`.
"""

from __future__ import annotations

import sys
import time

import torch
import xxhash

from trainer_client import RemoteOptimizer, connect


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.Tanh(), torch.nn.Linear(64, 3))


def loss_of(model: torch.nn.Module, rank: int, round_: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * round_ + rank)
    return model(torch.randn(8, 20, generator=generator)).pow(2).mean()


def digest_of(model: torch.nn.Module) -> str:
    return xxhash.xxh3_64_hexdigest(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))


def main() -> None:
    rounds, pause = int(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 0.0
    nan_at = sys.argv[3] if len(sys.argv) > 3 else ""
    torch.set_num_threads(1)
    session = connect()
    model = make_model()
    optimizer = RemoteOptimizer(torch.optim.Adam(model.named_parameters(), lr=0.01), model=model)
    print(f"begin {optimizer.round}", flush=True)
    while optimizer.round < rounds:
        optimizer.zero_grad()
        loss_of(model, session.rank, optimizer.round + 1).backward()
        if nan_at == f"{session.rank}:{optimizer.round + 1}":
            next(model.parameters()).grad[0, 0] = float("nan")
        optimizer.step()
        if optimizer.round == rounds:
            optimizer.synchronize()  # the run may go back as long as something is on its way
        print(f"round {optimizer.round}", flush=True)
        time.sleep(pause)  # stands for computation
    print(f"result {digest_of(model)} {optimizer.round}", flush=True)


if __name__ == "__main__":
    main()
