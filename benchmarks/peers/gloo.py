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
    gradients = work.make_gradients(options.index)
    values = [torch.zeros_like(gradient) for gradient in gradients]
    averages = [torch.empty_like(gradient) for gradient in gradients]

    def prepare() -> None:
        """Copy the gradients, which are reduced in place."""
        torch._foreach_copy_(averages, gradients)

    def one_round() -> None:
        pending = [dist.all_reduce(average, async_op=True) for average in averages]
        for work_ in pending:
            work_.wait()
        torch._foreach_add_(values, averages, alpha=-LEARNING_RATE / work.num_trainers)

    take_rounds(options.index, one_round, lambda num_rounds: work.check(values, num_rounds), prepare)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
