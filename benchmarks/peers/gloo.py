"""The other architecture: `torch.distributed` averages the gradients by all-reduce, and each trainer applies them."""

from __future__ import annotations

import torch
import torch.distributed as dist

from benchmarks.comparison.paced import take_rounds
from benchmarks.comparison.work import LEARNING_RATE, read_arguments


def main() -> None:
    options = read_arguments(__doc__)
    work = options.work
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{options.port}", rank=options.index, world_size=work.num_trainers
    )
    gradient = torch.cat(work.make_gradients(options.index))  # one flat tensor, as a bucket of DDP
    values, average = torch.zeros_like(gradient), torch.empty_like(gradient)

    def one_round() -> None:
        dist.all_reduce(average)
        values.add_(average, alpha=-LEARNING_RATE / work.num_trainers)

    # The gradients are reduced in place, and copied before.
    take_rounds(
        options.index, one_round, lambda num_rounds: work.check([values], num_rounds), lambda: average.copy_(gradient)
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
