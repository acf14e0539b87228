"""The process of the coordinator: its HTTP API, its metrics, and the members as targets of Prometheus' HTTP discovery.

https://prometheus.io/docs/prometheus/latest/http_sd/
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, Any, get_args
from urllib.parse import urlsplit

from fastapi import FastAPI, Query, Request, Response
from prometheus_client import CollectorRegistry, Gauge, Metric
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector
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
    RunState,
    RunSummary,
    TrainerHeartbeat,
    TrainerHeartbeatReply,
    TrainerJoined,
)
from ps_protocol.standbys import PserverEnded, ReportStandby, StandbyAnswer
from ps_protocol.vocabulary import PserverIndex
from services.runtime.app import make_app
from services.runtime.failpoints import arm_failpoints
from services.runtime.logs import configure_logs, get_logger
from services.runtime.metrics import ServiceMetrics
from services.runtime.security import KnownHosts, make_peer_client
from services.runtime.server import run_service, serve

from .administration import add_administration_routes
from .coordinator import Coordinator
from .inspection import add_inspection_routes
from .pages import add_dashboard_routes, add_history_routes
from .settings import CoordinatorSettings
from .state.cluster import Cluster

log = get_logger()


def main(settings: CoordinatorSettings) -> int:
    """Serve until the process is stopped or, with exit_when_done, the run is over. Returns the exit code."""
    configure_logs("coordinator", settings.log_format, settings.log_level)
    log.info("starting")  # all imports are done
    arm_failpoints(settings.failpoints or "")
    return run_service(lambda stop: _serve(settings, stop))


async def _serve(settings: CoordinatorSettings, stop: asyncio.Event) -> int:
    async with make_peer_client(settings) as http, asyncio.TaskGroup() as tasks:
        coordinator = Coordinator(settings, http)
        await coordinator.restore()
        metrics = ServiceMetrics("coordinator")
        measure_cluster(coordinator.cluster, metrics.registry)
        app = make_coordinator_app(coordinator, metrics)
        tasks.create_task(coordinator.run(stop))
        await serve(app, settings, stop=stop)
    return coordinator.cluster.exit_code if settings.exit_when_done else 0


# ---------------------------------------------------------------- metrics


def measure_cluster(cluster: Cluster, registry: CollectorRegistry) -> None:
    """Add gauges that read the cluster whenever they are scraped."""
    members = Gauge("gradpost_members", "Living pservers and trainers.", ["kind"], registry=registry)
    members.labels("pserver").set_function(lambda: len(cluster.registry.members))
    members.labels("trainer").set_function(lambda: len(cluster.run.record.members))
    gauges: tuple[tuple[str, str, Callable[[], float]], ...] = (
        ("gradpost_members_missing", "Members that the run waits for.", lambda: len(cluster.waiting_for)),
        ("gradpost_pservers_wanted", "Pservers of a complete cluster.", lambda: cluster.registry.num_pservers),
        (
            "gradpost_standbys_wanted",
            "Standbys that each pserver should have in sync.",
            lambda: cluster.run.settings.standbys,
        ),
        ("gradpost_trainers_awaited", "Lost trainers that the run waits for.", lambda: len(cluster.run.record.awaited)),
        (
            "gradpost_trainers_gone",
            "Lost and failed trainers whose rank is not taken again, without evicted trainers.",
            lambda: sum(
                t.state in ("lost", "failed") and not t.was_evicted for t in cluster.run.record.trainers.values()
            ),
        ),
        ("gradpost_run_round", "Newest round that every trainer has completed.", lambda: cluster.run.lowest_round),
    )
    for name, description, value in gauges:
        Gauge(name, description, registry=registry).set_function(value)
    in_sync = Gauge(
        "gradpost_standbys_in_sync",
        "Standbys that may replace a pserver, with durability `replicated`.",
        ["pserver"],
        registry=registry,
    )
    for index in range(cluster.registry.num_pservers):
        in_sync.labels(str(index)).set_function(partial(_count_in_sync, cluster, index))
    registry.register(_FailOvers(cluster))
    state = Gauge(
        "gradpost_run_state",
        "1 for the state of the run (`gathering`, `training`, `finished`, `failed`), 0 for the others.",
        ["state"],
        registry=registry,
    )
    for label in get_args(RunState):
        state.labels(label).set_function(partial(_is_in, cluster, label))


def _is_in(cluster: Cluster, state: RunState) -> float:
    return float(cluster.run.record.state == state)


def _count_in_sync(cluster: Cluster, index: PserverIndex) -> float:
    replicas = cluster.registry.replicas.get(index)
    if replicas is None:
        return 0.0
    return float(len(replicas.in_sync - cluster.registry.find_missing_standbys(index)))


class _FailOvers(Collector):
    """The number of fail-overs, which the cluster counts."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def collect(self) -> Iterator[Metric]:
        text = "Standbys that have replaced a pserver since the coordinator was started."
        yield CounterMetricFamily("gradpost_fail_overs", text, value=self._cluster.registry.num_promoted)


MAX_WAIT_SECONDS = 30.0
SUCCESSOR_SECONDS = 1.0


def make_coordinator_app(coordinator: Coordinator, metrics: ServiceMetrics) -> FastAPI:
    """Return the application. `coordinator` must run on the same event loop."""
    app = make_app(
        title="Gradpost coordinator",
        role="coordinator",
        metrics=metrics,
        is_ready=lambda: None,
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
    async def report_standby(report: ReportStandby) -> StandbyAnswer:
        """Register a standby or renew its lease, and return the pserver that it follows."""
        answer = cluster.report_standby(report, coordinator.now())
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

    The coordinator itself is left out, since the caller knows its address.
    """
    groups = [
        _group(member.info.address, role="pserver", pserver=str(index))
        for index, member in cluster.registry.members.items()
    ]
    groups += [
        _group(standby.report.address, role="standby", pserver=str(standby.report.follows))
        for standby in cluster.registry.standbys.values()
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
