"""The state of the cluster in words, for waiting trainers, and as a whole, for readers. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from ps_config.versions import installed_versions
from ps_protocol.fields import Message
from ps_protocol.messages import ClusterStatus, PserverStatus, Software, TrainerStatus

from .record import TrainerRecord

if TYPE_CHECKING:
    from .cluster import Cluster
    from .run import Run, TrainerReport

MessageT = TypeVar("MessageT", bound=Message)


def copy_fields(kind: type[MessageT], source: object, **changed: Any) -> MessageT:
    """Return a message with the attributes of the same names, except for those in `changed`."""
    same = {name: getattr(source, name) for name in kind.model_fields if name not in changed}
    return kind(**same, **changed)


def list_prospects(cluster: Cluster, now: float) -> list[tuple[str, float]]:
    """Return each lost member that is awaited, in words, and the seconds until the run fails without it."""
    if cluster.run.record.state != "training":
        return []
    limit = cluster.run.settings.rejoin_timeout_seconds
    lost = [m for _, m in sorted(cluster.registry.lost.items())]
    gone = [(f"pserver {m.info.index} at {m.info.address} is silent", m.seen_at) for m in lost]
    reports = cluster.run.reports
    gone += [(trainer.why, reports[trainer.rank].gone_at) for trainer in cluster.run.record.awaited]
    patience = cluster.run.settings.round_timeout_seconds  # after which it counts as lost
    gone += [
        (f"trainer {trainer.rank} joined and has not declared its model", reports[trainer.rank].joined_at + patience)
        for trainer in cluster.run.record.undeclared
    ]
    return [(text, max(0.0, limit - (now - since))) for text, since in gone]


def describe_notice(cluster: Cluster) -> str:
    """Return the pause and the lost members in one line, which changes only when these change."""
    texts = [text for text, _ in list_prospects(cluster, 0.0)]
    limit = cluster.run.settings.rejoin_timeout_seconds
    lost = f"{'; '.join(texts)}: the run fails unless every lost member returns within {limit:g} s" if texts else ""
    return "; ".join(filter(None, (describe_pause(cluster.run), lost)))


def describe_pause(run: Run) -> str:
    """Return the notice for trainers that wait while the run is paused; empty if the run is not paused."""
    if run.record.state != "training" or not run.record.membership.newest_controls.is_paused:
        return ""
    return "an administrator has paused the run; it continues after POST /v1/controls/resume"


def describe_status(cluster: Cluster, now: float) -> ClusterStatus:
    """Return the state of the cluster."""
    run, record = cluster.run, cluster.run.record
    plan, prospects = record.plan, list_prospects(cluster, now)
    pservers = [member for _, member in sorted(cluster.registry.members.items())]
    return ClusterStatus(
        run=record.name,
        state=record.state,
        mode=run.settings.mode,
        num_pservers=cluster.registry.num_pservers,
        num_trainers=run.sizes[0],
        waiting_for=tuple(cluster.waiting_for),
        prospects=(
            *filter(None, [describe_pause(run)]),
            *(f"{what}; the run fails in {left:.0f} s unless this member returns" for what, left in prospects),
        ),
        failure=record.failure.to_problem() if record.failure else None,
        plan_digest=plan.digest if plan else None,
        num_parameters=len(plan.parameters) if plan else 0,
        parameter_bytes=plan.num_bytes if plan else 0,
        round=min(cluster.rounds, default=0),
        pservers=tuple(
            copy_fields(
                PserverStatus,
                member.heartbeat,
                index=member.info.index,
                address=member.info.address,
                http2=member.info.http2,
                incarnation=member.info.incarnation,
                heartbeat_age_seconds=now - member.seen_at,
            )
            for member in pservers
        ),
        trainers=tuple(
            _describe_trainer(trainer, run.reports[rank], now) for rank, trainer in sorted(record.trainers.items())
        ),
        software=Software(**installed_versions()),
    )


def _describe_trainer(trainer: TrainerRecord, report: TrainerReport, now: float) -> TrainerStatus:
    return copy_fields(
        TrainerStatus,
        report.heartbeat,
        rank=trainer.rank,
        state=trainer.state,
        incarnation=trainer.incarnation,
        metrics_address=trainer.metrics_address,
        heartbeat_age_seconds=now - report.seen_at,
        unreachable={index: seconds for index, (_, seconds) in report.heartbeat.unreachable.items()},
    )
