"""The state that a coordinator starts with: the recorded run, that run resumed with new processes, or a checkpoint.

All functions block, and raise OSError or StorageFailed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ps_protocol.errors import StorageFailed
from ps_protocol.membership import Controls
from services.runtime.checkpoints import Manifest, all_checkpoints, complete_checkpoints, read_manifest
from services.runtime.logs import get_logger
from services.runtime.storage import CheckpointStorage

from ..settings import CoordinatorSettings
from .model import plan_model
from .record import ClusterRecord, RunRecord, restore_cluster, restore_incarnations

if TYPE_CHECKING:
    from .cluster import Cluster

log = get_logger()


@dataclass(frozen=True, slots=True)
class Resumption:
    """The recorded state of a resumed run, in case processes of the recorded run still live.

    If such a process reports before `until`, when the leases end, the recorded state is restored. If the recorded run
    had failed, the run after it begins with the checkpoint `beginning`; None: with initial values.
    """

    saved: RunRecord
    until: float
    beginning: Manifest | None

    @property
    def was_over(self) -> bool:
        """True if the recorded run was over."""
        return self.saved.is_over

    @property
    def had_trainers(self) -> bool:
        """True if trainers of the recorded run may still live."""
        return bool(self.saved.members)


def restore_state(
    cluster: Cluster,
    record: ClusterRecord | None,
    settings: CoordinatorSettings,
    place: CheckpointStorage,
    now: Callable[[], float],
) -> None:
    """Restore the cluster from its record and, with the setting `resume`, resume its run or begin with a checkpoint.

    `now` is called when leases begin, since a checkpoint storage may take longer than a lease to list.
    """
    if settings.resume:
        _resume(cluster, record, settings, place, now)
    elif record is not None:
        restore_cluster(cluster, record, now())
        run, begins = cluster.run, record.beginning
        if begins is not None:
            manifest = read_manifest(place, begins.run, begins.round)
            if manifest is None:
                raise StorageFailed(f"the checkpoint of round {begins.round} of run {begins.run} no longer exists")
            cluster.beginning = manifest.model_copy(update={"controls": _find_controls(record, manifest)})
        if run.record.plan is not None:
            log.info("restored the run", run=run.record.name, state=run.record.state, attempt=run.record.attempt)


def _resume(
    cluster: Cluster,
    record: ClusterRecord | None,
    settings: CoordinatorSettings,
    place: CheckpointStorage,
    now: Callable[[], float],
) -> None:
    """Resume the recorded run with new processes: from the pservers' disks, or from a checkpoint.

    With another slice plan the disks are of no use, and the newest checkpoint is used. A run without a plan continues
    gathering.
    """
    if record is not None:
        restore_incarnations(cluster, record)
    run = None if record is None else record.run
    if record is not None and run is not None and run.state == "gathering" and run.plan is None:
        restore_cluster(cluster, record, now())
    elif record is not None and run is not None and _is_on_disks(run, settings):
        beginning = None
        if run.state == "failed":
            with suppress(StorageFailed):
                beginning = _find_beginning(record, place)
        resume_run(cluster, record, now(), beginning=beginning)
        log.info("resuming", run=run.name, attempt=run.attempt)
        return
    manifest = _find_beginning(record, place)
    if manifest is None:
        log.warning("no run and no checkpoint to resume; a new run begins", place=place.url)
        return
    cluster.beginning = manifest
    log.info("resuming from a checkpoint", run=manifest.run, round=manifest.round)
    controls = manifest.controls
    if controls.is_paused or controls.rates or controls.frozen:
        log.warning(
            "the controls of an administrator stay in effect",
            is_paused=controls.is_paused, rates=controls.rates, frozen=controls.frozen,
        )  # fmt: skip


def _is_on_disks(run: RunRecord, settings: CoordinatorSettings) -> bool:
    """Return whether the pservers' disks hold the run, or will, with the slice plan that the settings lead to."""
    if not (run.has_begun or run.state == "gathering") or run.plan is None or run.declaration is None:
        return False
    plan = plan_model(run.declaration, settings, settings.wanted_pservers)
    return plan.digest == run.plan.digest


def _find_beginning(record: ClusterRecord | None, place: CheckpointStorage) -> Manifest | None:
    """Return the newest checkpoint of the recorded run, or of the run that it began with.

    Checkpoints of other runs count only if the recorded run has not trained: the place may be shared with other
    experiments. Raises StorageFailed if the run has trained and has no checkpoint.
    """
    run = None if record is None else record.run
    names = [] if run is None else [run.name, run.source]
    if record is not None and record.beginning is not None:
        names.append(record.beginning.run)
    for name in names:
        for manifest in () if name is None else complete_checkpoints(place, name):
            if record is not None and not (run is not None and run.has_undone(manifest)):
                return manifest.model_copy(update={"controls": _find_controls(record, manifest)})
    if run is not None and run.has_trained:
        text = f"run {run.name} has no checkpoint in {place.url} that a run with other settings could begin with"
        raise StorageFailed(f"{text}; resume the run with its former settings and number of pservers")
    return next(iter(all_checkpoints(place)), None)


def _find_controls(record: ClusterRecord, manifest: Manifest) -> Controls:
    """Return the controls of a run that begins with this checkpoint."""
    if record.run is not None and record.run.membership.controls:
        return record.run.membership.newest_controls
    begins = record.beginning
    return manifest.controls if begins is None or begins.controls is None else begins.controls


def resume_run(cluster: Cluster, record: ClusterRecord, now: float, *, beginning: Manifest | None = None) -> None:
    """Resume the recorded run, even if it finished or failed. Its trainers must be started again.

    If processes of that run report, only the coordinator was restarted, and `undo_resumption` restores the run.
    """
    assert record.run is not None
    restore_cluster(cluster, record, now)
    run = cluster.run
    run.record, run.ended_at = await_trainers(run.record, is_async=run.settings.consistency.is_async), None
    run.reports = {rank: report for rank, report in run.reports.items() if rank in run.record.trainers}
    cluster.resumption = Resumption(record.run, now + cluster.lease_seconds, beginning)


def await_trainers(run: RunRecord, *, is_async: bool) -> RunRecord:
    """Return the run as it waits for all of its trainers, even those that were done."""
    ranks = [rank for rank in run.trainers if run.num_trainers is None or rank < run.num_trainers]
    members = dict(run.membership.members)
    # A trainer that was done is a member again, so that the first trainer to return does not continue alone.
    # In asynchronous modes its start follows from the pservers' state instead.
    if not is_async:
        members = {rank: run.trainers[rank].incarnation for rank in ranks} | members
    if run.state != "gathering":
        run = run.update(state="training", source=None)
    for rank in ranks:
        why = f"trainer {rank} must be started again"
        run = run.with_trainers([rank], state="lost", why=why, is_awaited=True, is_resumed=True, round=0)
    return run.update(
        failure=None,
        membership=replace(run.membership, members=members),
        trainers={rank: run.trainers[rank] for rank in ranks},
    )


def undo_resumption(cluster: Cluster, resumption: Resumption, now: float) -> None:
    """Restore the recorded run, because a process from before the restart has reported."""
    run, failure = cluster.run, cluster.run.record.failure
    run.restore(resumption.saved, now)
    if failure is not None:
        run.fail(failure, now)
    log.warning("not resumed: processes of the run before are still alive", run=run.record.name, state=run.record.state)
    if run.record.state != "failed":
        return
    cluster.beginning = resumption.beginning
    if cluster.beginning is not None:
        log.warning("the next run begins with a checkpoint of the failed run", round=cluster.beginning.round)
    else:
        advice = "to continue it, stop its pservers too and start all processes again"
        log.error(f"the failed run has no checkpoint, so the next run begins with initial values; {advice}")
