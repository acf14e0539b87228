"""How many trainers a run has, when it takes as many as come: `num_trainers` to `max_trainers`. Pure.

As with torchrun's `--nnodes MIN:MAX`: once there are enough, a run waits until nobody has joined for a while, its last
call. Nobody has been told a rank before that, since the world size is not known; so ranks close up at its end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .run import Run


def end_last_call(run: Run, now: float) -> None:
    """Settle how many trainers the run has, if enough are here and the last call is over, or no more may come."""
    if run.num_trainers is not None:
        return
    fewest, most = run.sizes
    here = [trainer for trainer in run.trainers.values() if trainer.is_here]
    needed = max([fewest, *(trainer.rank + 1 for trainer in here if trainer.has_chosen)])
    is_over = all(now - trainer.joined_at >= run.defaults.last_call_seconds for trainer in here)
    if len(here) == most or (len(here) >= needed and is_over):
        fix_num_trainers(run, len(here))


def fix_num_trainers(run: Run, num_trainers: int) -> None:
    """From now on the run has so many trainers. Those for whom there is no rank are told so when they ask again."""
    run.num_trainers = num_trainers
    here = [trainer for _, trainer in sorted(run.trainers.items()) if trainer.is_here]
    run.trainers = {t.rank: t for t in here if t.has_chosen and t.rank < num_trainers}
    free = [rank for rank in range(num_trainers) if rank not in run.trainers]
    for rank, trainer in zip(free, (t for t in here if not t.has_chosen), strict=False):
        if rank != trainer.rank:
            trainer.rank, trainer.incarnation = rank, run.next_incarnation(rank)
        run.trainers[rank] = trainer
    run.number += 1
