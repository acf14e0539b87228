"""The members that a run waits for, in words. Pure."""

from __future__ import annotations

from .pservers import PserverRegistry
from .run import Run


def list_waits(run: Run, registry: PserverRegistry) -> list[str]:
    """Return the members that the run waits for; none while the run trains and once it is over."""
    if run.record.is_over:
        return []
    absent = [f"pserver {index}" for index in range(registry.num_pservers) if index not in registry.members]
    waits = absent + run.waiting_for
    if waits or run.record.state == "training":
        return waits
    return ["the pservers to install the plan" if registry.num_pservers else "the coordinator's disk"]


def list_prospects(run: Run, registry: PserverRegistry, now: float) -> list[tuple[str, float]]:
    """Return each lost member that is awaited, in words, and the seconds until the run fails without it."""
    if run.record.state != "training":
        return []
    limit = run.settings.rejoin_timeout_seconds
    silent = [member for _, member in sorted(registry.lost.items())]
    prospects = [(f"pserver {m.info.index} at {m.info.address} is silent", m.seen_at) for m in silent]
    prospects += [(trainer.why, run.reports[trainer.rank].gone_at) for trainer in run.record.awaited]
    for trainer in run.record.undeclared:
        lost_at = run.reports[trainer.rank].joined_at + run.settings.round_timeout_seconds
        prospects.append((f"trainer {trainer.rank} joined and has not declared its model", lost_at))
    return [(text, max(0.0, limit - (now - since))) for text, since in prospects]


def describe_notice(run: Run, registry: PserverRegistry) -> str:
    """Return the pause and the lost members in one line, which changes only when these change."""
    texts = [text for text, _ in list_prospects(run, registry, 0.0)]
    limit = run.settings.rejoin_timeout_seconds
    lost = f"{'; '.join(texts)}: the run fails unless every lost member returns within {limit:g} s" if texts else ""
    return "; ".join(filter(None, (describe_pause(run), lost)))


def describe_pause(run: Run) -> str:
    """Return the notice for trainers that wait while the run is paused; empty if the run is not paused."""
    if run.record.state != "training" or not run.record.membership.newest_controls.is_paused:
        return ""
    return "an administrator has paused the run; it continues after POST /v1/controls/resume"
