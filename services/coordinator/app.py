"""HTTP API of the coordinator: ordinary path operations over `Coordinator`."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import FastAPI, Query, Request

from ps_protocol import routes
from ps_protocol.fields import Identifier, OrdinalText
from ps_protocol.messages import (
    CheckpointCreated,
    DeclareModel,
    JoinTrainer,
    Leave,
    PlanReady,
    PserverHeartbeat,
    PserverHeartbeatReply,
    PserverRegistered,
    RegisterPserver,
    RunSummary,
    TrainerHeartbeat,
    TrainerHeartbeatReply,
    TrainerJoined,
)
from services.runtime.app import make_app
from services.runtime.logs import get_logger
from services.runtime.metrics import ServiceMetrics
from services.runtime.security import KnownHosts
from services.runtime.settings import RequestLimits

from .administration import add_administration_routes
from .coordinator import Coordinator
from .dashboard.routes import add_dashboard_routes
from .inspection.routes import add_inspection_routes
from .metrics import TargetGroup, describe_targets, is_own_address

log = get_logger()

MAX_WAIT_SECONDS = 30.0
_LIMITS = RequestLimits()


def make_coordinator_app(
    coordinator: Coordinator, metrics: ServiceMetrics, lifespan: Any = None, *, limits: RequestLimits = _LIMITS
) -> FastAPI:
    """The application; `coordinator` must be running on the same event loop."""
    app = make_app(
        title="Gradpost coordinator",
        role="coordinator",
        metrics=metrics,
        is_ready=lambda: None,
        lifespan=lifespan,
        limits=limits,
    )
    cluster = coordinator.cluster

    @app.post(routes.REGISTER_PSERVER, tags=["membership"])
    async def register_pserver(request: RegisterPserver) -> PserverRegistered:
        """A pserver offers itself and learns its index and incarnation."""
        answer = cluster.register_pserver(request, coordinator.now())
        coordinator.changed()
        await coordinator.persist()  # no other process gets this incarnation, whatever happens here
        return answer

    @app.post(routes.PSERVER_HEARTBEAT, tags=["membership"])
    async def pserver_heartbeat(index: OrdinalText, message: PserverHeartbeat) -> PserverHeartbeatReply:
        """A pserver renews its lease and reports its progress."""
        reply = cluster.pserver_heartbeat(index, message, coordinator.now())
        coordinator.activity.record_pserver(cluster, index, message, coordinator.now())
        coordinator.changed()
        return reply

    @app.post(routes.JOIN_TRAINER, tags=["membership"])
    async def join_trainer(message: JoinTrainer, request: Request) -> TrainerJoined:
        """A trainer takes its place and learns its rank, incarnation and the mode."""
        client, server = (request.scope.get(end) or ("", 0) for end in ("client", "server"))
        address, hosts = message.metrics_address, getattr(app.state, "hosts", KnownHosts([]))
        if address is not None and not is_own_address(address, client[0], server[0], hosts):
            log.info(
                "a trainer's metrics are not listed for Prometheus, because they are at another host than the trainer; "
                "set its metrics_host, or add the host to allowed_hosts",
                metrics_address=address,
                client=client[0],
            )
            message = message.model_copy(update={"metrics_address": None})
        answer = cluster.join_trainer(message, coordinator.now())
        coordinator.changed()
        await coordinator.persist()
        return answer

    @app.post(routes.DECLARE_MODEL, tags=["membership"], status_code=204)
    async def declare_model(rank: OrdinalText, message: DeclareModel) -> None:
        """A trainer says what it will train; all must say the same."""
        cluster.run.declare(rank, message)
        coordinator.changed()
        await coordinator.persist()

    @app.get(routes.PLAN, tags=["membership"])
    async def wait_for_plan(
        rank: OrdinalText,
        run: Identifier,
        incarnation: OrdinalText,
        wait_seconds: Annotated[float, Query(ge=0, le=MAX_WAIT_SECONDS)] = 0.0,
    ) -> PlanReady:
        """The slice plan and the pservers, once everybody is here; waits up to `wait_seconds` for it."""
        return await coordinator.wait_for_plan(rank, run, incarnation, wait_seconds)

    @app.post(routes.TRAINER_HEARTBEAT, tags=["membership"])
    async def trainer_heartbeat(rank: OrdinalText, message: TrainerHeartbeat) -> TrainerHeartbeatReply:
        """A trainer renews its lease and learns whether the run has failed."""
        reply = cluster.trainer_heartbeat(rank, message, coordinator.now())
        coordinator.curves.add(message.run, rank, message.round, message.results)
        coordinator.activity.record_trainer(cluster, rank, message, coordinator.now())
        coordinator.changed()
        return reply

    @app.post(routes.LEAVE, tags=["membership"], status_code=204)
    async def leave(rank: OrdinalText, message: Leave) -> None:
        """A trainer goes, done or failed."""
        cluster.leave_trainer(rank, message, coordinator.now())
        coordinator.changed()
        await coordinator.persist()  # who is done is not awaited by another life of this process, either

    @app.get(routes.CHECKPOINTS, tags=["inspection"])
    async def checkpoints() -> list[CheckpointCreated]:
        """The complete checkpoints of the run that are kept, newest first."""
        run = cluster.run.name
        return [CheckpointCreated(run=run, round=r, place=coordinator.place.url) for r in cluster.complete_checkpoints]

    @app.get(routes.SUMMARY, tags=["inspection"])
    async def summary() -> RunSummary:
        """The run in a few numbers, as the servers saw it."""
        return await coordinator.summary()

    @app.get(routes.TARGETS, tags=["inspection"], response_model=list[TargetGroup])
    async def targets() -> list[dict[str, Any]]:
        """All members for Prometheus' HTTP service discovery (`http_sd_configs`)."""
        return describe_targets(coordinator.cluster)

    add_inspection_routes(app, coordinator)
    add_administration_routes(app, coordinator)
    add_dashboard_routes(app)
    return app
