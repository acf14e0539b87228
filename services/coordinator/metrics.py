"""What the coordinator measures beyond requests: who is here, and how the run stands."""

from __future__ import annotations

from functools import partial
from typing import get_args

from prometheus_client import CollectorRegistry, Gauge

from ps_protocol.messages import RunState

from .cluster import Cluster


def measure_cluster(cluster: Cluster, registry: CollectorRegistry) -> None:
    """Add gauges that look at the cluster whenever they are read."""
    members = Gauge("gradpost_members", "Living pservers and trainers.", ["kind"], registry=registry)
    members.labels("pserver").set_function(lambda: len(cluster.registry.members))
    members.labels("trainer").set_function(lambda: len(cluster.run.members))
    missing = Gauge("gradpost_members_missing", "Whom the run waits for before it can begin.", registry=registry)
    missing.set_function(lambda: len(cluster.waiting_for))
    wanted = Gauge("gradpost_pservers_wanted", "Pservers that make the cluster complete.", registry=registry)
    wanted.set_function(lambda: cluster.registry.num_pservers)
    awaited = Gauge("gradpost_trainers_awaited", "Lost trainers that the others wait for.", registry=registry)
    awaited.set_function(lambda: len(cluster.run.awaited))
    gone = Gauge(
        "gradpost_trainers_gone",
        "Trainers of the run that were lost or have failed, until another life takes their place; without those whom "
        "an administrator has evicted.",
        registry=registry,
    )
    gone.set_function(
        lambda: sum(t.state in ("lost", "failed") and not t.was_evicted for t in cluster.run.trainers.values())
    )
    round_ = Gauge("gradpost_run_round", "Newest round that every trainer has completed.", registry=registry)
    round_.set_function(lambda: cluster.run.round)
    state = Gauge(
        "gradpost_run_state",
        "1 for the state that the run is in (`gathering`, `training`, `finished`, `failed`), 0 for the others.",
        ["state"],
        registry=registry,
    )
    for name in get_args(RunState):
        state.labels(name).set_function(partial(_is_in, cluster, name))


def _is_in(cluster: Cluster, state: RunState) -> float:
    return float(cluster.run.state == state)
