"""Prometheus metrics of a standby."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge


class StandbyMetrics:
    """The standby's own metrics in the service's registry, in base units."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.round = Gauge("gradpost_replica_round", "Newest applied round of the replica.", registry=registry)
        self.lag_rounds = Gauge(
            "gradpost_replica_lag_rounds", "Rounds of the leader that the replica lacks.", registry=registry
        )
        self.lag_bytes = Gauge(
            "gradpost_replica_lag_bytes", "Estimated bytes of the updates that the replica lacks.", registry=registry
        )
        self.lag_seconds = Gauge(
            "gradpost_replica_lag_seconds",
            "Time since the leader reported the first round that the replica lacks; 0 if it lacks none.",
            registry=registry,
        )
        self.updates = Counter("gradpost_replica_updates", "Updates that were applied to replicas.", registry=registry)
        self.copies = Counter(
            "gradpost_replica_copies", "Copies of the shard that a replica began with.", registry=registry
        )
        self.comparisons = Counter(
            "gradpost_replica_comparisons", "Comparisons of the replica's digests with the leader's.", registry=registry
        )
        self.differences = Counter(
            "gradpost_replica_differences", "Comparisons that found a block that differs.", registry=registry
        )
