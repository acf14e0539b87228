"""The cluster for Prometheus: the coordinator's metrics, and the members as targets of HTTP service discovery.

https://prometheus.io/docs/prometheus/latest/http_sd/
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, get_args
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, Gauge, Metric
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector
from pydantic import BaseModel

from ps_config.hosts import is_ip_literal, is_loopback, reachable_host
from ps_protocol.messages import RunState
from ps_protocol.vocabulary import PserverIndex
from services.runtime.security import KnownHosts

from .state.cluster import Cluster


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
