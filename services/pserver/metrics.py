"""Prometheus metrics of a pserver. No label per block."""

from __future__ import annotations

from collections import Counter as Counts
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.runtime.compute import ComputeExecutor

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_UPDATES = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128)


@dataclass(slots=True)
class Meter:
    """A histogram of Prometheus, with the number and the sum of its values."""

    histogram: Histogram
    count: int = 0
    total: float = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self.count, self.total = self.count + 1, self.total + value
        self.histogram.observe(value)


@dataclass(slots=True)
class StalenessMeter:
    """A histogram of Prometheus, with the number of values by the length of their binary form."""

    histogram: Histogram
    counts: Counts[int] = field(default_factory=Counts)

    def observe(self, staleness: int) -> None:
        """Count the update with a gradient of this staleness."""
        self.counts[staleness.bit_length()] += 1
        self.histogram.observe(staleness)


class PserverMetrics:
    """The pserver's own metrics in the service's registry, in base units."""

    def __init__(self, registry: CollectorRegistry, compute: ComputeExecutor) -> None:
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        seconds = partial(Histogram, registry=registry, buckets=_SECONDS)

        self.rounds = counter("gradpost_rounds_applied", "Rounds applied, of all runs of this process.")
        self.round = gauge("gradpost_round", "Newest applied round of the current run.")
        self.skipped = counter("gradpost_rounds_skipped", "Rounds that stepped nothing because of NaN or infinity.")
        self.apply_seconds = Meter(seconds("gradpost_apply_seconds", "Time to aggregate, step and encode one round."))
        self.barrier_wait = Meter(
            seconds(
                "gradpost_barrier_wait_seconds",
                "Time from the first waiting trainer of a round to its last batch barrier.",
            )
        )
        self.missing = gauge(
            "gradpost_barrier_missing", "Trainers that the open batch barrier waits for; 0 while no trainer waits."
        )
        self.waiting_seconds = gauge(
            "gradpost_barrier_waiting_seconds", "Time for which trainers have been waiting for others."
        )
        self.log_bytes = gauge("gradpost_log_bytes", "Bytes of the log since the newest checkpoint began.")
        self.log_failures = counter("gradpost_log_failures", "Failed attempts to write an update to the log.")
        self.checkpoint_seconds = seconds("gradpost_checkpoint_seconds", "Time to write one shard of a checkpoint.")
        self.checkpoint_round = gauge("gradpost_checkpoint_round", "Round of this shard's newest checkpoint.")
        self.checkpoint_time = gauge(
            "gradpost_checkpoint_time_seconds",
            "Unix time at which this shard's newest checkpoint was written; 0 if this process has written none.",
        )
        self.checkpoint_failures = counter("gradpost_checkpoint_failures", "Checkpoints that could not be written.")
        self.disk_free = gauge("gradpost_disk_free_bytes", "Free bytes of the disk with the log and the state.")
        self.disk_size = gauge("gradpost_disk_size_bytes", "Size of the disk with the log and the state.")
        self.staged_blocks = counter("gradpost_staged_blocks", "Blocks staged.")
        self.staged_bytes = gauge("gradpost_staged_bytes", "Buffers in use: received bodies and staged contributions.")
        self.in_flight_bytes = gauge(
            "gradpost_in_flight_bytes",
            "Announced bytes of bodies that are being received or staged; bounded by `max_inflight_bytes`.",
        )
        self.pooled_bytes = gauge("gradpost_pooled_bytes", "Buffers that are idle until the next round.")
        self.updates = counter("gradpost_updates_applied", "Updates of single blocks, in the asynchronous modes.")
        self.touched_rows = counter(
            "gradpost_touched_rows", "Rows of sparse parameters in the updates that were applied."
        )
        self.staleness = StalenessMeter(
            Histogram(
                "gradpost_staleness",
                "Updates of a block between the pull that its gradient was computed on and the update with that "
                "gradient.",
                buckets=_UPDATES,
                registry=registry,
            )
        )
        self.queued = gauge("gradpost_queued_updates", "Gradients in all queues of blocks.")
        self.held_pushes = gauge("gradpost_held_pushes", "Pushes that wait for room in a queue.")
        self.held_seconds = seconds(
            "gradpost_push_held_seconds", "Time for which a complete push waited for room in its queues."
        )
        self.disagreements = counter(
            "gradpost_hyper_parameter_disagreements",
            "Contributions whose hyperparameters were ignored, because the lowest rank pushed others.",
        )
        self.replica_round = gauge("gradpost_replica_round", "Newest applied round of the replica.")
        self.lag_rounds = gauge("gradpost_replica_lag_rounds", "Rounds of the leader that the replica lacks.")
        self.lag_seconds = gauge(
            "gradpost_replica_lag_seconds",
            "Time since the leader reported the first round that the replica lacks; 0 if it lacks none.",
        )
        self.replica_updates = counter("gradpost_replica_updates", "Updates that were applied to replicas.")
        self.replica_copies = counter("gradpost_replica_copies", "Copies of the shard that a replica began with.")
        self.replica_differences = counter(
            "gradpost_replica_differences", "Digests that showed that the replica differs from its leader."
        )
        gauge("gradpost_compute_queue", "Tensor jobs that are queued or running.").set_function(
            lambda: compute.num_jobs
        )

    def describe(self) -> dict[str, Any]:
        """Return the members of `PserverHeartbeat` that are measured here."""
        return {
            "num_applies": self.apply_seconds.count,
            "apply_seconds": self.apply_seconds.total,
            "num_waits": self.barrier_wait.count,
            "wait_seconds": self.barrier_wait.total,
            "staleness": dict(self.staleness.counts),
        }
