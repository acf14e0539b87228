"""The coordinator's durable state as frozen values, and its file, written at every decision and read once at the start.

It does not contain what members report with every heartbeat, except the rounds of trainers that are done.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field, PlainSerializer, PlainValidator, TypeAdapter, model_validator

from ps_protocol.errors import GradpostError, error_from_problem
from ps_protocol.fields import Message
from ps_protocol.membership import Controls, Membership
from ps_protocol.messages import DeclareModel, PserverInfo, RunState
from ps_protocol.plan import SlicePlan
from ps_protocol.vocabulary import Incarnation, PserverIndex, Rank, Round
from services.runtime.checkpoints import Manifest, is_undone, nest_membership
from services.runtime.storage import lock_folder, seal, unseal, write_file

if TYPE_CHECKING:
    from .cluster import Cluster

FILE = "coordinator.json"
EVICTED = "was evicted by an administrator"

MessageT = TypeVar("MessageT", bound=Message)

TrainerState = Literal["joined", "declared", "done", "failed", "lost"]


def _replace(value: MessageT, fields: Mapping[str, Any]) -> MessageT:
    """Return a value with other fields, which are checked: unlike `model_copy` it refuses an unknown name."""
    return type(value)(**{**dict(value), **fields})


class TrainerRecord(Message):
    """The newest incarnation of one rank."""

    rank: Rank
    incarnation: Incarnation
    instance: str
    metrics_address: str | None
    state: TrainerState = "joined"
    declared: bool = Field(default=False, description="whether the trainer has declared the model of the run")
    why: str = Field(default="", description="reason for which the trainer was lost or failed")
    is_awaited: bool = Field(
        default=False, description="whether the run waits for this rank, whichever process takes it"
    )
    is_resumed: bool = Field(
        default=False, description="whether the rank is awaited because the run was resumed, so that all begin together"
    )
    round: Round = Field(default=0, description="newest completed round of a trainer that is done")

    @property
    def is_present(self) -> bool:
        """True if the trainer holds its rank."""
        return self.state in ("joined", "declared")

    @property
    def was_evicted(self) -> bool:
        """True if an administrator evicted the trainer."""
        return self.state == "lost" and self.why.endswith(EVICTED)


def _read_trainers(trainers: Any) -> Any:
    """Return trainers by rank, which the file lists."""
    if isinstance(trainers, Mapping):
        return trainers
    return {trainer.rank: trainer for trainer in TypeAdapter(tuple[TrainerRecord, ...]).validate_python(trainers)}


Trainers = Annotated[
    dict[Rank, TrainerRecord],
    BeforeValidator(_read_trainers),
    PlainSerializer(lambda trainers: [trainer for _, trainer in sorted(trainers.items())]),
]
Failure = Annotated[
    GradpostError,
    PlainValidator(lambda given: given if isinstance(given, GradpostError) else error_from_problem(given)),
    PlainSerializer(lambda failure: failure.to_problem()),
]
Plan = Annotated[
    SlicePlan,
    PlainValidator(lambda given: given if isinstance(given, SlicePlan) else SlicePlan.from_json(given)),
    PlainSerializer(lambda plan: plan.as_json),
]


class RunRecord(Message):
    """The durable state of a run. A transition returns another record; `change` is for those that pservers receive."""

    name: str
    state: RunState = "gathering"
    num_trainers: int | None = Field(description="number of trainers; null until it is fixed")
    failure: Failure | None = None
    plan: Plan | None = None
    declaration: DeclareModel | None = Field(
        default=None, description="model that the plan is made for: the declaration of the lowest rank so far"
    )
    uploader: Rank = Field(
        default=0, description="trainer that pushes initial values: the lowest rank when the plan was made"
    )
    attempt: int = Field(default=0, description="number of rollbacks")
    membership: Membership = Field(default=Membership({}), description="newest decision that is in effect")
    resume: Round | None = Field(default=None, description="round that the attempt began with; null: initial values")
    began: dict[int, Round | None] = Field(default={}, description="round that each attempt since the first began with")
    source: str | None = Field(default=None, description="run whose checkpoint this run begins with")
    has_begun: bool = Field(default=True, description="whether every pserver has installed the run once")
    has_trained: bool = Field(
        default=True, description="whether a trainer has completed a round, so that initial values cannot replace it"
    )
    number: int = Field(default=0, description="number of the newest change that pservers must receive")
    trainers: Trainers = Field(default={})

    @model_validator(mode="before")
    @classmethod
    def _accept_earlier(cls, run: Any) -> Any:
        match run:
            case {"declaration": {"average_buffers": 0, **declaration}}:
                run = {**run, "declaration": declaration}
        match run:
            case {"attempt": int(attempt), "resume": resume} if attempt and not run.get("began"):
                run = {**run, "began": {attempt: resume}}
        return nest_membership(run)

    @property
    def members(self) -> dict[Rank, Incarnation]:
        """The incarnations of the trainers that hold their rank."""
        return {t.rank: t.incarnation for t in self.trainers.values() if t.is_present}

    @property
    def awaited(self) -> list[TrainerRecord]:
        """The lost trainers that the run waits for."""
        return [t for _, t in sorted(self.trainers.items()) if t.is_awaited and not t.is_present]

    @property
    def undeclared(self) -> list[TrainerRecord]:
        """The trainers that took an awaited rank and have not declared their model."""
        here = [t for _, t in sorted(self.trainers.items()) if t.is_awaited and t.state == "joined"]
        return [] if self.plan is None else here

    @property
    def num_declared(self) -> int:
        """The number of trainers that have declared their model and hold their rank."""
        return sum(trainer.state == "declared" for trainer in self.trainers.values())

    @property
    def targets(self) -> dict[Rank, Incarnation]:
        """The incarnations to install: of declared trainers, and the last one of each awaited rank."""
        targets = {}
        for rank, trainer in sorted(self.trainers.items()):
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

    def update(self, **fields: Any) -> RunRecord:
        """Return the run with other fields, without a change for the pservers."""
        return _replace(self, fields)

    def change(self, **fields: Any) -> RunRecord:
        """Return the run with other fields, as a change that every pserver must receive."""
        return _replace(self, {**fields, "number": self.number + 1})

    def with_trainers(self, ranks: Iterable[Rank], **fields: Any) -> RunRecord:
        """Return the run with other fields of these trainers, without a change for the pservers."""
        changed = {rank: _replace(self.trainers[rank], fields) for rank in ranks}
        return self.update(trainers={**self.trainers, **changed})

    def adopt(self, decision: Decision) -> RunRecord:
        """Return the run with a decision in effect."""
        fields = {name: getattr(decision, name) for name in ("attempt", "resume", "uploader", "membership")}
        if decision.attempt != self.attempt:
            fields |= {"source": None, "began": {**self.began, decision.attempt: decision.resume}}
        return self.update(**fields)

    def fail(self, failure: GradpostError) -> RunRecord:
        """Return the failed run, or the run itself if it is over: the first failure is kept."""
        return self if self.is_over else self.change(state="failed", failure=failure)


@dataclass(frozen=True, slots=True)
class Decision:
    """The attempt of a run, the round that it began with (None: initial values of `uploader`), and its membership."""

    attempt: int
    resume: Round | None
    uploader: Rank
    membership: Membership


class PserverRecord(Message):
    """One registered pserver."""

    info: PserverInfo
    instance: str
    restored: Round | None = Field(
        default=None, description="round that it had restored when it registered in the current attempt"
    )


class Beginning(Message):
    """The checkpoint that the next run begins with."""

    run: str
    round: Round
    controls: Controls | None = Field(default=None, description="current controls; null: the controls in the manifest")


class ClusterRecord(Message):
    """The content of the coordinator's state file."""

    trainer_incarnations: dict[Rank, Incarnation]
    pserver_incarnations: dict[PserverIndex, Incarnation]
    run_incarnations: dict[PserverIndex, Incarnation]
    pservers: tuple[PserverRecord, ...]
    beginning: Beginning | None = None
    run: RunRecord | None


def describe_cluster(cluster: Cluster) -> ClusterRecord:
    """Return the record of the cluster."""
    members = {**cluster.registry.lost, **cluster.registry.members}
    begins = cluster.beginning
    return ClusterRecord(
        trainer_incarnations=cluster.trainer_incarnations,
        pserver_incarnations=cluster.registry.incarnations,
        run_incarnations=cluster.run_incarnations,
        pservers=tuple(member.record for _, member in sorted(members.items())),
        beginning=begins and copy_fields(Beginning, begins),
        run=cluster.run.durable if cluster.run.record.trainers else None,
    )


def copy_fields(kind: type[MessageT], source: object, **changed: Any) -> MessageT:
    """Return a message with the attributes of the same names, except for those in `changed`."""
    same = {name: getattr(source, name) for name in kind.model_fields if name not in changed}
    return kind(**same, **changed)


def restore_incarnations(cluster: Cluster, record: ClusterRecord) -> None:
    """Restore the counters, so that every later process gets a higher incarnation."""
    cluster.trainer_incarnations.update(record.trainer_incarnations)
    cluster.registry.incarnations.update(record.pserver_incarnations)


def restore_cluster(cluster: Cluster, record: ClusterRecord, now: float) -> None:
    """Restore the cluster from its record. All leases begin now, and the last change is made again."""
    restore_incarnations(cluster, record)
    cluster.run_incarnations.update(record.run_incarnations)
    for pserver in record.pservers:
        cluster.registry.restore(pserver, now)
    if record.run is not None:
        cluster.run.restore(record.run, now)


class RecordFile:
    """The file on the disk, and the lock of its folder. All methods block, and raise OSError."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._lock_path = folder / "coordinator"
        self._lock: int | None = None
        self._written: ClusterRecord | None = None

    def lock(self) -> bool:
        """Return whether this process has locked the file. The lock lasts until `unlock` or its end."""
        self._lock = lock_folder(self._lock_path)
        return self._lock is not None

    def unlock(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def read(self) -> ClusterRecord | None:
        """Return the record that was written last; None if there is none. Raises DamagedFile, OSError."""
        if not self._path.exists():
            return None
        return unseal(self._path.read_bytes(), ClusterRecord, str(self._path))

    def write(self, record: ClusterRecord) -> None:
        """Write the record, unless it equals the one that was written last."""
        if record != self._written:
            self._written = None  # if this fails, it is unknown which of the two is there
            write_file(self._path, [seal(record)])
            self._written = record
