"""Descriptions and reads of a pserver or a standby: heartbeats, its state, values and statistics of blocks, all of it.

People ask the coordinator, which asks the pservers.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import reduce
from typing import Annotated, Any, TypeAlias

import torch
import xxhash
from fastapi import FastAPI, Query, Response
from torch import Tensor

from ps_config.process_meter import installed_software, measure_process
from ps_protocol import routes
from ps_protocol.errors import Ended
from ps_protocol.fields import MAX_TENSORS, Name, OrdinalText
from ps_protocol.frames import CONTENT_TYPE
from ps_protocol.messages import PserverHeartbeat, PserverState
from ps_protocol.standbys import ReportStandby
from ps_protocol.vocabulary import PROTOCOL_VERSION, Round
from services.runtime.app import LargeReplies, LargeReply, Stream, stream_chunks
from services.runtime.compute import ComputeExecutor
from services.runtime.statistics import Statistics

from .following.follower import Follower
from .pserver import Pserver
from .run.run import Run
from .shard.bodies import StagedBlock

PIECE = 1 << 16  # elements, which stay in the cache
NONFINITE = 255  # the exponent bits of float32 for NaN and infinity
MAX_WAIT_SECONDS = 30.0
BINARY: dict[int | str, dict[str, Any]] = {
    200: {"content": {CONTENT_TYPE: {"schema": {"type": "string", "format": "binary"}}}}
}

Names: TypeAlias = Annotated[
    list[Name], Query(default_factory=list, max_length=MAX_TENSORS, description="names of blocks")
]
AtRound: TypeAlias = Annotated[
    OrdinalText | None, Query(alias="round", description="round to read, which is not over; default: the newest")
]
Seconds: TypeAlias = Annotated[float, Query(ge=0, le=MAX_WAIT_SECONDS, description="seconds to wait for the round")]


# ---------------------------------------------------------------------- heartbeats, reports and state


def make_heartbeat(pserver: Pserver) -> PserverHeartbeat:
    """Return the message that the coordinator gets regularly."""
    run = pserver.shown
    described: dict[str, Any] = {"run": None, "round": 0} if run is None else _describe_run(run)
    if pserver.is_stopping:
        described["standbys"] = None  # it answers them no more, and lets one replace it
    return PserverHeartbeat(
        incarnation=pserver.incarnation or 0,
        is_stopping=pserver.is_stopping,
        software=installed_software(),
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
        "is_log_long": run.storage.has_long_log(0.5),
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
        software=installed_software(),
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


# ---------------------------------------------------------------------- values and statistics


@asynccontextmanager
async def open_shard(run: Run, names: Sequence[str], round_: Round | None, seconds: float) -> AsyncIterator[Stream]:
    """Open a stream of these blocks or, without names, of all blocks and buffers in plan order, the blocks first.

    They are of one version: that of a round, if one is named, else the newest. In asynchronous modes all blocks contain
    the same contributions, which the metadata names. Raises StaleRound if the round is over, RoundPending if it is not
    reached within `seconds`.
    """
    _check(run, names)

    def read(metadata: Mapping[str, str]) -> list[bytes | memoryview]:
        return run.shard.encode(names or None, metadata, with_buffers=not names)

    yield stream_chunks(await run.read_after_round(round_, read, seconds))


async def describe_blocks(run: Run, names: Sequence[str], thread: ComputeExecutor) -> list[Statistics]:
    """Return statistics of each of these blocks.

    They are computed on a thread of their own, from copies, one block after another: updates wait for the copies only.
    """
    _check(run, names)
    return [await _describe_block(run, name, thread) for name in names]


async def _describe_block(run: Run, name: str, thread: ComputeExecutor) -> Statistics:
    version, values, num_touched = await run.read_now(
        lambda metadata: (
            int(metadata["round"]),
            run.shard.block(name).clone(),
            run.shard.changes.num_touched.get(name),
        )
    )
    found = await thread.run(describe_values, values, version)
    return found.model_copy(update={"num_touched": num_touched})


def _check(run: Run, names: Sequence[str]) -> None:
    run.check_readable()
    run.shard.layout.check_names(names)


def describe_values(values: Tensor, version: Round) -> Statistics:
    """Return statistics of a flat float32 tensor, which is only read, in pieces, so that little memory is needed.

    Takes about 7 ns for each element.
    """
    return reduce(Statistics.merge, (_describe_piece(piece, version) for piece in torch.split(values, PIECE)))


def _describe_piece(piece: Tensor, version: Round) -> Statistics:
    signs_and_exponents = (piece.view(torch.int32) >> 23).bitwise_and_(2 * NONFINITE + 1)
    counts = dict(enumerate(torch.bincount(signs_and_exponents, minlength=512).tolist()))
    counts[0] += counts.pop(256)
    num_odd, num_nan, finite = counts.pop(NONFINITE) + counts.pop(256 + NONFINITE), 0, piece
    if num_odd:
        num_nan, finite = int(torch.isnan(piece).sum()), piece[torch.isfinite(piece)]
    low, high = map(float, torch.aminmax(finite)) if len(finite) else (math.inf, -math.inf)
    wide = finite.double()
    return Statistics(
        version=version,
        num_elements=len(piece),
        num_nan=num_nan,
        num_infinite=num_odd - num_nan,
        num_zero=len(piece) - int(torch.count_nonzero(piece)),
        minimum=low,
        maximum=high,
        total=float(wide.sum()),
        squares=float(torch.dot(wide, wide)),
        counts={bits: count for bits, count in counts.items() if count},
    )


def add_inspection_routes(app: FastAPI, pserver: Pserver, large: LargeReplies) -> None:
    """Add the routes that read the shard. Large replies share the places of `large`."""
    thread = ComputeExecutor()

    @app.get(routes.SHARD, tags=["inspection"], response_class=Response, responses=BINARY)
    async def shard(name: Names, at: AtRound = None, wait_seconds: Seconds = 0.0) -> Response:
        """Return blocks or, without names, all blocks and buffers of this shard, of one version."""
        return LargeReply(large, lambda: open_shard(pserver.require_shown(), name, at, wait_seconds), CONTENT_TYPE)

    @app.get(routes.BLOCK_STATISTICS, tags=["inspection"])
    async def statistics(name: Names) -> Sequence[Statistics]:
        """Return statistics of each of these blocks."""
        async with large.slot():
            return await describe_blocks(pserver.require_shown(), name, thread)
