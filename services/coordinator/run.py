"""One run as the coordinator sees it: who takes part, what they train, how it ends. Pure, without a clock.

gathering ──all pservers here, all trainers declared the same model──► training ──all left──► finished
    └──────────────────────────── a trainer or pserver fails ────────────┴──────────────────► failed
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Literal

from ps_protocol.consistency import Consistency
from ps_protocol.errors import (
    GradpostError,
    ModelMismatch,
    ModeMismatch,
    RankTaken,
    RoundTimeout,
    StaleRun,
    StaleTrainer,
    TrainerLost,
    WorldMismatch,
)
from ps_protocol.messages import DeclareModel, JoinTrainer, Leave, RunState, TrainerHeartbeat
from ps_protocol.optimizers import check_optimizer
from ps_protocol.plan import SlicePlan, make_plan
from ps_protocol.vocabulary import (
    Incarnation,
    Mode,
    NonfinitePolicy,
    ParameterSpec,
    Placement,
    Rank,
    Round,
)


@dataclass(frozen=True, slots=True)
class RunDefaults:
    """What a run is when its trainers do not say otherwise."""

    num_trainers: int
    consistency: Consistency
    min_block_size: int
    placement: Placement
    slice_parameters: bool
    nonfinite: NonfinitePolicy
    round_timeout_seconds: float


@dataclass(slots=True)
class TrainerMember:
    """One trainer of the run, living or gone."""

    rank: Rank
    incarnation: Incarnation
    instance: str
    seen_at: float  # by the monotonic clock
    metrics_address: str | None
    state: Literal["joined", "declared", "done", "failed", "lost"] = "joined"
    declaration: DeclareModel | None = None
    round: Round = 0
    results: dict[str, float] = field(default_factory=dict)

    @property
    def is_here(self) -> bool:
        """Whether it holds its rank."""
        return self.state in ("joined", "declared")


class Run:
    """Trainers and state of one run. Every change of members or of the failure raises `number`."""

    def __init__(self, name: str, defaults: RunDefaults, incarnations: dict[Rank, Incarnation]) -> None:
        self.name = name
        self.defaults = defaults
        self.state: RunState = "gathering"
        self.trainers: dict[Rank, TrainerMember] = {}
        self.plan: SlicePlan | None = None
        self.uploader: Rank = 0  # who pushes the initial values: the lowest rank when the plan was made
        self.failure: GradpostError | None = None
        self.number = 0
        self.started_at: float | None = None  # by the monotonic clock, when training began
        self.ended_at: float | None = None
        self._complete_since: float | None = None  # everybody has joined, and somebody waits for others to declare
        self._incarnations = incarnations  # outlives the run: a rank's next life has a higher number

    @property
    def mode(self) -> Mode:
        """The mode of the servers, fixed for the run."""
        return self.defaults.consistency.mode

    @property
    def members(self) -> dict[Rank, Incarnation]:
        """Those who take part in rounds."""
        return {t.rank: t.incarnation for t in self.trainers.values() if t.is_here}

    @property
    def round(self) -> Round:
        """The newest round that every trainer, gone or not, has completed."""
        return min((trainer.round for trainer in self.trainers.values()), default=0)

    @property
    def is_over(self) -> bool:
        """Finished or failed."""
        return self.state in ("finished", "failed")

    @property
    def is_deserted(self) -> bool:
        """Over, and nobody of it is left."""
        return self.is_over and not self.members

    @property
    def is_declared(self) -> bool:
        """Whether all trainers are here and agree on the model."""
        declared = [t for t in self.trainers.values() if t.state == "declared"]
        return len(declared) == self.defaults.num_trainers

    @property
    def missing_ranks(self) -> list[Rank]:
        """Ranks that have not declared their model yet."""
        return [
            rank
            for rank in range(self.defaults.num_trainers)
            if rank not in self.trainers or self.trainers[rank].state != "declared"
        ]

    # ------------------------------------------------------------------ events

    def join(self, request: JoinTrainer, now: float) -> TrainerMember:
        """Give the process a rank and an incarnation; the same process again gets the same answer."""
        self.check_expectations(request)
        for trainer in self.trainers.values():
            if trainer.instance == request.instance and trainer.is_here:
                trainer.seen_at = now
                return trainer
        rank = self._choose_rank(request.rank)
        self._incarnations[rank] = self._incarnations.get(rank, 0) + 1
        trainer = TrainerMember(rank, self._incarnations[rank], request.instance, now, request.metrics_address)
        self.trainers[rank] = trainer
        self.number += 1
        return trainer

    def check_expectations(self, request: JoinTrainer) -> None:
        """Raise WorldMismatch or ModeMismatch if no run of this cluster can have such a trainer."""
        world_size = self.defaults.num_trainers
        if request.world_size not in (None, world_size):
            raise WorldMismatch(
                "the trainer was started for another number of trainers than the coordinator",
                expected=f"WORLD_SIZE {world_size}",
                actual=f"WORLD_SIZE {request.world_size}",
            )
        if request.rank is not None and request.rank >= world_size:
            raise WorldMismatch(
                f"rank {request.rank} is beyond this cluster",
                expected=f"0 to {world_size - 1}",
                actual=f"rank {request.rank}",
            )
        if actual := self.defaults.consistency.difference(request.expects):
            served = asdict(self.defaults.consistency)
            raise ModeMismatch(
                "the trainer was started for another mode than the servers run",
                expected={name: served.get(name, "no such setting") for name in actual},
                actual=actual,
            )

    def _choose_rank(self, wanted: Rank | None) -> Rank:
        free = [r for r in range(self.defaults.num_trainers) if r not in self.trainers]
        if wanted is None:
            if not free:
                raise RankTaken(f"all {self.defaults.num_trainers} ranks are taken by living trainers")
            return free[0]
        if wanted not in free:
            raise RankTaken(f"a living trainer has rank {wanted}", current=self.trainers[wanted].incarnation)
        return wanted

    def member(self, rank: Rank, run: str, incarnation: Incarnation) -> TrainerMember:
        """The trainer that a message is from; raises StaleRun or StaleTrainer."""
        if run != self.name:
            raise StaleRun("this message belongs to another run", expected=self.name, actual=run)
        trainer = self.trainers.get(rank)
        if trainer is None or trainer.incarnation != incarnation:
            raise StaleTrainer(
                f"trainer {rank} incarnation {incarnation} is not a member",
                current=trainer.incarnation if trainer else None,
            )
        return trainer

    def declare(self, rank: Rank, message: DeclareModel) -> None:
        """Take a trainer's model; raises UnsupportedOptimizer, BadModel, or ModelMismatch with the difference."""
        trainer = self.member(rank, message.run, message.incarnation)
        self._make_plan(message, num_pservers=1)  # refuses what cannot be planned, before anybody waits for it
        if self.plan is not None and message != trainer.declaration:
            raise ModelMismatch(f"trainer {rank} declares another model than the run was planned for")
        for other in self.trainers.values():
            if other.declaration is not None and other.rank != rank and other.is_here:
                _check_same_model(rank, message, other.rank, other.declaration)
        trainer.declaration = message
        if trainer.state == "joined":
            trainer.state = "declared"

    def start(self, num_pservers: int) -> SlicePlan:
        """Make the plan of a complete run; training begins once every pserver has installed it."""
        self.uploader = min(self.members)
        declaration = self.trainers[self.uploader].declaration
        assert declaration is not None
        self.plan = self._make_plan(declaration, num_pservers)
        return self.plan

    def installed(self, now: float) -> None:
        """Every pserver has the run."""
        if self.state == "gathering":
            self.state, self.started_at = "training", now

    def heartbeat(self, rank: Rank, message: TrainerHeartbeat, now: float) -> None:
        """Renew a lease and take over progress and results."""
        trainer = self.member(rank, message.run, message.incarnation)
        trainer.seen_at = now
        trainer.round = message.round
        trainer.results = dict(message.results)

    def leave(self, rank: Rank, message: Leave, now: float) -> None:
        """A trainer goes. One that is done is not waited for any more; one that failed ends the run."""
        trainer = self.member(rank, message.run, message.incarnation)
        if not trainer.is_here:
            return
        trainer.round = message.round
        trainer.state = message.outcome
        if self.state == "gathering" and self.plan is None:
            del self.trainers[rank]  # the run has not begun: its place is free again
        elif message.outcome == "failed":
            reason = message.reason or "no reason was given"
            self.fail(TrainerLost(f"trainer {rank} failed: {reason}", ranks=[rank]), now)
        elif not self.members and not self.is_over:
            self.state, self.ended_at = "finished", now
        self.number += 1

    def expire(self, now: float, lease_seconds: float) -> None:
        """Trainers whose lease has run out are lost; before the start their place is free again."""
        for trainer in list(self.trainers.values()):
            age = now - trainer.seen_at
            if not trainer.is_here or age <= lease_seconds:
                continue
            trainer.state = "lost"
            self.number += 1
            if self.state == "gathering" and self.plan is None:
                del self.trainers[trainer.rank]
            else:
                self.fail(
                    TrainerLost(
                        f"trainer {trainer.rank} was lost: no heartbeat for {age:.1f} s (lease {lease_seconds:g} s)",
                        ranks=[trainer.rank],
                    ),
                    now,
                )

        self._expire_declarations(now)

    def _expire_declarations(self, now: float) -> None:
        """Those who have joined, and live, must say what they train once somebody waits for them."""
        declared = any(trainer.state == "declared" for trainer in self.trainers.values())
        all_joined = len(self.members) == self.defaults.num_trainers
        if self.state != "gathering" or not (declared and all_joined and self.missing_ranks):
            self._complete_since = None
        elif self._complete_since is None:
            self._complete_since = now
        elif now - self._complete_since > self.defaults.round_timeout_seconds:
            names = ", ".join(f"trainer {rank}" for rank in self.missing_ranks)
            limit = self.defaults.round_timeout_seconds
            text = f"{names} joined, but did not declare a model within the round time-out of {limit:g} s"
            self.fail(RoundTimeout(text, missing=self.missing_ranks), now)

    def fail(self, failure: GradpostError, now: float) -> None:
        """End the run; the first failure stands."""
        if not self.is_over:
            self.state, self.failure, self.ended_at = "failed", failure, now
            self.number += 1

    # ------------------------------------------------------------------ plan

    def _make_plan(self, model: DeclareModel, num_pservers: int) -> SlicePlan:
        defaults = self.defaults
        return make_plan(
            [ParameterSpec(*fields) for fields in model.parameters],
            num_pservers,
            min_block_size=model.min_block_size or defaults.min_block_size,
            placement=model.placement or defaults.placement,
            slice_parameters=defaults.slice_parameters if model.slice_parameters is None else model.slice_parameters,
            buffers=model.buffers,
            optimizer=check_optimizer(model.optimizer, model.group_flags),
        )


def _check_same_model(rank: Rank, mine: DeclareModel, other_rank: Rank, theirs: DeclareModel) -> None:
    for name in DeclareModel.model_fields:
        if name in ("run", "incarnation", "parameters", "buffers"):
            continue
        if getattr(mine, name) != getattr(theirs, name):
            raise ModelMismatch(
                f"trainer {rank} and trainer {other_rank} disagree on {name}",
                expected=getattr(theirs, name),
                actual=getattr(mine, name),
            )
    for name, a, b in (("parameters", mine.parameters, theirs.parameters), ("buffers", mine.buffers, theirs.buffers)):
        if len(a) != len(b):
            raise ModelMismatch(
                f"trainer {rank} and trainer {other_rank} have different numbers of {name}",
                expected=len(b),
                actual=len(a),
            )
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            if x != y:
                raise ModelMismatch(
                    f"trainer {rank} and trainer {other_rank} differ in {name[:-1]} {i}",
                    expected=list(y),
                    actual=list(x),
                )
