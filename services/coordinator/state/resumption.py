"""The resumption of a recorded run with new processes, and its end if processes from before the restart still live."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from services.runtime.checkpoints import Manifest
from services.runtime.logs import get_logger

from .record import ClusterRecord, RunRecord, restore_cluster

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
