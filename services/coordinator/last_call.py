"""The number of trainers of a run that accepts `num_trainers` to `max_trainers`. Pure.

As with torchrun's `--nnodes MIN:MAX`, a run with enough trainers waits until none has joined for a while: the last
call. Ranks are assigned at its end, since trainers learn their rank only with the world size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .run import Run


def end_last_call(run: Run, now: float) -> None:
    """Fix the number of trainers once enough are present and the last call is over, or no more may join."""
    if run.num_trainers is not None:
        return
    fewest, most = run.sizes
    here = [trainer for trainer in run.trainers.values() if trainer.is_here]
    needed = max([fewest, *(trainer.rank + 1 for trainer in here if trainer.has_chosen)])
    is_over = all(now - trainer.joined_at >= run.settings.last_call_seconds for trainer in here)
    if len(here) == most or (len(here) >= needed and is_over):
        fix_num_trainers(run, len(here))


def fix_num_trainers(run: Run, num_trainers: int) -> None:
    """Fix the number of trainers. Trainers without a rank are refused when they ask again."""
    run.num_trainers = num_trainers
    here = [trainer for _, trainer in sorted(run.trainers.items()) if trainer.is_here]
    run.trainers = {t.rank: t for t in here if t.has_chosen and t.rank < num_trainers}
    free = [rank for rank in range(num_trainers) if rank not in run.trainers]
    for rank, trainer in zip(free, (t for t in here if not t.has_chosen), strict=False):
        if rank != trainer.rank:
            trainer.rank, trainer.incarnation = rank, run.next_incarnation(rank)
        run.trainers[rank] = trainer
    run.number += 1
