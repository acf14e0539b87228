"""The coordinator's durable state: a small file, written at every decision and read once at the start.

It does not contain what members report with every heartbeat, except the rounds of trainers that are done.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import Field, model_validator

from ps_protocol.errors import error_from_problem
from ps_protocol.fields import Message
from ps_protocol.membership import Controls, Membership
from ps_protocol.messages import DeclareModel, PserverInfo, RunState
from ps_protocol.plan import SlicePlan
from ps_protocol.vocabulary import Incarnation, PserverIndex, Rank, Round
from services.runtime.checkpoints import Manifest, is_undone, nest_membership
from services.runtime.storage import lock_folder, seal, unseal, write_file

from .pservers import PserverMember
from .trainers import TrainerMember, TrainerState

if TYPE_CHECKING:
    from .cluster import Cluster
    from .run import Run

FILE = "coordinator.json"

MessageT = TypeVar("MessageT", bound=Message)


class TrainerRecord(Message):
    """The newest incarnation of one rank."""

    rank: Rank
    incarnation: Incarnation
    instance: str
    metrics_address: str | None
    state: TrainerState
    declared: bool
    why: str
    is_awaited: bool
    is_resumed: bool = False
    round: Round = Field(default=0, description="newest completed round of a trainer that is done")


class RunRecord(Message):
    """The run. While it gathers there is no plan, and a declaration once a trainer has made one."""

    name: str
    state: RunState
    num_trainers: int | None
    failure: dict[str, Any] | None
    plan: dict[str, Any] | None
    declaration: DeclareModel | None
    uploader: Rank
    attempt: int
    membership: Membership
    resume: Round | None
    began: dict[int, Round | None] = Field(default={}, description="round after which each attempt began")
    source: str | None
    has_begun: bool = True
    has_trained: bool = True
    number: int
    trainers: tuple[TrainerRecord, ...]

    @model_validator(mode="before")
    @classmethod
    def _accept_earlier(cls, run: Any) -> Any:
        match run:
            case {"declaration": {"average_buffers": 0, **declaration}}:
                run = {**run, "declaration": declaration}
        return nest_membership(run)

    def has_undone(self, manifest: Manifest) -> bool:
        """Return whether the run was rolled back behind this checkpoint, which may not be deleted yet."""
        return manifest.run == self.name and is_undone(manifest.round, manifest.attempt, self.began)


class PserverRecord(Message):
    """One living pserver."""

    info: PserverInfo
    instance: str
    restored: Round | None = None


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
        pservers=tuple(copy_fields(PserverRecord, member) for _, member in sorted(members.items())),
        beginning=begins and copy_fields(Beginning, begins),
        run=_describe_run(cluster.run) if cluster.run.trainers else None,
    )


def _describe_run(run: Run) -> RunRecord:
    decision = run.decision
    # The lowest rank declares the rendezvous.
    declared = (t.declaration for _, t in sorted(run.trainers.items()) if t.declaration is not None)
    return copy_fields(
        RunRecord,
        run,
        failure=run.failure.to_problem() if run.failure else None,
        plan=None if run.plan is None else run.plan.as_json,
        declaration=run.declaration or next(declared, None),
        uploader=decision.uploader,
        attempt=decision.attempt,
        resume=decision.resume,
        began={**run.began, decision.attempt: decision.resume} if decision.attempt else {},
        membership=decision.membership,
        trainers=tuple(
            copy_fields(TrainerRecord, t, declared=t.declaration is not None, round=t.round if t.state == "done" else 0)
            for _, t in sorted(run.trainers.items())
        ),
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
        if pserver.info.index < cluster.registry.num_pservers:
            cluster.registry.members[pserver.info.index] = PserverMember(
                pserver.info, pserver.instance, now, restored=pserver.restored, here_since=now, is_restored=True
            )
    if record.run is not None:
        _restore_run(cluster.run, record.run, now)


def _restore_run(run: Run, record: RunRecord, now: float) -> None:
    run.name, run.state = record.name, record.state
    if record.num_trainers is not None:  # of a run that continues with other settings it is as near as they allow
        fewest, most = run.sizes
        run.num_trainers = min(max(record.num_trainers, fewest), most)
    run.failure = None if record.failure is None else error_from_problem(record.failure)
    if record.plan is not None:
        run.plan, run.declaration, run.uploader = SlicePlan.from_json(record.plan), record.declaration, record.uploader
        run.started_at = now
    for name in ("attempt", "resume", "source", "has_begun", "has_trained", "membership"):
        setattr(run, name, getattr(record, name))
    run.number = record.number + 1
    run.began = dict(record.began) or ({record.attempt: record.resume} if record.attempt else {})
    run.ended_at = now if run.is_over else None
    for trainer in record.trainers:
        run.trainers[trainer.rank] = restore_trainer(trainer, record, now)


def restore_trainer(t: TrainerRecord, record: RunRecord, now: float) -> TrainerMember:
    """Return a recorded trainer, whose lease begins now.

    Declarations of one run differ in the incarnation and the rendezvous alone.
    """
    declaration = None
    if record.declaration is not None and t.declared:
        own = record.declaration.rendezvous if t.rank == 0 else None
        declaration = record.declaration.model_copy(update={"incarnation": t.incarnation, "rendezvous": own})
    same = t.model_dump(exclude={"declared"})
    return TrainerMember(**same, seen_at=now, joined_at=now, gone_at=now, declaration=declaration)


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
