"""The HTTP API of the coordinator, and the members as targets of Prometheus' HTTP service discovery.

https://prometheus.io/docs/prometheus/latest/http_sd/
"""

from __future__ import annotations

import ipaddress
from typing import Annotated, Any
from urllib.parse import urlsplit

from fastapi import FastAPI, Query, Request, Response
from pydantic import BaseModel

from ps_config.hosts import is_ip_literal, is_loopback, reachable_host
from ps_protocol import routes
from ps_protocol.fields import Identifier, OrdinalText
from ps_protocol.membership import PserverRegistered, RegisterPserver
from ps_protocol.messages import (
    CheckpointCreated,
    DeclareModel,
    JoinTrainer,
    Leave,
    PlanReady,
    PserverHeartbeat,
    PserverHeartbeatReply,
    RunSummary,
    TrainerHeartbeat,
    TrainerHeartbeatReply,
    TrainerJoined,
)
from ps_protocol.standbys import PserverEnded, ReportStandby, StandbyAnswer
from services.runtime.app import make_app
from services.runtime.logs import get_logger
from services.runtime.metrics import ServiceMetrics
from services.runtime.security import KnownHosts, may_administer

from .administration import add_administration_routes
from .coordinator import Coordinator
from .inspection import add_inspection_routes
from .pages import add_dashboard_routes, add_history_routes
from .state.cluster import Cluster

log = get_logger()

MAX_WAIT_SECONDS = 30.0
SUCCESSOR_SECONDS = 1.0


def make_coordinator_app(coordinator: Coordinator, metrics: ServiceMetrics, lifespan: Any = None) -> FastAPI:
    """Return the application. `coordinator` must run on the same event loop."""
    app = make_app(
        title="Gradpost coordinator",
        role="coordinator",
        metrics=metrics,
        is_ready=lambda: None,
        lifespan=lifespan,
    )
    cluster = coordinator.cluster

    @app.post(routes.REGISTER_PSERVER, tags=["membership"])
    async def register_pserver(request: RegisterPserver) -> PserverRegistered:
        """Register a pserver, and return its index and incarnation."""
        coordinator.failover.check_registration(request)
        answer = cluster.register_pserver(request, coordinator.now())
        coordinator.changed()
        await coordinator.persist()  # so that no other process gets this incarnation after a restart
        return answer

    @app.post(routes.PSERVER_HEARTBEAT, tags=["membership"])
    async def pserver_heartbeat(index: OrdinalText, message: PserverHeartbeat) -> PserverHeartbeatReply:
        """Renew a pserver's lease, and store its progress."""
        reply = cluster.pserver_heartbeat(index, message, coordinator.now())
        coordinator.changed()
        if message.is_stopping or message.is_stalled:  # it serves nothing more, but answers
            coordinator.failover.suspect(index, message.incarnation)
        if message.standbys is None:
            return reply
        return reply.model_copy(update={"required": await coordinator.failover.note_heartbeat(index, message)})

    @app.post(routes.PSERVER_ENDED, tags=["membership"], status_code=204, response_class=Response)
    async def pserver_ended(index: OrdinalText, message: PserverEnded) -> None:
        """Replace a pserver, whose process a supervisor has seen end. The end of a standby is noted."""
        coordinator.failover.suspect_ended(index, message.address)
        coordinator.changed()

    @app.post(routes.REPORT_STANDBY, tags=["membership"])
    async def report_standby(report: ReportStandby, request: Request) -> StandbyAnswer:
        """Register a standby or renew its lease, and return the pserver that it follows."""
        answer = cluster.report_standby(report, coordinator.now(), may_lead=may_administer(request.scope))
        coordinator.failover.note_standby(report)
        if answer.stop:
            coordinator.changed()
        return answer

    @app.post(routes.JOIN_TRAINER, tags=["membership"])
    async def join_trainer(message: JoinTrainer, request: Request) -> TrainerJoined:
        """Admit a trainer, and return its rank, its incarnation and the mode."""
        client, server = (request.scope.get(end) or ("", 0) for end in ("client", "server"))
        address = message.metrics_address
        if address is not None and not is_own_address(address, client[0], server[0], app.state.guard.hosts):
            log.info(
                "a trainer's metrics are not listed for Prometheus, because their host is not that of the trainer; "
                "set its metrics_host, or add the host to allowed_hosts",
                metrics_address=address,
                client=client[0],
            )
            message = message.model_copy(update={"metrics_address": None})
        answer = cluster.join_trainer(message, coordinator.now())
        coordinator.changed()
        await coordinator.persist()
        return answer

    @app.post(routes.DECLARE_MODEL, tags=["membership"], status_code=204, response_class=Response)
    async def declare_model(rank: OrdinalText, message: DeclareModel) -> None:
        """Declare the model of a trainer, which must equal that of the others."""
        cluster.declare_model(rank, message, coordinator.now())
        coordinator.changed()
        await coordinator.persist()

    @app.get(routes.PLAN, tags=["membership"])
    async def wait_for_plan(
        rank: OrdinalText,
        run: Identifier,
        incarnation: OrdinalText,
        wait_seconds: Annotated[float, Query(ge=0, le=MAX_WAIT_SECONDS)] = 0.0,
    ) -> PlanReady:
        """Return the slice plan and the pservers once all members are present, after at most `wait_seconds`."""
        return await coordinator.wait_for_plan(rank, run, incarnation, wait_seconds)

    @app.post(routes.TRAINER_HEARTBEAT, tags=["membership"])
    async def trainer_heartbeat(rank: OrdinalText, message: TrainerHeartbeat) -> TrainerHeartbeatReply:
        """Renew a trainer's lease, and return the state of the run."""
        reply = cluster.trainer_heartbeat(rank, message, coordinator.now())
        coordinator.curves.add(rank, message)
        coordinator.output.add(rank, message)
        coordinator.changed()
        run, failover = cluster.run, coordinator.failover
        for index, (pserver_incarnation, _) in message.unreachable.items():
            failover.suspect(index, pserver_incarnation)
        if failover.is_settled:
            return reply
        # A trainer receives the address of a successor as soon as the successor holds the run.
        seconds = min(SUCCESSOR_SECONDS, cluster.lease_seconds / 4)  # its next heartbeat comes later
        await coordinator.wait_until(lambda: failover.is_settled, seconds)
        return cluster.answer_trainer(coordinator.now()) if cluster.is_current(run) else reply

    @app.post(routes.LEAVE, tags=["membership"], status_code=204, response_class=Response)
    async def leave(rank: OrdinalText, message: Leave) -> None:
        """Remove a trainer that is done or failed."""
        cluster.leave_trainer(rank, message, coordinator.now())
        coordinator.output.add(rank, message)
        coordinator.changed()
        await coordinator.persist()  # so that a restarted coordinator does not wait for it

    @app.get(routes.CHECKPOINTS, tags=["inspection"])
    async def checkpoints() -> list[CheckpointCreated]:
        """Return the complete checkpoints of the run, newest first."""
        run, place = cluster.run, coordinator.checkpoints.place.url
        return [CheckpointCreated(run=run.record.name, round=round_, place=place) for round_ in run.record.checkpoints]

    @app.get(routes.SUMMARY, tags=["inspection"])
    async def summary() -> RunSummary:
        """Return a summary of the run, with numbers that the servers measured."""
        return await coordinator.result.summary()

    @app.get(routes.TARGETS, tags=["inspection"], response_model=list[TargetGroup])
    async def targets() -> list[dict[str, Any]]:
        """Return all members for Prometheus' HTTP service discovery (`http_sd_configs`)."""
        return describe_targets(cluster)

    add_inspection_routes(app, coordinator)
    add_administration_routes(app, coordinator)
    add_history_routes(app, coordinator.history)
    add_dashboard_routes(app)
    return app


# ---------------------------------------------------------------- the members for Prometheus


class TargetGroup(BaseModel):
    """The members of one role, in the format of Prometheus' HTTP service discovery."""

    targets: list[str]
    labels: dict[str, str]


def describe_targets(cluster: Cluster) -> list[dict[str, Any]]:
    """Return one target group for each pserver, standby and trainer that serves `/metrics`, with role and number.

    The coordinator itself is left out, since the caller knows its address. So is a standby with the scope `replicate`
    only, because Prometheus sends its token there.
    """
    groups = [
        _group(member.info.address, role="pserver", pserver=str(index))
        for index, member in cluster.registry.members.items()
    ]
    groups += [
        _group(standby.report.address, role="standby", pserver=str(standby.report.follows))
        for standby in cluster.registry.standbys.values()
        if standby.may_lead
    ]
    groups += [
        _group(trainer.metrics_address, role="trainer", trainer=str(rank))
        for rank, trainer in cluster.run.record.trainers.items()
        if trainer.metrics_address and trainer.is_present
    ]
    return groups


def is_own_address(address: str, client: str, server: str, hosts: KnownHosts) -> bool:
    """Return whether Prometheus may be sent to the address of a trainer that joined from `client` at `server`.

    Prometheus sends its token there. So the host is that of the trainer's own connection, or one that `hosts` lists.
    On the coordinator's machine it may also be the loopback, or the machine's address in the network.
    """
    host = urlsplit(address).hostname or ""
    peer, own = _normalize(client), _normalize(server)
    is_present = is_loopback(peer) or peer == own
    if is_loopback(host):
        return is_present
    return _normalize(host) == peer or hosts.lists(host) or (is_present and host in (own, reachable_host("0.0.0.0")))


def _normalize(host: str) -> str:
    if not is_ip_literal(host):
        return host
    address = ipaddress.ip_address(host)
    return str(getattr(address, "ipv4_mapped", None) or address)


def _group(address: str, **labels: str) -> dict[str, Any]:
    url = urlsplit(address)
    labels = {"__scheme__": url.scheme, "__metrics_path__": f"{url.path.rstrip('/')}/metrics", **labels}
    return {"targets": [url.netloc], "labels": labels}
