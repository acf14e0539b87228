"""What a pserver measures beyond requests; base units, no label per block."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics import MetricWrapperBase

from services.runtime.compute import ComputeExecutor


class PserverMetrics:
    """The pserver's own metrics in the service's registry."""

    def __init__(self, registry: CollectorRegistry, compute: ComputeExecutor) -> None:
        buckets = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
        self.rounds = Counter(
            "gradpost_rounds_applied", "Rounds applied, of all runs of this process.", registry=registry
        )
        self.round = Gauge("gradpost_round", "Newest applied round of the current run.", registry=registry)
        self.skipped = Counter(
            "gradpost_rounds_skipped", "Rounds that stepped nothing for NaN or infinity.", registry=registry
        )
        self.apply_seconds = Histogram(
            "gradpost_apply_seconds", "Aggregate, step and encode one round.", buckets=buckets, registry=registry
        )
        self.barrier_wait = Histogram(
            "gradpost_barrier_wait_seconds",
            "From when the first trainer waits for a round to its last batch barrier.",
            buckets=buckets,
            registry=registry,
        )
        self.missing = Gauge(
            "gradpost_barrier_missing",
            "Trainers that the open batch barrier waits for; 0 while nobody waits.",
            registry=registry,
        )
        self.waiting_seconds = Gauge(
            "gradpost_barrier_waiting_seconds", "How long somebody has been waiting for others.", registry=registry
        )
        self.log_bytes = Gauge("gradpost_log_bytes", "Log since the newest checkpoint began.", registry=registry)
        self.log_failures = Counter(
            "gradpost_log_failures", "Tries to write an update to the log that failed.", registry=registry
        )
        self.checkpoint_seconds = Histogram(
            "gradpost_checkpoint_seconds", "Writing one shard of a checkpoint.", buckets=buckets, registry=registry
        )
        self.checkpoint_round = Gauge(
            "gradpost_checkpoint_round", "Round of this shard's newest checkpoint.", registry=registry
        )
        self.checkpoint_time = Gauge(
            "gradpost_checkpoint_time_seconds",
            "When this shard's newest checkpoint was written, since 1970; 0 if this process has written none.",
            registry=registry,
        )
        self.checkpoint_failures = Counter(
            "gradpost_checkpoint_failures", "Checkpoints that could not be written.", registry=registry
        )
        self.disk_free = Gauge(
            "gradpost_disk_free_bytes", "Room on the disk with the log and the state.", registry=registry
        )
        self.disk_size = Gauge(
            "gradpost_disk_size_bytes", "Size of the disk with the log and the state.", registry=registry
        )
        self.staged_blocks = Counter("gradpost_staged_blocks", "Blocks staged.", registry=registry)
        self.staged_bytes = Gauge(
            "gradpost_staged_bytes",
            "Receive buffers in use: bodies on their way and staged contributions.",
            registry=registry,
        )
        self.in_flight_bytes = Gauge(
            "gradpost_in_flight_bytes",
            "Announced bytes of bodies that are being received or staged just now; bounded by `max_inflight_bytes`.",
            registry=registry,
        )
        self.pooled_bytes = Gauge(
            "gradpost_pooled_bytes", "Receive buffers that lie idle until the next round.", registry=registry
        )
        self.updates = Counter(
            "gradpost_updates_applied", "Updates of single blocks, in the asynchronous modes.", registry=registry
        )
        self.staleness = Histogram(
            "gradpost_staleness",
            "Updates that a block had had since the trainer pulled what its gradient was computed on.",
            buckets=(0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128),
            registry=registry,
        )
        self.queued = Gauge("gradpost_queued_updates", "Gradients in all queues of blocks.", registry=registry)
        self.held_pushes = Gauge("gradpost_held_pushes", "Pushes that wait for room in a queue.", registry=registry)
        self.held_seconds = Histogram(
            "gradpost_push_held_seconds",
            "How long a complete push waited for room.",
            buckets=buckets,
            registry=registry,
        )
        self.nonfinite = Counter(
            "gradpost_nonfinite_pushes", "Pushes with NaN or infinity; not counted under `allow`.", registry=registry
        )
        self.disagreements = Counter(
            "gradpost_hyper_parameter_disagreements",
            "Contributions whose numbers were ignored, because the lowest rank pushed others.",
            registry=registry,
        )
        Gauge("gradpost_compute_queue", "Tensor jobs that are queued or running.", registry=registry).set_function(
            lambda: compute.num_jobs
        )


class LoadMeter:
    """Metrics count for as long as the process lives; this one reads what was added since it was made."""

    def __init__(self, metrics: PserverMetrics) -> None:
        self._metrics = metrics
        self._before = {histogram: _read(histogram) for histogram in self._histograms}

    @property
    def _histograms(self) -> tuple[Histogram, ...]:
        return self._metrics.apply_seconds, self._metrics.barrier_wait, self._metrics.staleness

    @property
    def num_held(self) -> int:
        """Pushes that wait for room in a queue."""
        return int(_read(self._metrics.held_pushes)["value"])

    def read(self) -> dict[str, Any]:
        """Members of PserverLoad."""
        applies, waits, staleness = map(self._since, self._histograms)
        bounds = [(bound, int(number)) for bound, number in staleness.items() if bound not in ("sum", "count")]
        below = [0, *(number for _, number in bounds)]
        return {
            "num_applies": int(applies["count"]),
            "apply_seconds": applies["sum"],
            "num_waits": int(waits["count"]),
            "wait_seconds": waits["sum"],
            "staleness": tuple(
                (None if bound == "+Inf" else float(bound), number - before)
                for (bound, number), before in zip(bounds, below, strict=False)
            ),
        }

    def _since(self, histogram: Histogram) -> dict[str, float]:
        before = self._before[histogram]
        return {key: value - before[key] for key, value in _read(histogram).items()}


def _read(metric: MetricWrapperBase) -> dict[str, float]:
    """The samples of a metric without labels: cumulative ones of buckets by their bounds, others by what they are."""
    [family] = metric.collect()
    return {
        sample.labels.get("le") or sample.name.removeprefix(family.name).lstrip("_") or "value": sample.value
        for sample in family.samples
        if not sample.name.endswith("_created")
    }
