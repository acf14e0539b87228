"""One trainer of the study, which records its computation, its waits and its losses."""

from __future__ import annotations

import time
from typing import Any

import torch
from cells import TRAINERS, Cell
from workloads import make_workload

from trainer_client import RemoteOptimizer, connect

EVALUATIONS = 40  # by rank 0, over the run


def train(cell: Cell, seed: int, coordinator: str, rank: int) -> dict[str, Any]:
    """Train one cell as this rank. Times are seconds of the machine's clock, which all trainers share."""
    torch.set_num_threads(1)
    with connect(coordinator, rank=rank, world_size=TRAINERS) as session:
        work = make_workload(cell.workload, seed, rank, TRAINERS)
        inner = work.optimizer(work.model.named_parameters(), lr=work.rate * cell.rate)
        optimizer = RemoteOptimizer(inner, model=work.model, **cell.local)
        steps: list[tuple[float, float, float]] = []  # began, had computed, had its parameters
        held_out: list[tuple[int, float, float]] = [(0, time.time(), work.held_out_loss())]
        every = cell.steps // EVALUATIONS
        for step in range(cell.steps):
            begin = time.time()
            optimizer.zero_grad()
            work.loss(work.model, next(work.batches)).backward()
            # The rest of the step is emulated: an accelerator would compute, and the processor be free.
            until = begin + cell.compute_seconds * cell.slowness(rank, step)
            time.sleep(max(0.0, until - time.time()))
            computed = time.time()
            optimizer.step()
            steps.append((begin, computed, time.time()))
            if rank == 0 and every and (step + 1) % every == 0:
                held_out.append((step + 1, time.time(), work.held_out_loss()))
        optimizer.synchronize()
        metrics = session.client.metrics
        return {
            "steps": steps,
            "held_out": held_out,
            "pushed_bytes": metrics.pushed_bytes.collect()[0].samples[0].value,
            "pulled_bytes": metrics.pulled_bytes.collect()[0].samples[0].value,
        }
