"""The coordinator's durable state: a small file, written at every decision and read once at the start.

It does not contain what members report with every heartbeat, except the rounds of trainers that are done.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import Field

from ps_protocol.errors import error_from_problem
from ps_protocol.fields import Message
from ps_protocol.membership import Controls, MembershipMessage
from ps_protocol.messages import DeclareModel, PserverInfo, RunState
from ps_protocol.plan import SlicePlan
from ps_protocol.vocabulary import Incarnation, PserverIndex, Rank, Round
from services.runtime.checkpoints import Manifest, is_undone
from services.runtime.logs import get_logger
from services.runtime.storage import lock_folder, seal, unseal, write_file

from .cluster import Cluster, Resumption
from .pservers import PserverMember
from .trainers import TrainerMember, TrainerState

log = get_logger()

FILE = "coordinator.json"


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
    round: Round = Field(default=0, description="of a trainer that is done: the newest round that it has completed")


class RunRecord(MembershipMessage):
    """The run. While it gathers there is no plan, and a declaration once a trainer has made one."""

    name: str
    state: RunState
    num_trainers: int | None
    failure: dict[str, Any] | None
    plan: dict[str, Any] | None
    declaration: DeclareModel | None
    uploader: Rank
    attempt: int
    resume: Round | None
    began: dict[int, Round | None] = Field(default={}, description="the round after which each attempt has begun")
    source: str | None
    has_begun: bool = True
    has_trained: bool = True
    number: int
    trainers: tuple[TrainerRecord, ...]

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
    controls: Controls | None = Field(default=None, description="current controls; null: those of its manifest")


class ClusterRecord(Message):
    """The whole file."""

    trainer_incarnations: dict[Rank, Incarnation]
    pserver_incarnations: dict[PserverIndex, Incarnation]
    run_incarnations: dict[PserverIndex, Incarnation]
    pservers: tuple[PserverRecord, ...]
    beginning: Beginning | None = None
    run: RunRecord | None


def describe_cluster(cluster: Cluster) -> ClusterRecord:
    """Return the record of the cluster."""
    members = {**cluster.registry.lost, **cluster.registry.members}
    return ClusterRecord(
        trainer_incarnations=cluster.trainer_incarnations,
        pserver_incarnations=cluster.registry.incarnations,
        run_incarnations=cluster.run_incarnations,
        pservers=tuple(
            PserverRecord(info=m.info, instance=m.instance, restored=m.restored) for _, m in sorted(members.items())
        ),
        beginning=None if (found := cluster.beginning) is None else _describe_beginning(found),
        run=_describe_run(cluster),
    )


def _describe_beginning(manifest: Manifest) -> Beginning:
    return Beginning(run=manifest.run, round=manifest.round, controls=manifest.controls)


def find_controls(record: ClusterRecord, manifest: Manifest) -> Controls:
    """Return the controls of a run that begins with this checkpoint."""
    if record.run is not None and record.run.membership.controls:
        return record.run.membership.newest_controls
    begins = record.beginning
    return manifest.controls if begins is None or begins.controls is None else begins.controls


def _describe_run(cluster: Cluster) -> RunRecord | None:
    run = cluster.run
    if not run.trainers:
        return None
    decision = run.decision
    # The lowest rank declares the rendezvous.
    declared = (t.declaration for _, t in sorted(run.trainers.items()) if t.declaration is not None)
    return RunRecord(
        name=run.name,
        state=run.state,
        num_trainers=run.num_trainers,
        failure=run.failure.to_problem() if run.failure else None,
        plan=None if run.plan is None else run.plan.as_json,
        declaration=run.declaration or next(declared, None),
        uploader=decision.uploader,
        attempt=decision.attempt,
        resume=decision.resume,
        began={**run.began, decision.attempt: decision.resume} if decision.attempt else {},
        source=run.source,
        has_begun=run.has_begun,
        has_trained=run.has_trained,
        number=run.number,
        **decision.membership.to_fields(),
        trainers=tuple(
            TrainerRecord(
                rank=t.rank,
                incarnation=t.incarnation,
                instance=t.instance,
                metrics_address=t.metrics_address,
                state=t.state,
                declared=t.declaration is not None,
                why=t.why,
                is_awaited=t.is_awaited,
                is_resumed=t.is_resumed,
                round=t.round if t.state == "done" else 0,
            )
            for _, t in sorted(run.trainers.items())
        ),
    )


def restore_incarnations(cluster: Cluster, record: ClusterRecord) -> None:
    """Restore the counters, so that every later process gets a higher incarnation."""
    cluster.trainer_incarnations.update(record.trainer_incarnations)
    cluster.registry.incarnations.update(record.pserver_incarnations)


def resume_run(cluster: Cluster, record: ClusterRecord, now: float, *, beginning: Manifest | None = None) -> None:
    """Resume the recorded run, whatever its end was. Its trainers must be started again.

    If processes of that run report, only the coordinator was restarted, and the recorded state is restored. If that
    run had failed, `beginning` is the checkpoint that the next run begins with.
    """
    assert record.run is not None
    saved = record.run
    restore_cluster(cluster, record, now)
    run = cluster.run
    if run.state != "gathering":
        run.state, run.source = "training", None
    run.failure, run.ended_at = None, None
    members = dict(run.membership.members)
    for rank, trainer in list(run.trainers.items()):
        if run.num_trainers is None or rank < run.num_trainers:
            trainer.lose("lost", f"trainer {rank} must be started again", now, is_awaited=True)
            trainer.is_resumed = True
            # A trainer that was done is a member again, so that the first trainer to return does not continue alone.
            # In asynchronous modes its start follows from the pservers' state instead.
            if not run.settings.consistency.is_async:
                members.setdefault(rank, trainer.incarnation)
        else:
            del run.trainers[rank]
    run.membership = replace(run.membership, members=members)

    def undo(now: float) -> None:
        members = dict(run.membership.members)
        for recorded in saved.trainers:
            if recorded.rank in run.trainers and run.trainers[recorded.rank].is_resumed:
                run.trainers[recorded.rank] = _restore_trainer(recorded, saved, now)
                if recorded.rank not in saved.membership.members:
                    members.pop(recorded.rank, None)
        run.membership = replace(run.membership, members=members)
        if was_over:
            run.state, run.ended_at = saved.state, now
            run.failure = None if saved.failure is None else error_from_problem(saved.failure)
        run.number += 1
        log.warning("not resumed: processes of the run before are still alive", run=run.name, state=run.state)
        if run.state != "failed":
            return
        cluster.beginning = beginning
        if beginning is not None:
            log.warning("the next run begins with a checkpoint of the failed run", round=beginning.round)
        else:
            advice = "to continue it, stop its pservers too and start all processes again"
            log.error(f"the failed run has no checkpoint, so the next run begins with initial values; {advice}")

    was_over = saved.state in ("finished", "failed")
    had_trainers = any(trainer.state in ("joined", "declared") for trainer in saved.trainers)
    cluster.resumption = Resumption(was_over, had_trainers, now + cluster.lease_seconds, undo)


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
        _restore_run(cluster, record.run, now)


def _restore_run(cluster: Cluster, record: RunRecord, now: float) -> None:
    run = cluster.run
    run.name, run.state = record.name, record.state
    if record.num_trainers is not None:  # of a run that goes on with other settings it is as near as they allow
        fewest, most = run.sizes
        run.num_trainers = min(max(record.num_trainers, fewest), most)
    run.failure = None if record.failure is None else error_from_problem(record.failure)
    if record.plan is not None:
        run.plan, run.declaration, run.uploader = SlicePlan.from_json(record.plan), record.declaration, record.uploader
        run.started_at = now
    run.attempt, run.resume, run.source, run.number = record.attempt, record.resume, record.source, record.number + 1
    run.began = dict(record.began) or ({record.attempt: record.resume} if record.attempt else {})
    run.has_begun, run.has_trained = record.has_begun, record.has_trained
    run.membership = record.membership
    run.ended_at = now if run.is_over else None
    for trainer in record.trainers:
        run.trainers[trainer.rank] = _restore_trainer(trainer, record, now)


def _restore_trainer(t: TrainerRecord, record: RunRecord, now: float) -> TrainerMember:
    return TrainerMember(
        t.rank, t.incarnation, t.instance, now, t.metrics_address, t.state,
        declaration=_declaration_of(t, record), joined_at=now, round=t.round, gone_at=now, why=t.why,
        is_awaited=t.is_awaited, is_resumed=t.is_resumed,
    )  # fmt: skip


def _declaration_of(trainer: TrainerRecord, record: RunRecord) -> DeclareModel | None:
    """Return a trainer's declaration, which differs from the recorded one in the incarnation and rendezvous alone."""
    if record.declaration is None or not trainer.declared:
        return None
    own = record.declaration.rendezvous if trainer.rank == 0 else None
    return record.declaration.model_copy(update={"incarnation": trainer.incarnation, "rendezvous": own})


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
