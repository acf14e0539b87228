"""The process of the coordinator, and its metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from typing import get_args

from prometheus_client import CollectorRegistry, Gauge, Metric
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from ps_protocol.messages import RunState
from ps_protocol.vocabulary import PserverIndex
from services.runtime.failpoints import arm_failpoints
from services.runtime.logs import configure_logs, get_logger
from services.runtime.metrics import ServiceMetrics
from services.runtime.security import make_peer_client
from services.runtime.server import run_service, serve

from .app import make_coordinator_app
from .coordinator import Coordinator
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
