"""The messages with which a pserver or a standby describes itself and its run: heartbeats, reports, and its state."""

from __future__ import annotations

import asyncio
from typing import Any

import xxhash

from ps_config.process_meter import measure_process
from ps_config.versions import installed_versions
from ps_protocol.errors import Ended
from ps_protocol.fields import Software
from ps_protocol.messages import PserverHeartbeat, PserverState
from ps_protocol.standbys import ReportStandby
from ps_protocol.vocabulary import PROTOCOL_VERSION

from .following.follower import Follower
from .pserver import Pserver
from .run.run import Run
from .shard.tensors import StagedBlock


def make_heartbeat(pserver: Pserver) -> PserverHeartbeat:
    """Return the message that the coordinator gets regularly."""
    run = pserver.shown
    described: dict[str, Any] = {"run": None, "round": 0} if run is None else _describe_run(run)
    if pserver.is_stopping:
        described["standbys"] = None  # it answers them no more, and lets one replace it
    return PserverHeartbeat(
        incarnation=pserver.incarnation or 0,
        is_stopping=pserver.is_stopping,
        software=Software(**installed_versions()),
        process=measure_process(
            sent_bytes=run.pulled_bytes if run else None, received_bytes=run.pushed_bytes if run else None
        ),
        **described,
    )


def _describe_run(run: Run) -> dict[str, Any]:
    missing, waiting_seconds = run.late
    return {
        "run": run.installed.run,
        "attempt": run.installed.attempt,
        "round": run.round,
        "missing": missing,
        "waiting_seconds": waiting_seconds,
        "failure": run.failure.to_problem() if isinstance(run.failure, Ended) else None,
        "published": run.writer.published,
        "coming_checkpoints": run.writer.find_pending(run.round),
        "is_stalled": asyncio.get_running_loop().time() > run.stalls_at,
        "standbys": run.standbys.describe() if run.standbys else None,
        "num_blocks": len(run.plan.shards[run.index]),
        "shard_bytes": run.shard_bytes,
        "pushed_bytes": run.pushed_bytes,
        "pulled_bytes": run.pulled_bytes,
        **run.describe_progress(),
        **run.metrics.describe(),
    }


def describe_standby(follower: Follower, address: str, *, is_stopping: bool = False) -> ReportStandby:
    """Return the report of a standby to the coordinator."""
    replica, lag = follower.replica, follower.lag
    return ReportStandby(
        protocol=PROTOCOL_VERSION,
        instance=follower.instance,
        address=address,
        is_stopping=is_stopping,
        lost=follower.lost,
        follows=follower.index,
        run=replica.installed.run if replica else None,
        attempt=replica.installed.attempt if replica else 0,
        round=replica.round if replica else 0,
        lag_rounds=lag.rounds,
        lag_seconds=lag.seconds(asyncio.get_running_loop().time()),
        software=Software(**installed_versions()),
        process=measure_process(),
    )


async def describe_state(pserver: Pserver, *, with_digest: bool) -> PserverState:
    """Return the state for inspection. The digest reads the whole shard."""
    run, follower = pserver.shown, pserver.follower
    return PserverState(
        **dict(make_heartbeat(pserver)),
        index=pserver.index if follower is None else follower.index,
        leader=follower.leader.leader if follower is not None and follower.leader else None,
        members=tuple(sorted(run.schedule.members)) if run else (),
        transports=tuple(sorted(run.transports)) if run else (),
        digest=await digest_run(run) if run and with_digest else None,
    )


async def digest_run(run: Run) -> str:
    """Return a digest of all that a request could change: values, optimizer state, barriers, contributions."""
    staged = xxhash.xxh3_128(repr((run.round, run.describe_progress())).encode())
    for round_, rank, contribution in run.schedule.staged():
        staged.update(repr((round_, rank, contribution.completion)).encode())
        for name, block in [*sorted(contribution.blocks.items()), *sorted(contribution.slots.items())]:
            staged.update(name.encode())
            for view in block.bytes() if isinstance(block, StagedBlock) else [repr(block).encode()]:
                staged.update(view)
    return f"{await run.compute.run(run.shard.digest)}-{staged.hexdigest()}"
