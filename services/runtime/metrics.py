"""Prometheus metrics of a service process: base units, prefix `gradpost_`, no label per parameter, block or path."""

from __future__ import annotations

from typing import NamedTuple

from prometheus_client import (
    CollectorRegistry,
    Counter,
    GCCollector,
    Histogram,
    Info,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.exposition import choose_encoder

LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

# Methods and paths come from the client, so only listed values may become labels.
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class _Request(NamedTuple):
    """The children of the request metrics for one combination of labels."""

    total: Counter
    seconds: Histogram
    received: Counter
    sent: Counter


class ServiceMetrics:
    """The metrics of a process in a registry of its own; a role adds to it with `registry=metrics.registry`."""

    def __init__(self, role: str) -> None:
        # These would be a second, unused series for each counter.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)
        Info("gradpost_service", "Always 1; the role of this process.", registry=self.registry).info({"role": role})
        self.loop_lag = Histogram(
            "gradpost_event_loop_lag_seconds",
            "How late a timer ran that is due four times a second; every request waits as long.",
            buckets=LATENCY_BUCKETS,
            registry=self.registry,
        )
        labels = ("route", "method", "code")
        self._total = Counter("gradpost_http_requests", "Requests answered.", labels, registry=self.registry)
        self._seconds = Histogram(
            "gradpost_http_request_seconds",
            "From a request's headers to the end of its answer, waiting included.",
            labels,
            buckets=LATENCY_BUCKETS,
            registry=self.registry,
        )
        self._received = Counter(
            "gradpost_http_request_bytes", "Bytes of request bodies.", labels, registry=self.registry
        )
        self._sent = Counter(
            "gradpost_http_response_bytes", "Bytes of response bodies.", labels, registry=self.registry
        )
        self._requests: dict[tuple[str, str, int], _Request] = {}

    def observe_request(
        self, route: str, method: str, status: int, *, seconds: float, received_bytes: int, sent_bytes: int
    ) -> None:
        """Count a request. `route` is a template, never a path; status 0 stands for a request without an answer."""
        method = method if method in _METHODS else "other"
        key = (route, method, status // 100)
        request = self._requests.get(key)
        if request is None:  # looking up a child by its labels takes a lock and builds strings
            code = f"{status // 100}xx" if status else "none"
            values = (route, method, code)
            request = self._requests[key] = _Request(
                self._total.labels(*values),
                self._seconds.labels(*values),
                self._received.labels(*values),
                self._sent.labels(*values),
            )
        request.total.inc()
        request.seconds.observe(seconds)
        request.received.inc(received_bytes)
        request.sent.inc(sent_bytes)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Return all metrics in the text format of the Accept header, and its content type."""
        try:
            encode, content_type = choose_encoder(accept)
        except Exception:  # it raises for some malformed headers
            encode, content_type = choose_encoder("")
        return encode(self.registry), content_type
