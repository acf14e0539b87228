"""The other architecture: `torch.distributed` averages the gradients by all-reduce, and each trainer applies them.

With the transport `ddp`, `DistributedDataParallel` overlaps the all-reduce with the backward pass.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.comparison.embeddings import TwoTowers, make_optimizer, make_step
from benchmarks.comparison.emulated import compute, make_model
from benchmarks.comparison.paced import take_rounds
from benchmarks.comparison.work import LEARNING_RATE, Work, read_arguments


def train(work: Work, rank: int) -> None:
    gradient = torch.cat(work.make_gradients(rank))  # one flat tensor, as a bucket of DDP
    values, average = torch.zeros_like(gradient), torch.empty_like(gradient)

    def one_round() -> None:
        dist.all_reduce(average)
        values.add_(average, alpha=-LEARNING_RATE / work.num_trainers)

    # The gradients are reduced in place, and copied before.
    take_rounds(work, rank, one_round, lambda: [values], prepare=lambda: average.copy_(gradient))


def train_model(work: Work, rank: int) -> None:
    if work.batch:
        towers = DistributedDataParallel(TwoTowers(work), gradient_as_bucket_view=True)
        take_rounds(work, rank, *make_step(work, rank, towers, make_optimizer(towers)))
        return
    model = make_model(work, rank)
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)

    def one_round() -> None:
        optimizer.zero_grad()
        compute(parallel)
        optimizer.step()

    take_rounds(work, rank, one_round, lambda: [*model.parameters()], computes=True)


def main() -> None:
    options = read_arguments(__doc__)
    work: Work = options.work
    host, port = options.at[0]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://{host}:{port}", rank=options.index, world_size=work.num_trainers
    )
    (train_model if options.transport == "ddp" else train)(work, options.index)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
