"""The trainers of a run, from joining to their end, their ranks and their number. Pure: the caller passes the time.

A run may accept `num_trainers` to `max_trainers`. As with torchrun's `--nnodes MIN:MAX`, it then waits until no trainer
has joined for a while: the last call. Ranks are assigned at the end of the last call, since trainers learn them with
the world size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from ps_protocol.errors import Conflict, NotReady
from ps_protocol.messages import JoinTrainer, TrainerHeartbeat
from ps_protocol.vocabulary import Rank, Round

from .record import TrainerRecord

if TYPE_CHECKING:
    from .run import Run


def name_ranks(ranks: Iterable[Rank]) -> str:
    """Return the trainers of these ranks in words.

    >>> name_ranks([0, 2])
    'trainer 0, trainer 2'
    """
    return ", ".join(f"trainer {rank}" for rank in ranks)


@dataclass(slots=True)
class TrainerReport:
    """The newest heartbeat of a trainer, and times by the monotonic clock. Nothing of it is persisted."""

    heartbeat: TrainerHeartbeat
    seen_at: float
    joined_at: float
    gone_at: float = 0.0  # when it was lost or failed
    cut_off_at: float = -math.inf  # when it last reported the current incarnation of a pserver as unreachable
    has_chosen: bool = False  # its rank was set with RANK
    is_stuck: bool = False  # lost although it is alive, because it does not progress

    @classmethod
    def begin(
        cls, trainer: TrainerRecord, run: str, now: float, round_: Round, *, has_chosen: bool = False
    ) -> TrainerReport:
        """Return the report of a trainer that has not sent a heartbeat; its lease begins now."""
        heartbeat = TrainerHeartbeat(run=run, incarnation=trainer.incarnation, round=round_)
        return cls(heartbeat, seen_at=now, joined_at=now, has_chosen=has_chosen)

    @property
    def round(self) -> Round:
        """The newest round that the trainer has completed."""
        return self.heartbeat.round


def join_run(run: Run, request: JoinTrainer, now: float) -> TrainerRecord:
    """Return the trainer of a process: a new one, or the same again if its request is repeated.

    Once the run has begun, only ranks of lost trainers are free. Raises Conflict, NotReady without a free rank, and the
    errors of `check_expectations`.
    """
    check_expectations(run, request)
    for trainer in run.record.trainers.values():
        if trainer.instance == request.instance and trainer.is_present:
            run.reports[trainer.rank].seen_at = now
            return trainer
    if run.record.num_trainers is None and request.world_size is not None:
        fix_num_trainers(run, request.world_size)
    rank = choose_rank(run, request.rank)
    before = run.record.trainers.get(rank)
    trainer = TrainerRecord(
        rank=rank,
        incarnation=run.next_incarnation(rank),
        instance=request.instance,
        metrics_address=request.metrics_address,
        is_awaited=before is not None and before.is_awaited,
    )
    round_ = 0 if before is None else run.reports[rank].round
    run.reports[rank] = TrainerReport.begin(trainer, run.record.name, now, round_, has_chosen=request.rank is not None)
    run.record = run.record.change(trainers={**run.record.trainers, rank: trainer})
    end_last_call(run, now)
    return next(t for t in run.record.trainers.values() if t.instance == request.instance and t.is_present)


def end_last_call(run: Run, now: float) -> None:
    """Fix the number of trainers once enough are present and the last call is over, or no further trainer may join."""
    if run.record.num_trainers is not None:
        return
    fewest, most = run.sizes
    here = [run.reports[rank] for rank in run.record.members]
    needed = max([fewest, *(rank + 1 for rank in run.record.members if run.reports[rank].has_chosen)])
    is_over = all(now - report.joined_at >= run.settings.last_call_seconds for report in here)
    if len(here) == most or (len(here) >= needed and is_over):
        fix_num_trainers(run, len(here))


def fix_num_trainers(run: Run, num_trainers: int) -> None:
    """Fix the number of trainers. Trainers without a rank are refused when they ask again."""
    here = [(trainer, run.reports[rank]) for rank, trainer in sorted(run.record.trainers.items()) if trainer.is_present]
    placed = {t.rank: (t, report) for t, report in here if report.has_chosen and t.rank < num_trainers}
    free = [rank for rank in range(num_trainers) if rank not in placed]
    for rank, (trainer, report) in zip(free, (one for one in here if not one[1].has_chosen), strict=False):
        if rank != trainer.rank:
            trainer = trainer.model_copy(update={"rank": rank, "incarnation": run.next_incarnation(rank)})
        placed[rank] = trainer, report
    run.reports = {rank: report for rank, (_, report) in placed.items()}
    trainers = {rank: trainer for rank, (trainer, _) in placed.items()}
    run.record = run.record.change(num_trainers=num_trainers, trainers=trainers)


def check_expectations(run: Run, request: JoinTrainer) -> None:
    """Raise Conflict if no run of this cluster can have such a trainer."""
    fewest, most = run.sizes
    if request.world_size is not None and not fewest <= request.world_size <= most:
        raise Conflict(
            "the WORLD_SIZE of the trainer does not match num_trainers and max_trainers of the coordinator",
            code="world_mismatch",
            expected=f"WORLD_SIZE {fewest}" if fewest == most else f"WORLD_SIZE {fewest} to {most}",
            actual=f"WORLD_SIZE {request.world_size}",
        )
    most = request.world_size or most
    if request.rank is not None and request.rank >= most:
        raise Conflict(
            f"rank {request.rank} must be less than the number of trainers, {most}",
            code="world_mismatch", expected=f"0 to {most - 1}", actual=f"rank {request.rank}",
        )  # fmt: skip
    if actual := run.settings.consistency.unmet(request.expects):
        served = asdict(run.settings.consistency)
        raise Conflict(
            "the trainer expects other settings than the coordinator has; start both with the same settings",
            code="mode_mismatch",
            expected={name: served.get(name, "no such setting") for name in actual},
            actual=actual,
        )


def choose_rank(run: Run, wanted: Rank | None) -> Rank:
    """Return the rank of a new trainer. Raises Conflict or NotReady without a free one."""
    taken = {rank for rank, t in run.record.trainers.items() if t.is_present or t.state == "done"}
    free = [rank for rank in range(run.sizes[1]) if rank not in taken]
    if run.record.plan is not None and (not free or (wanted in taken and not run.record.trainers[wanted].is_present)):
        raise NotReady(f"run {run.record.name} is under way", waiting_for=f"run {run.record.name} to end")
    if wanted is None:
        if not free:
            raise Conflict(
                f"all {run.sizes[1]} ranks are taken. Stop a trainer, or start the run with a larger num_trainers or "
                "max_trainers",
                code="rank_taken",
            )
        return free[0]
    if wanted not in free:
        text = f"a living trainer has rank {wanted}; stop that trainer, or start this one with another RANK"
        raise Conflict(text, code="rank_taken", current=run.record.trainers[wanted].incarnation)
    return wanted
