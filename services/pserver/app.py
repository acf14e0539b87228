"""HTTP API of a pserver: binary tensor endpoints, and control endpoints for the coordinator.

In a standby `Pserver` refuses all but the reads and the fail-over, with the address of the leader.
"""

from __future__ import annotations

from contextlib import nullcontext

from fastapi import FastAPI, Response

from ps_protocol import routes
from ps_protocol.fields import Identifier, OrdinalText
from ps_protocol.membership import (
    Freeze,
    FrozenRounds,
    InstallMembers,
    InstallRun,
    PserverRegistered,
    RegisterPserver,
    WantCheckpoint,
)
from ps_protocol.messages import PserverState
from ps_protocol.standbys import FenceStandby
from ps_protocol.vocabulary import Round
from services.runtime.app import add_raw_route, make_app
from services.runtime.large_replies import LargeReplies
from services.runtime.metrics import ServiceMetrics

from . import openapi
from .endpoints import TensorEndpoints
from .heartbeat import describe_state
from .inspection import add_inspection_routes
from .pserver import Pserver
from .replication import add_replication_routes


def make_pserver_app(pserver: Pserver, metrics: ServiceMetrics) -> FastAPI:
    """Return the application, which runs on the event loop that serves it."""
    app = make_app(
        title="Gradpost pserver", role="pserver", metrics=metrics,
        is_ready=lambda: pserver.missing,
    )  # fmt: skip
    tensors = TensorEndpoints(pserver)
    large = LargeReplies()
    for method, path, endpoint, summary, description in (
        ("POST", routes.SEND, tensors.push, "Push a bucket of gradient blocks", openapi.PUSH),
        ("POST", routes.INITIAL, tensors.initial, "Upload a bucket of initial values", openapi.PUSH),
        ("POST", routes.GET, tensors.pull, "Get one version of the shard", openapi.PULL),
        ("POST", routes.SLOTS, tensors.slots, "Get optimizer state", openapi.SLOTS),
        ("POST", routes.NORM, tensors.norm, "Get the norm of a round's gradient", openapi.NORM),
        ("POST", routes.BARRIER, tensors.barrier, "Count a batch or fetch barrier", openapi.BARRIER),
        ("GET", routes.BUFFERS, tensors.buffers, "Get this shard's buffers", openapi.BUFFERS),
    ):
        add_raw_route(app, path, endpoint, methods=[method], summary=summary, openapi_extra=description)

    @app.put(routes.RUN, tags=["control"], status_code=204, response_class=Response)
    async def install_run(message: InstallRun) -> None:
        """Start a run."""
        await pserver.install_run(message)

    @app.put(routes.FREEZE, tags=["control"])
    async def freeze(message: Freeze) -> FrozenRounds:
        """Begin a change of members: hold every barrier back, and return the progress of all trainers."""
        return await pserver.freeze(message)

    @app.get(routes.RESTORABLE, tags=["control"])
    async def restorable(
        run: Identifier, newest: OrdinalText | None = None, complete: bool = False
    ) -> list[tuple[Round, Round]]:
        """Return the ranges of rounds of a run to which this shard can go back, first and last.

        With `newest` this pserver has read the snapshot from which it would restore that round: in its folder, or if
        the checkpoint of that round is `complete`, in the shared storage.
        """
        return await pserver.find_restorable(run, newest, is_complete=complete)

    @app.put(routes.WANT_CHECKPOINT, tags=["control"], status_code=204, response_class=Response)
    async def want_checkpoint(message: WantCheckpoint) -> None:
        """Publish this shard's part of a checkpoint after a round."""
        await pserver.want_checkpoint(message)

    @app.put(routes.MEMBERS, tags=["control"], status_code=204, response_class=Response)
    async def install_members(message: InstallMembers) -> None:
        """Change the members of the run, or end it."""
        await pserver.install_members(message)

    @app.put(routes.FENCE_STANDBY, tags=["control"])
    async def fence_standby(message: FenceStandby) -> RegisterPserver:
        """Confirm and apply no update of an incarnation of the pserver, or an earlier one, from now on."""
        return await pserver.fence(message)

    @app.put(routes.PROMOTE_STANDBY, tags=["control"], status_code=204, response_class=Response)
    async def promote_standby(message: PserverRegistered) -> None:
        """Become the pserver, after a fence."""
        await pserver.promote(message)

    @app.get(routes.STATE, tags=["inspection"])
    async def state(digest: bool = False) -> PserverState:
        """Return the run, its barriers and counters; with `digest` also a digest of the whole state."""
        async with large.slot() if digest else nullcontext():
            return await describe_state(pserver, with_digest=digest)

    add_inspection_routes(app, pserver, large)
    add_replication_routes(app, pserver)
    return app
