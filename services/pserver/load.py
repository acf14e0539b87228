"""What a run has cost a pserver so far: its metrics since the run began here, for the coordinator's heartbeats."""

from __future__ import annotations

from typing import Any

from prometheus_client import Histogram
from prometheus_client.metrics import MetricWrapperBase

from .metrics import PserverMetrics


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
