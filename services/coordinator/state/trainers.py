"""The trainers of a run, from joining to their end, their ranks and their number. Pure: the caller passes the time.

A run may accept `num_trainers` to `max_trainers`. As with torchrun's `--nnodes MIN:MAX`, it then waits until no trainer
has joined for a while: the last call. Ranks are assigned at the end of the last call, since trainers learn them with
the world size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Literal

from ps_protocol.errors import Conflict, NotReady
from ps_protocol.messages import DeclareModel, JoinTrainer, Link, Software
from ps_protocol.vocabulary import Incarnation, PserverIndex, Rank, Round

if TYPE_CHECKING:
    from .run import Run

EVICTED = "was evicted by an administrator"

TrainerState = Literal["joined", "declared", "done", "failed", "lost"]


def name_ranks(ranks: Iterable[Rank]) -> str:
    """Return the trainers of these ranks in words.

    >>> name_ranks([0, 2])
    'trainer 0, trainer 2'
    """
    return ", ".join(f"trainer {rank}" for rank in ranks)


@dataclass(slots=True)
class TrainerMember:
    """The newest incarnation of a rank, present or gone."""

    rank: Rank
    incarnation: Incarnation
    instance: str
    seen_at: float  # by the monotonic clock
    metrics_address: str | None
    state: TrainerState = "joined"
    declaration: DeclareModel | None = None
    joined_at: float = 0.0
    round: Round = 0
    results: dict[str, float] = field(default_factory=dict)
    gone_at: float = 0.0  # when it was lost or failed
    why: str = ""  # the reason in words
    is_awaited: bool = False  # the run waits for this rank, whichever process takes it
    is_resumed: bool = False  # awaited since the run was resumed, so that all begin together
    has_chosen: bool = False  # its rank was set with RANK
    software: Software | None = None
    links: Mapping[PserverIndex, Link] = field(default_factory=dict)
    unreachable: Mapping[PserverIndex, float] = field(default_factory=dict)  # seconds
    cut_off_at: float = -math.inf  # when it last reported the current incarnation of a pserver as unreachable
    waiting_seconds: float = 0.0  # strategy ring: how long it waits in its next round
    is_done: bool = False  # strategy ring: it has no batches left
    is_stuck: bool = False  # lost although it is alive, because it does not progress

    @property
    def is_present(self) -> bool:
        """True if the trainer holds its rank."""
        return self.state in ("joined", "declared")

    @property
    def was_evicted(self) -> bool:
        """True if an administrator evicted the trainer."""
        return self.state == "lost" and self.why.endswith(EVICTED)

    def lose(self, state: Literal["failed", "lost"], why: str, now: float, *, is_awaited: bool) -> None:
        """Mark the trainer as gone."""
        self.state, self.why, self.gone_at, self.is_awaited = state, why, now, is_awaited

    def revive(self) -> None:
        """Undo the loss of a trainer. It stays awaited until the pservers have installed it."""
        self.state = "joined" if self.declaration is None else "declared"
        self.is_stuck = False


def join_run(run: Run, request: JoinTrainer, now: float) -> TrainerMember:
    """Return the member for a process: a new one, or the same again if its request is repeated.

    Once the run has begun, only ranks of lost trainers are free. Raises Conflict, NotReady without a free rank, and the
    errors of `check_expectations`.
    """
    check_expectations(run, request)
    for trainer in run.trainers.values():
        if trainer.instance == request.instance and trainer.is_present:
            trainer.seen_at = now
            return trainer
    if run.num_trainers is None and request.world_size is not None:
        fix_num_trainers(run, request.world_size)
    rank = choose_rank(run, request.rank)
    before = run.trainers.get(rank)
    trainer = TrainerMember(
        rank, run.next_incarnation(rank), request.instance, now, request.metrics_address, joined_at=now
    )
    if before is not None:
        trainer.round, trainer.is_awaited = before.round, before.is_awaited
    trainer.has_chosen = request.rank is not None
    run.trainers[rank] = trainer
    run.number += 1
    end_last_call(run, now)
    return trainer


def end_last_call(run: Run, now: float) -> None:
    """Fix the number of trainers once enough are present and the last call is over, or no further trainer may join."""
    if run.num_trainers is not None:
        return
    fewest, most = run.sizes
    here = [trainer for trainer in run.trainers.values() if trainer.is_present]
    needed = max([fewest, *(trainer.rank + 1 for trainer in here if trainer.has_chosen)])
    is_over = all(now - trainer.joined_at >= run.settings.last_call_seconds for trainer in here)
    if len(here) == most or (len(here) >= needed and is_over):
        fix_num_trainers(run, len(here))


def fix_num_trainers(run: Run, num_trainers: int) -> None:
    """Fix the number of trainers. Trainers without a rank are refused when they ask again."""
    run.num_trainers = num_trainers
    here = [trainer for _, trainer in sorted(run.trainers.items()) if trainer.is_present]
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
    taken = {rank for rank, t in run.trainers.items() if t.is_present or t.state == "done"}
    free = [rank for rank in range(run.sizes[1]) if rank not in taken]
    if run.plan is not None and (not free or (wanted in taken and not run.trainers[wanted].is_present)):
        raise NotReady(f"run {run.name} is under way", waiting_for=f"run {run.name} to end")
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
        raise Conflict(text, code="rank_taken", current=run.trainers[wanted].incarnation)
    return wanted
