"""The part of a pserver's API that looks into its shard. People ask the coordinator, which asks the pservers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, TypeAlias

from fastapi import FastAPI, Query, Response

from ps_protocol import routes
from ps_protocol.fields import MAX_TENSORS, Name, OrdinalText
from ps_protocol.frames import CONTENT_TYPE
from services.runtime.compute import ComputeExecutor
from services.runtime.large_replies import LargeReplies, LargeReply
from services.runtime.statistics import Statistics

from .copies import Copies
from .inspection import describe_blocks, read_blocks, read_shard, read_slots
from .pserver import Pserver

MAX_WAIT_SECONDS = 30.0
BINARY: dict[int | str, dict[str, Any]] = {
    200: {"content": {CONTENT_TYPE: {"schema": {"type": "string", "format": "binary"}}}}
}

Names: TypeAlias = Annotated[list[Name], Query(max_length=MAX_TENSORS, description="of blocks")]
AtRound: TypeAlias = Annotated[
    OrdinalText | None, Query(alias="round", description="that is not over; else the newest")
]
Seconds: TypeAlias = Annotated[float, Query(ge=0, le=MAX_WAIT_SECONDS, description="to wait for the round")]


def add_inspection_routes(app: FastAPI, pserver: Pserver, large: LargeReplies) -> None:
    """Add them; large replies share the places of `large`."""
    thread, copies = ComputeExecutor(), Copies()

    @app.get(routes.BLOCKS, tags=["inspection"], response_class=Response, responses=BINARY)
    async def blocks(name: Names, at: AtRound = None, wait_seconds: Seconds = 0.0) -> Response:
        """Blocks, all of one version, which stands in the metadata."""
        return LargeReply(large, lambda: read_blocks(pserver.run, name, at, wait_seconds), CONTENT_TYPE)

    @app.get(routes.SLOTS, tags=["inspection"], response_class=Response, responses=BINARY)
    async def slots(name: Names, at: AtRound = None, wait_seconds: Seconds = 0.0) -> Response:
        """The optimizer's slots of these blocks, `{slot}/{block}` each, and in the metadata the steps of each."""
        return LargeReply(large, lambda: read_slots(pserver.run, name, at, wait_seconds), CONTENT_TYPE)

    @app.get(routes.SHARD, tags=["inspection"], response_class=Response, responses=BINARY)
    async def shard(at: AtRound = None, wait_seconds: Seconds = 0.0) -> Response:
        """All blocks and buffers that live here, of one version."""
        return LargeReply(large, lambda: read_shard(pserver.run, at, wait_seconds), CONTENT_TYPE)

    @app.get(routes.BLOCK_STATISTICS, tags=["inspection"])
    async def statistics(name: Names, wait_seconds: Seconds = 0.0) -> Sequence[Statistics]:
        """Statistics of each of these blocks, if there is one in that time after its next update."""
        return await describe_blocks(pserver.run, name, thread, copies, wait_seconds)
