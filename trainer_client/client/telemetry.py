"""Metrics of a trainer, and the port on which Prometheus scrapes them."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
from torch import Tensor

from ps_config.certificates import TlsFiles, server_context
from ps_config.hosts import authority, reachable_host
from ps_protocol.fields import OWN_RESULTS

from ..transport.tensors import elements_of

PERIOD_SECONDS = 1.0  # between two measures
PAUSE = 200  # times the duration of a measure, which grows with the number of parameters

M = TypeVar("M", Counter, Gauge, Histogram)

_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class RouteMetrics(NamedTuple):
    """The metrics of the requests to one route."""

    requests: Counter
    in_flight: Gauge
    seconds: Histogram

    def begin(self) -> float:
        """Count one try of a request, and return the time of its begin, for `end`."""
        self.requests.inc()
        self.in_flight.inc()
        return perf_counter()

    def end(self, begun: float) -> None:
        """Observe the seconds of a try."""
        self.in_flight.dec()
        self.seconds.observe(perf_counter() - begun)


class TrainerMetrics:
    """Counters of one trainer in a registry of their own, so that a script's metrics are left alone."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._routes: dict[str, RouteMetrics] = {}
        self.rounds = self._add(Counter, "rounds", "Rounds completed by `RemoteOptimizer.step`.")
        self.skipped = self._add(Counter, "rounds_skipped", "Rounds that were skipped because of NaN or infinity.")
        self.round = self._add(Gauge, "round", "Newest completed round.")
        self.step_seconds = self._add(Histogram, "step_seconds", "One `step()`: push, barrier and pull.")
        self.push_seconds = self._add(
            Histogram, "push_seconds", "The first part of a step: until every push was acknowledged."
        )
        self.pull_seconds = self._add(
            Histogram,
            "pull_seconds",
            "The second part of a step: barrier and pull, the wait for the others included.",
        )
        self.barrier_wait = self._add(
            Histogram,
            "barrier_wait_seconds",
            "The wait for the other trainers and the apply: from the request of a round, with the batch barrier, "
            "to the first byte of the pserver's answer.",
        )
        self.local_pservers = self._add(
            Gauge, "local_pservers", "Pservers on the trainer's own host, which it reaches over Unix sockets."
        )
        self.requests = self._add(Counter, "requests", "Requests to pservers, tries included.", "route")
        self.request_seconds = self._add(
            Histogram, "request_seconds", "One try of a request, to the end of its answer.", "route"
        )
        self.in_flight = self._add(
            Gauge,
            "requests_in_flight",
            "Tries that are not answered yet; for pushes the length of the queue.",
            "route",
        )
        self.retries = self._add(
            Counter, "retries", "Tries after the first; `round_pending` means that others were slow.", "reason"
        )
        self.pushed_bytes = self._add(Counter, "pushed_bytes", "Bytes of the frames pushed.")
        self.pulled_bytes = self._add(Counter, "pulled_bytes", "Bytes of the frames pulled.")
        self.reported = self._add(
            Gauge, "reported", "The newest numbers that the script gave to `session.report`, such as `loss`.", "name"
        )

    def of_route(self, route: str) -> RouteMetrics:
        """Return the metrics of the requests to a route."""
        found = self._routes.get(route)
        if found is None:  # looking up a child by its label takes a lock
            found = self._routes[route] = RouteMetrics(
                self.requests.labels(route), self.in_flight.labels(route), self.request_seconds.labels(route)
            )
        return found

    def _add(self, kind: type[M], name: str, text: str, *labels: str) -> M:
        options: dict[str, Any] = {"buckets": _BUCKETS} if kind is Histogram else {}
        return kind(f"gradpost_trainer_{name}", text, labels, registry=self.registry, **options)


class MetricsServer:
    """The port on which `prometheus_client` serves a registry from a daemon thread until it is closed."""

    def __init__(self, registry: CollectorRegistry, host: str, port: int, tls: TlsFiles) -> None:
        ca, cert, key = (None if path is None else str(path) for path in (tls.ca, tls.cert, tls.key))
        if cert is not None:
            server_context(tls)  # raises CertificateError, which names the file and the reason
        self._server, self._thread = start_http_server(
            port, host, registry, certfile=cert, keyfile=key, client_cafile=ca, client_auth_required=ca is not None
        )
        if isinstance(self._server.socket, ssl.SSLSocket):
            # Else one connection without a handshake blocks the port, and `close` with it.
            self._server.socket.do_handshake_on_connect = False  # type: ignore[attr-defined]
        scheme = "http" if cert is None else "https"
        self.address = f"{scheme}://{authority(reachable_host(host), self._server.server_port)}"

    def close(self) -> None:
        """Stop serving and free the port."""
        with contextlib.suppress(
            OSError
        ):  # on Linux this wakes the thread, which otherwise looks twice a second for the end
            self._server.socket.shutdown(socket.SHUT_RDWR)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class StepMeasures:
    """Gradient norm, learning rate and waiting share of a trainer, as curves; `report` is called with them by name.

    At most one step a second is measured, and at most a percent of the time is spent on it.
    """

    def __init__(self, report: Callable[[dict[str, float]], object]) -> None:
        self._report = report
        self._due = 0.0
        self._waited, self._since = 0.0, perf_counter()

    @contextlib.contextmanager
    def step(self, gradients: Mapping[str, Tensor], rate: float | Tensor | None) -> Iterator[None]:
        """Measure the step that the block takes with these gradients."""
        began = perf_counter()
        if began >= self._due:
            norm = float(torch.nn.utils.get_total_norm([*map(elements_of, gradients.values())]))
            measures = {"gradient_norm": norm, "waiting_share": self._waited / (began - self._since)}
            if rate is not None:
                measures["learning_rate"] = float(rate)
            self._report({f"{OWN_RESULTS}{name}": value for name, value in measures.items()})
            self._waited, self._since = 0.0, began
            self._due = began + PERIOD_SECONDS + PAUSE * (perf_counter() - began)
        began = perf_counter()
        try:
            yield
        finally:
            self._waited += perf_counter() - began
