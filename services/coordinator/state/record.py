"""The durable state as frozen values, which are what `coordinator.json` contains.

It does not contain what members report with every heartbeat, except the rounds of trainers that are done.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Field, PlainSerializer, PlainValidator

from ps_protocol.errors import GradpostError, error_from_problem
from ps_protocol.fields import ByOrdinal, Message
from ps_protocol.membership import Controls, Membership, Plan
from ps_protocol.messages import DeclareModel, PserverInfo, RunState
from ps_protocol.vocabulary import Incarnation, PserverIndex, Rank, Round
from services.runtime.checkpoints import Manifest, is_undone

from .replicas import Replicas

MessageT = TypeVar("MessageT", bound=Message)

TrainerState = Literal["joined", "declared", "done", "failed", "lost"]


def _replace(value: MessageT, fields: Mapping[str, Any]) -> MessageT:
    """Return a value with other fields, which are checked: unlike `model_copy` it refuses an unknown name."""
    return type(value)(**{**dict(value), **fields})


class TrainerRecord(Message):
    """The newest incarnation of one rank. See losses.py for its states."""

    rank: Rank
    incarnation: Incarnation
    instance: str
    metrics_address: str | None
    state: TrainerState = "joined"
    has_declared: bool = False  # a model, even if it was lost since
    why: str = ""  # the reason for which it was lost or failed
    was_evicted: bool = False  # lost because an administrator evicted it
    # The run waits for this rank, whichever process takes it; a process that took it leaves it so until installed.
    is_awaited: bool = False
    is_resumed: bool = False  # awaited since the run was resumed, so that all begin together
    round: Round = 0  # the newest completed round of a trainer that is done

    @property
    def is_present(self) -> bool:
        """True if the trainer holds its rank."""
        return self.state in ("joined", "declared")


Failure = Annotated[
    GradpostError,
    PlainValidator(lambda given: given if isinstance(given, GradpostError) else error_from_problem(given)),
    PlainSerializer(lambda failure: failure.to_problem()),
]


class RunRecord(Message):
    """The durable state of a run. Transitions return another record: `with_change` if pservers must receive it.

    A higher `change_number` makes the reconciler freeze all pservers, and install the newest membership on them.
    """

    name: str
    state: RunState = "gathering"
    failure: Failure | None = None
    plan: Plan | None = None
    declaration: DeclareModel | None = None  # of the lowest rank that has declared
    uploader: Rank = 0  # pushes the initial values: the lowest rank when the plan was made
    attempt: int = 0  # raised by each rollback
    membership: Membership = Membership({})  # the newest decision
    # The round that this attempt began with; None: initial values.
    base_round: Round | None = None
    began: dict[int, Round | None] = Field(default={})  # the round that each attempt since the first began with
    source: str | None = None  # the run whose checkpoint this one began with
    checkpoints: tuple[Round, ...] = ()  # the rounds of the complete ones, newest first
    has_begun: bool = False  # every pserver has installed the run once
    has_trained: bool = False  # a trainer has completed a round, so that initial values cannot replace it
    change_number: int = 0  # of the newest change that every pserver must receive
    trainers: Annotated[ByOrdinal[TrainerRecord], AfterValidator(lambda found: dict(sorted(found.items())))] = Field(
        default={}
    )

    @property
    def attempt_id(self) -> tuple[str, int]:
        """The run and its attempt, as pservers report them."""
        return self.name, self.attempt

    def find_process(self, instance: str) -> TrainerRecord | None:
        """Return the trainer of this process if it holds its rank."""
        return next((t for t in self.trainers.values() if t.instance == instance and t.is_present), None)

    @property
    def members(self) -> dict[Rank, Incarnation]:
        """The incarnations of the trainers that hold their rank."""
        return {t.rank: t.incarnation for t in self.trainers.values() if t.is_present}

    @property
    def awaited(self) -> list[TrainerRecord]:
        """The trainers that the run waits for and whose rank no process holds."""
        return [t for t in self.trainers.values() if t.is_awaited and not t.is_present]

    @property
    def undeclared(self) -> list[TrainerRecord]:
        """The trainers that took an awaited rank and have not declared their model."""
        return [t for t in self.trainers.values() if self.plan is not None and t.is_awaited and t.state == "joined"]

    @property
    def num_declared(self) -> int:
        """The number of trainers that have declared their model and hold their rank."""
        return sum(trainer.state == "declared" for trainer in self.trainers.values())

    @property
    def targets(self) -> dict[Rank, Incarnation]:
        """The incarnations to install: of declared trainers, and the last one of each awaited rank."""
        targets = {}
        for rank, trainer in self.trainers.items():
            if trainer.state == "declared":
                targets[rank] = trainer.incarnation
            elif trainer.is_awaited and rank in self.membership.members:
                targets[rank] = self.membership.members[rank]
        return targets

    @property
    def is_over(self) -> bool:
        """True if the run has finished or failed."""
        return self.state in ("finished", "failed")

    @property
    def is_deserted(self) -> bool:
        """True if the run is over and all trainers have left."""
        return self.is_over and not self.members

    def has_undone(self, manifest: Manifest) -> bool:
        """Return whether the run was rolled back behind this checkpoint, which may not be deleted yet."""
        return manifest.run == self.name and is_undone(manifest.round, manifest.attempt, self.began)

    def with_fields(self, **fields: Any) -> RunRecord:
        """Return the run with other fields, without a change for the pservers."""
        return _replace(self, fields)

    def with_change(self, **fields: Any) -> RunRecord:
        """Return the run with other fields, as a change that every pserver must receive."""
        return _replace(self, {**fields, "change_number": self.change_number + 1})

    def with_trainers(self, ranks: Iterable[Rank], **fields: Any) -> RunRecord:
        """Return the run with other fields of these trainers, without a change for the pservers."""
        changed = {rank: _replace(self.trainers[rank], fields) for rank in ranks}
        return self.with_fields(trainers={**self.trainers, **changed})

    def adopt(self, decision: Decision) -> RunRecord:
        """Return the run with a decision in effect."""
        fields = {name: getattr(decision, name) for name in ("attempt", "base_round", "uploader", "membership")}
        if decision.attempt != self.attempt:
            base = -1 if decision.base_round is None else decision.base_round
            kept = tuple(round_ for round_ in self.checkpoints if round_ <= base)
            began = {**self.began, decision.attempt: decision.base_round}
            fields |= {"source": None, "began": began, "checkpoints": kept}
        return self.with_fields(**fields)


@dataclass(frozen=True, slots=True)
class Decision:
    """The attempt of a run, the round that it began with (None: initial values of `uploader`), and its membership."""

    attempt: int
    base_round: Round | None
    uploader: Rank
    membership: Membership
    reason: str = field(default="", compare=False)
    controls: Controls | None = None  # the request of an administrator that the decision fulfils


class PserverRecord(Message):
    """One registered pserver."""

    info: PserverInfo
    instance: str
    restored: Round | None = None  # the round of the current attempt that the pserver had restored when it registered
    promoted_at: Incarnation = 0  # the newest incarnation that began as a standby; folders of earlier ones are old


class ClusterRecord(Message):
    """The content of the coordinator's state file."""

    trainer_incarnations: dict[Rank, Incarnation]
    pserver_incarnations: dict[PserverIndex, Incarnation]
    run_incarnations: dict[PserverIndex, Incarnation]
    pservers: tuple[PserverRecord, ...]
    replicas: dict[PserverIndex, Replicas]
    beginning: Manifest | None = None  # the checkpoint that the next run begins with
    run: RunRecord | None
