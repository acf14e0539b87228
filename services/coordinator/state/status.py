"""The state of the cluster as a whole, for readers. Pure."""

from __future__ import annotations

from typing import Any, TypeVar

from ps_config.versions import installed_versions
from ps_protocol.fields import Message
from ps_protocol.messages import ClusterStatus, PserverStatus, Software, TrainerStatus

from .cluster import Cluster
from .record import TrainerRecord
from .run import TrainerReport
from .waits import describe_pause, list_prospects

MessageT = TypeVar("MessageT", bound=Message)


def copy_fields(kind: type[MessageT], source: object, **changed: Any) -> MessageT:
    """Return a message with the attributes of the same names, except for those in `changed`."""
    same = {name: getattr(source, name) for name in kind.model_fields if name not in changed}
    return kind(**same, **changed)


def describe_status(cluster: Cluster, now: float) -> ClusterStatus:
    """Return the state of the cluster."""
    run, record = cluster.run, cluster.run.record
    plan, prospects = record.plan, list_prospects(run, cluster.registry, now)
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
