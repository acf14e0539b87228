"""The file of the durable state, written at every decision, and the state that a coordinator starts with.

It starts with the recorded run, with that run resumed with new processes, or with a checkpoint.

All functions block, and raise OSError or StorageFailed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ps_protocol.errors import StorageFailed
from ps_protocol.membership import Controls
from services.runtime.checkpoints import (
    COORDINATOR_FOLDER,
    Manifest,
    all_checkpoints,
    complete_checkpoints,
    read_manifest,
)
from services.runtime.logs import get_logger
from services.runtime.storage import CheckpointStorage, lock_folder, seal, unseal, write_file

from .settings import CoordinatorSettings
from .state.cluster import Cluster
from .state.model import plan_model
from .state.record import ClusterRecord, RunRecord

log = get_logger()

FILE = "coordinator.json"


class RecordFile:
    """The file on the disk, and the lock of its folder. All methods block, and raise OSError."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._lock_path = folder / COORDINATOR_FOLDER  # by which pservers recognise a shared state folder
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
        cluster.restore(record, now())
        run, beginning = cluster.run, record.beginning
        if beginning is not None:
            manifest = read_manifest(place, beginning.run, beginning.round)
            if manifest is None:
                text = f"the checkpoint of round {beginning.round} of run {beginning.run} no longer exists"
                raise StorageFailed(text)
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
        cluster.restore_incarnations(record)
    run = None if record is None else record.run
    if record is not None and run is not None and run.state == "gathering" and run.plan is None:
        cluster.restore(record, now())
    elif record is not None and run is not None and _is_on_disks(run, settings):
        alternative = None
        if run.state == "failed":
            with suppress(StorageFailed):
                alternative = _find_beginning(record, place)
        cluster.restore(record, now(), resume=True, alternative=alternative)
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
    return (record.beginning and record.beginning.controls) or manifest.controls
