"""The state of the cluster in words, for waiting trainers, and as a whole, for readers. Pure."""

from __future__ import annotations

from typing import Any, Literal

from ps_config.process_meter import installed_software
from ps_protocol.fields import ProcessFigures
from ps_protocol.membership import Controls
from ps_protocol.messages import ClusterStatus, PserverStatus, TrainerStatus
from ps_protocol.standbys import ReportStandby, StandbyStatus
from ps_protocol.vocabulary import PserverIndex, Round

from .pservers import PserverRegistry
from .replicas import Replicas
from .run import Run

STARTING_SECONDS = 15.0  # in which a process that starts is no loss yet


def list_waits(run: Run, registry: PserverRegistry) -> list[str]:
    """Return the members that the run waits for; none while the run trains and once it is over."""
    if run.record.is_over:
        return []
    absent = [f"pserver {index}" for index in range(registry.num_pservers) if index not in registry.members]
    waits = absent + run.waiting_for + [f"a standby of pserver {index}" for index in _list_stalled(run, registry)]
    if waits or run.record.state == "training":
        return waits
    return ["the pservers to install the plan" if registry.num_pservers else "the coordinator's disk"]


def list_prospects(run: Run, registry: PserverRegistry, now: float) -> list[tuple[str, float]]:
    """Return each lost member that is awaited, in words, and the seconds until the run fails without it.

    A member that has just begun to start is left out.
    """
    if run.record.state != "training":
        return []
    limit = run.settings.rejoin_timeout_seconds
    silent = [member for member in registry.known.values() if member.is_lost]
    prospects = [(f"pserver {m.info.index} at {m.info.address} is silent", m.seen_at) for m in silent]
    for trainer in run.record.awaited:
        gone_at = run.reports[trainer.rank].gone_at
        if not trainer.is_resumed or now - gone_at > STARTING_SECONDS:
            prospects.append((trainer.why, gone_at))
    for trainer in run.record.undeclared:
        joined_at = run.reports[trainer.rank].joined_at
        if now - joined_at > STARTING_SECONDS:
            text = f"trainer {trainer.rank} joined and has not declared its model"
            prospects.append((text, joined_at + run.settings.round_timeout_seconds))
    return [(text, max(0.0, limit - (now - since))) for text, since in prospects]


def _list_stalled(run: Run, registry: PserverRegistry) -> list[PserverIndex]:
    """Return the pservers that do not reach the last standby in sync, with replica_loss `wait`."""
    if run.record.state != "training" or run.settings.replica_loss != "wait":
        return []  # with `continue` such a standby is about to be removed
    missing = {index: registry.find_missing_standbys(index) for index in registry.members}
    return [index for index, lost in missing.items() if lost and lost == registry.replicas[index].in_sync]


def _describe_stalls(run: Run, registry: PserverRegistry) -> list[str]:
    """Return each pserver that waits for a standby, in words."""
    limit = run.settings.patience_seconds
    text = f"waits for a standby in sync (replica_loss wait); the run fails after {limit:g} s without one"
    return [f"pserver {index} {text}" for index in _list_stalled(run, registry)]


def describe_notice(run: Run, registry: PserverRegistry, now: float) -> str:
    """Return the pause and the lost members in one line, which changes only when these change."""
    texts = [text for text, _ in list_prospects(run, registry, now)]
    limit = run.settings.rejoin_timeout_seconds
    lost = f"{'; '.join(texts)}: the run fails unless every lost member returns within {limit:g} s" if texts else ""
    return "; ".join(filter(None, (describe_pause(run), lost, *_describe_stalls(run, registry))))


def describe_pause(run: Run) -> str:
    """Return the notice for trainers that wait while the run is paused; empty if the run is not paused."""
    if run.record.state != "training" or not run.record.membership.newest_controls.is_paused:
        return ""
    return "an administrator has paused the run; it continues after: gradpost resume"


def describe_overrides(controls: Controls) -> tuple[str, ...]:
    """Return the learning rates and frozen parameters that override the script's, in words.

    >>> describe_overrides(Controls(rates={0: 0.05}, frozen=("fc.bias",)))
    ('learning rate 0.05 for parameter group 0', 'parameter fc.bias is frozen')
    """
    rates = [f"learning rate {rate:g} for parameter group {group}" for group, rate in controls.rates.items()]
    return (*rates, *(f"parameter {name} is frozen" for name in controls.frozen))


def list_rounds(run: Run, registry: PserverRegistry) -> list[Round]:
    """Return the round of each pserver; with strategy ring the newest round of the trainers."""
    if run.settings.consistency.is_ring:
        return [run.highest_round]
    return [member.round for member in registry.members.values()]


def describe_leader(run: Run, registry: PserverRegistry, report: ReportStandby) -> dict[str, Any]:
    """Return the fields of the pserver that a standby follows, if it serves the current run."""
    leader = registry.known.get(report.follows)
    if leader is not None and leader.is_lost and leader.record.promoted_at:
        return {"incarnation": leader.info.incarnation}
    if leader is None or leader.is_lost or leader.attempt_id != run.record.attempt_id:
        return {}
    may_join = run.settings.is_replicated and run.record.state == "training"
    return {
        "leader": leader.info.address,
        "incarnation": leader.info.incarnation,
        "run": run.record.name,
        "attempt": run.record.attempt,
        "round": leader.round,
        "is_joining": may_join and report.instance not in registry.replicas[report.follows].in_sync,
    }


def describe_standbys(registry: PserverRegistry, now: float) -> tuple[StandbyStatus, ...]:
    """Return the standbys for readers, in order of the pservers that they follow."""
    ordered = sorted(registry.standbys.values(), key=lambda standby: (standby.report.follows, standby.report.address))
    return tuple(
        StandbyStatus(
            **dict(standby.report),
            heartbeat_age_seconds=now - standby.seen_at,
            role=_find_role(standby.report, registry.replicas.get(standby.report.follows)),
        )
        for standby in ordered
    )


def _find_role(report: ReportStandby, known: Replicas | None) -> Literal["following", "joining", "in_sync"]:
    if known is None or report.instance not in known.waits_for:
        return "following"
    return "in_sync" if report.instance in known.in_sync else "joining"


def describe_status(
    run: Run,
    registry: PserverRegistry,
    now: float,
    wall: float,
    process: ProcessFigures | None = None,
) -> ClusterStatus:
    """Return the state of the cluster. `wall` is the time since 1970 at `now`; `process` is the coordinator's own."""
    record, plan, prospects = run.record, run.record.plan, list_prospects(run, registry, now)
    return ClusterStatus(
        at=wall,
        run=record.name,
        attempt=record.attempt,
        state=record.state,
        mode=run.settings.mode,
        num_pservers=registry.num_pservers,
        num_trainers=run.settings.num_trainers,
        waiting_for=tuple(list_waits(run, registry)),
        is_paused=bool(describe_pause(run)),
        elapsed_seconds=None if run.started_at is None else (run.ended_at or now) - run.started_at,
        prospects=(
            *(f"{what}; the run fails in {left:.0f} s unless this member returns" for what, left in prospects),
            *_describe_stalls(run, registry),
        ),
        failure=record.failure.to_problem() if record.failure else None,
        plan_digest=plan.digest if plan else None,
        num_parameters=len(plan.parameters) if plan else 0,
        parameter_bytes=plan.num_bytes if plan else 0,
        round=min(list_rounds(run, registry), default=0),
        pservers=tuple(
            PserverStatus(
                index=member.info.index,
                address=member.info.address,
                http2=member.info.http2,
                heartbeat_age_seconds=now - member.seen_at,
                heartbeat=member.heartbeat,
            )
            for member in registry.members.values()
        ),
        trainers=tuple(
            TrainerStatus(
                rank=rank,
                state=trainer.state,
                metrics_address=trainer.metrics_address,
                heartbeat_age_seconds=now - run.reports[rank].seen_at,
                heartbeat=run.reports[rank].heartbeat,
            )
            for rank, trainer in record.trainers.items()
        ),
        standbys=describe_standbys(registry, now),
        overrides=describe_overrides(run.newest_controls),
        software=installed_software(),
        process=process,
    )
