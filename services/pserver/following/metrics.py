"""Prometheus metrics of a standby."""

from __future__ import annotations

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge


class StandbyMetrics:
    """The standby's own metrics in the service's registry, in base units."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        self.round = gauge("gradpost_replica_round", "Newest applied round of the replica.")
        self.lag_rounds = gauge("gradpost_replica_lag_rounds", "Rounds of the leader that the replica lacks.")
        self.lag_bytes = gauge("gradpost_replica_lag_bytes", "Estimated bytes of the updates that the replica lacks.")
        self.lag_seconds = gauge(
            "gradpost_replica_lag_seconds",
            "Time since the leader reported the first round that the replica lacks; 0 if it lacks none.",
        )
        self.updates = counter("gradpost_replica_updates", "Updates that were applied to replicas.")
        self.copies = counter("gradpost_replica_copies", "Copies of the shard that a replica began with.")
        self.comparisons = counter(
            "gradpost_replica_comparisons", "Comparisons of the replica's digests with the leader's."
        )
        self.differences = counter("gradpost_replica_differences", "Comparisons that found a block that differs.")
