"""The ranks of trainers that join, and the number of trainers of a run. Pure.

A run may accept `num_trainers` to `max_trainers`. As with torchrun's `--nnodes MIN:MAX`, it then waits until none has
joined for a while: the last call. Ranks are assigned at its end, since trainers learn them with the world size.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from ps_protocol.errors import Conflict, NotReady
from ps_protocol.messages import JoinTrainer
from ps_protocol.vocabulary import Rank

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


def check_expectations(run: Run, request: JoinTrainer) -> None:
    """Raise Conflict if no run of this cluster can have such a trainer."""
    fewest, most = run.sizes
    if request.world_size is not None and not fewest <= request.world_size <= most:
        raise Conflict(
            "the trainer was started for another number of trainers than the coordinator",
            code="world_mismatch",
            expected=f"WORLD_SIZE {fewest}" if fewest == most else f"WORLD_SIZE {fewest} to {most}",
            actual=f"WORLD_SIZE {request.world_size}",
        )
    most = request.world_size or most
    if request.rank is not None and request.rank >= most:
        raise Conflict(
            f"rank {request.rank} is beyond this cluster",
            code="world_mismatch", expected=f"0 to {most - 1}", actual=f"rank {request.rank}",
        )  # fmt: skip
    if actual := run.settings.consistency.unmet(request.expects):
        served = asdict(run.settings.consistency)
        raise Conflict(
            "the trainer was started for another mode than the servers run",
            code="mode_mismatch",
            expected={name: served.get(name, "no such setting") for name in actual},
            actual=actual,
        )


def choose_rank(run: Run, wanted: Rank | None) -> Rank:
    """Return the rank of a new trainer. Raises Conflict or NotReady without a free one."""
    taken = {rank for rank, t in run.trainers.items() if t.is_here or t.state == "done"}
    free = [rank for rank in range(run.sizes[1]) if rank not in taken]
    if run.plan is not None and (not free or (wanted in taken and not run.trainers[wanted].is_here)):
        raise NotReady(f"run {run.name} is under way", waiting_for=f"run {run.name} to end")
    if wanted is None:
        if not free:
            raise Conflict(
                f"all {run.sizes[1]} ranks are taken by living trainers (num_trainers, max_trainers)",
                code="rank_taken",
            )
        return free[0]
    if wanted not in free:
        text = f"a living trainer has rank {wanted}; stop that one, or give this one another RANK"
        raise Conflict(text, code="rank_taken", current=run.trainers[wanted].incarnation)
    return wanted
