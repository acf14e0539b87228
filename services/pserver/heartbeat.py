"""Descriptions of a run for heartbeats and for readers of its state."""

from __future__ import annotations

import asyncio
from typing import Any

import xxhash

from ps_protocol.errors import Ended

from .run.run import Run
from .shard.tensors import StagedBlock


def describe_run(run: Run) -> dict[str, Any]:
    """Return the members of `PserverHeartbeat` that belong to this run."""
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
