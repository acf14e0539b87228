"""HTTP API of a standby: the reads of a pserver's shard. Everything else is refused with the address of the leader."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from ps_protocol import routes
from ps_protocol.errors import Conflict, TryAgain
from ps_protocol.messages import PserverState
from services.runtime.app import add_raw_route, make_app
from services.runtime.large_replies import LargeReplies
from services.runtime.metrics import ServiceMetrics

from ..inspection import add_inspection_routes
from .follower import Follower
from .promotion import Promotion, add_promotion_routes

REFUSED = (
    *(("POST", path) for path in (routes.SEND, routes.INITIAL, routes.GET, routes.SLOTS, routes.NORM, routes.BARRIER)),
    *(("PUT", path) for path in (routes.RUN, routes.FREEZE, routes.MEMBERS, routes.WANT_CHECKPOINT)),
    *(("GET", path) for path in (routes.BUFFERS, routes.RESTORABLE, routes.RUN)),
    *(("GET", path) for path in (routes.UPDATES, routes.SHARD_COPY, routes.SHARD_DIGESTS)),
)


def make_follower_app(
    follower: Follower, promotion: Promotion, metrics: ServiceMetrics, lifespan: Any = None
) -> FastAPI:
    """Return the application, which runs on the event loop that serves it."""

    def find_missing() -> str | None:
        if follower.has_nothing_to_copy:
            return None
        if follower.replica is None:
            return f"a copy of the shard of pserver {follower.index}"
        # A rolling restart, which ends a pserver next, waits for a standby that may replace it.
        return f"pserver {follower.index} to have this standby in sync" if follower.is_joining else None

    app = make_app(title="Gradpost standby", role="standby", metrics=metrics, is_ready=find_missing, lifespan=lifespan)
    large = LargeReplies()

    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        if follower.is_fenced or follower.is_released:
            raise TryAgain(f"this standby may become pserver {follower.index}; send the request again")
        leader = follower.leader.leader if follower.leader else None
        text = f"this process follows pserver {follower.index}, and serves only reads; send the request to the leader"
        raise Conflict(text, code="not_leader", current=leader)

    for method, path in REFUSED:
        add_raw_route(app, path, refuse, methods=[method], summary="Refused with `not_leader`")

    @app.get(routes.STATE, tags=["inspection"])
    async def state(digest: bool = False) -> PserverState:
        """Return the run and the round of the replica; with `digest` also a digest of its shard."""
        async with large.slot() if digest else nullcontext():
            return await describe_state(follower, with_digest=digest)

    add_inspection_routes(app, follower, large)
    add_promotion_routes(app, promotion)
    return app


async def describe_state(follower: Follower, *, with_digest: bool) -> PserverState:
    """Return the state for inspection. The digest reads the whole shard."""
    replica, leader = follower.replica, follower.leader
    digest = None
    round_ = replica.round if replica else 0
    if with_digest and replica is not None:
        shard = replica.shard
        round_, digest = await replica.read_now(lambda _: (shard.version, shard.digest()))
    return PserverState(
        index=follower.index,
        incarnation=0,
        run=replica.installed.run if replica else None,
        round=round_,
        members=tuple(sorted(replica.installed.membership.members)) if replica else (),
        num_blocks=len(replica.shard.layout.places) if replica else 0,
        shard_bytes=replica.shard.values.nbytes if replica else 0,
        digest=digest,
        leader=leader.leader if leader else None,
    )
