"""How the cluster stands, as far as the coordinator knows without asking anybody."""

from __future__ import annotations

from ps_config.versions import installed_versions
from ps_protocol.messages import ClusterStatus, PserverStatus, Software, TrainerStatus

from ..coordinator import Coordinator


def describe_status(coordinator: Coordinator) -> ClusterStatus:
    """How the cluster stands now."""
    cluster, run, now = coordinator.cluster, coordinator.cluster.run, coordinator.now()
    plan = run.plan
    pservers = [member for _, member in sorted(cluster.registry.members.items())]
    return ClusterStatus(
        run=run.name,
        state=run.state,
        mode=run.mode,
        num_pservers=cluster.registry.num_pservers,
        num_trainers=run.sizes[0],
        waiting_for=tuple(cluster.waiting_for),
        prospects=(
            *filter(None, [cluster.pause]),
            *(f"{text}; the run fails in {left:.0f} s unless it comes back" for text, left in cluster.prospects(now)),
        ),
        failure=run.failure.to_problem() if run.failure else None,
        plan_digest=plan.digest if plan else None,
        num_parameters=len(plan.parameters) if plan else 0,
        parameter_bytes=plan.num_bytes if plan else 0,
        round=min(cluster.rounds, default=0),
        pservers=tuple(
            PserverStatus(
                index=member.info.index,
                address=member.info.address,
                http2=member.info.http2,
                incarnation=member.info.incarnation,
                round=member.round,
                missing=member.missing,
                waiting_seconds=member.waiting_seconds,
                heartbeat_age_seconds=now - member.seen_at,
                software=member.software,
            )
            for member in pservers
        ),
        trainers=tuple(
            TrainerStatus(
                rank=trainer.rank,
                incarnation=trainer.incarnation,
                round=trainer.round,
                state=trainer.state,
                heartbeat_age_seconds=now - trainer.seen_at,
                metrics_address=trainer.metrics_address,
                results=trainer.results,
                software=trainer.software,
                links=dict(trainer.links),
                unreachable=dict(trainer.unreachable),
                waiting_seconds=trainer.waiting_seconds,
                is_done=trainer.is_done,
            )
            for _, trainer in sorted(run.trainers.items())
        ),
        software=Software(**installed_versions()),
    )
