"""Reads of a shard for people: values, slots and statistics of blocks, or all of it.

People ask the coordinator, which asks the pservers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeAlias

from fastapi import FastAPI, Query, Response

from ps_protocol import routes
from ps_protocol.fields import MAX_TENSORS, Name, OrdinalText
from ps_protocol.frames import CONTENT_TYPE
from ps_protocol.vocabulary import Round
from services.runtime.compute import ComputeExecutor
from services.runtime.large_replies import LargeReplies, LargeReply, stream_chunks
from services.runtime.statistics import Statistics

from .limits import Copies
from .pserver import Pserver
from .run.run import Run
from .shard.shard import MASTER_BYTES
from .statistics import describe_values


async def read_shard(run: Run, names: Sequence[str], round_: Round | None, seconds: float) -> list[bytes]:
    """Return a frame of these blocks or, without names, of all blocks and buffers in plan order, the blocks first.

    They are of one version: that of a round, if one is named, else the newest. In asynchronous modes all blocks contain
    the same contributions, which the metadata names. Raises StaleRound if the round is over, RoundPending if it is not
    reached within `seconds`.
    """
    _check(run, names)

    def read(metadata: Mapping[str, str]) -> list[bytes]:
        return run.shard.encode(names or None, metadata, with_buffers=not names)

    return await run.read_after_round(round_, read, seconds)


async def describe_blocks(
    run: Run, names: Sequence[str], thread: ComputeExecutor, copies: Copies, seconds: float
) -> list[Statistics]:
    """Return statistics of each of these blocks after its next update, or as it is if there is none within `seconds`.

    They are computed on a thread of their own, from copies: the updates wait for the copies only. Raises TryAgain.
    """
    _check(run, names)
    num_bytes = sum(run.shard.layout.place[name].block.num_elements for name in names) * 2 * MASTER_BYTES
    async with copies.reserve(num_bytes):  # before an update and after it
        return list(await asyncio.gather(*(_describe_block(run, name, thread, seconds) for name in names)))


async def _describe_block(run: Run, name: str, thread: ComputeExecutor, seconds: float) -> Statistics:
    stepped = await run.shard.probes.wait_for_step(name, seconds) if seconds else None
    if stepped is not None:
        await run.wait_until_held()
        return await thread.run(describe_values, stepped.after, stepped.version, stepped.before)
    version, values = await run.read_now(lambda metadata: (int(metadata["round"]), run.shard.block(name).clone()))
    return await thread.run(describe_values, values, version)


def _check(run: Run, names: Sequence[str]) -> None:
    run.check_readable()
    run.shard.layout.check_names(names)


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


def add_inspection_routes(app: FastAPI, pserver: Pserver, large: LargeReplies) -> None:
    """Add the routes that read the shard. Large replies share the places of `large`."""
    thread, copies = ComputeExecutor(), Copies()

    @app.get(routes.SHARD, tags=["inspection"], response_class=Response, responses=BINARY)
    async def shard(name: Names, at: AtRound = None, wait_seconds: Seconds = 0.0) -> Response:
        """Return blocks or, without names, all blocks and buffers of this shard, of one version."""
        return LargeReply(
            large, lambda: stream_chunks(read_shard(pserver.require_shown(), name, at, wait_seconds)), CONTENT_TYPE
        )

    @app.get(routes.BLOCK_STATISTICS, tags=["inspection"])
    async def statistics(name: Names, wait_seconds: Seconds = 0.0) -> Sequence[Statistics]:
        """Return statistics of each of these blocks after its next update, or as it is if there is none in time."""
        return await describe_blocks(pserver.require_shown(), name, thread, copies, wait_seconds)
