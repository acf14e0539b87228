"""What a trainer measures, and the small server that shows it on `/metrics`, `/healthz` and `/readyz`."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, make_wsgi_app

from ps_protocol.certificates import TlsFiles, server_context
from ps_protocol.hosts import authority, is_ip_literal, is_loopback, reachable_host, split_port
from ps_protocol.tokens import TokenFolder, parse_authorization

CLOSE_POLL_SECONDS = 0.05  # how soon the server notices that it is being closed
REQUEST_SECONDS = 10.0  # what a request may take as a whole
MAX_CONNECTIONS = 16  # each has a thread of the training script's process; one more is closed at once
LAG_INTERVAL_SECONDS = 0.25
_OPEN = frozenset({"/healthz", "/readyz"})  # probes need no token
_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class TrainerMetrics:
    """Counters of one trainer in a registry of their own, so that a script's metrics are left alone."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.rounds = Counter(
            "gradpost_trainer_rounds", "Rounds completed by `RemoteOptimizer.step`.", registry=registry
        )
        self.skipped = Counter(
            "gradpost_trainer_rounds_skipped", "Rounds that stepped nothing for NaN or infinity.", registry=registry
        )
        self.round = Gauge("gradpost_trainer_round", "Newest completed round.", registry=registry)
        self.step_seconds = self._histogram("gradpost_trainer_step_seconds", "One `step()`: push, barrier and pull.")
        self.push_seconds = self._histogram(
            "gradpost_trainer_push_seconds", "The first part of a step: until every push was acknowledged."
        )
        self.pull_seconds = self._histogram(
            "gradpost_trainer_pull_seconds",
            "The second part of a step: barrier and pull, the wait for the others included.",
        )
        self.barrier_wait = self._histogram(
            "gradpost_trainer_barrier_wait_seconds",
            "From asking a pserver for a round, with the batch barrier, to the first byte of its answer: the wait for "
            "the other trainers and the apply.",
        )
        self.local_pservers = Gauge(
            "gradpost_trainer_local_pservers",
            "Pservers on the trainer's own host, which it reaches over Unix sockets.",
            registry=registry,
        )
        self.requests = Counter(
            "gradpost_trainer_requests", "Requests to pservers, tries included.", ["route"], registry=registry
        )
        self.request_seconds = self._histogram(
            "gradpost_trainer_request_seconds", "One try of a request, to the end of its answer.", "route"
        )
        self.in_flight = Gauge(
            "gradpost_trainer_requests_in_flight",
            "Tries that are not answered yet; for pushes the length of the queue.",
            ["route"],
            registry=registry,
        )
        self.retries = Counter(
            "gradpost_trainer_retries",
            "Tries after the first; `round_pending` means that others were slow.",
            ["reason"],
            registry=registry,
        )
        self.pushed_bytes = Counter("gradpost_trainer_pushed_bytes", "Bytes of the frames pushed.", registry=registry)
        self.pulled_bytes = Counter("gradpost_trainer_pulled_bytes", "Bytes of the frames pulled.", registry=registry)
        self.reported = Gauge(
            "gradpost_trainer_reported",
            "The newest numbers that the script gave to `session.report`, such as `loss`.",
            ["name"],
            registry=registry,
        )
        self.loop_lag = self._histogram(
            "gradpost_trainer_event_loop_lag_seconds",
            "How late a timer ran on the I/O thread that is due four times a second.",
        )

    def _histogram(self, name: str, text: str, *labels: str) -> Histogram:
        return Histogram(name, text, labels, buckets=_BUCKETS, registry=self.registry)

    async def watch_loop_lag(self) -> None:
        """Measure for ever how late the running loop is; run it as a task and cancel it."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LAG_INTERVAL_SECONDS
            await asyncio.sleep(LAG_INTERVAL_SECONDS)
            self.loop_lag.observe(max(0.0, loop.time() - due))


class MetricsServer:
    """Serves a registry on a daemon thread until it is closed; `is_ready` decides `/readyz`."""

    def __init__(
        self,
        registry: CollectorRegistry,
        host: str,
        port: int,
        is_ready: Callable[[], bool],
        *,
        tokens: TokenFolder | None = None,
        tls: TlsFiles = TlsFiles(),  # noqa: B008 - frozen
    ) -> None:
        metrics_app = make_wsgi_app(registry)

        def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
            path = environ["PATH_INFO"]
            if refusal := _refuse(environ, host, None if path in _OPEN else tokens):
                challenge = [("WWW-Authenticate", "Bearer")] if refusal.startswith("401") else []
                start_response(refusal, [("Content-Type", "text/plain; charset=utf-8"), *challenge])
                return [f"{refusal[4:].lower()}\n".encode()]
            if path == "/metrics":
                try:
                    page: Iterable[bytes] = metrics_app(environ, start_response)
                except Exception:  # it takes some Accept headers apart that it does not understand
                    page = metrics_app({**environ, "HTTP_ACCEPT": ""}, start_response)
                return page
            ok = path == "/healthz" or (path == "/readyz" and is_ready())
            status = "200 OK" if ok else ("503 Service Unavailable" if path == "/readyz" else "404 Not Found")
            start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
            return [f"{status[4:].lower()}\n".encode()]

        self._server = make_server(host, port, app, server_class=_Server, handler_class=_QuietHandler)
        if tls.cert is not None:
            self._server.context = server_context(tls)
        self.port: int = self._server.server_port
        self.address = f"{'http' if tls.cert is None else 'https'}://{authority(reachable_host(host), self.port)}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(CLOSE_POLL_SECONDS,), name="gradpost metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop serving and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _refuse(environ: dict[str, Any], host: str, tokens: TokenFolder | None) -> str:
    """The status line of a refusal, or nothing; the same checks as of a service."""
    name, _ = split_port(environ.get("HTTP_HOST", ""))
    if not (is_ip_literal(name) or is_loopback(name) or name == host.lower()):
        return "421 Misdirected Request"
    if tokens is not None and not tokens.scope_of(parse_authorization(environ.get("HTTP_AUTHORIZATION", "")) or ""):
        return "401 Unauthorized"  # every scope may read
    return ""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    context: ssl.SSLContext | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._deadlines: dict[Any, float] = {}  # of open connections
        super().__init__(*args, **kwargs)

    def process_request(self, request: Any, client_address: Any) -> None:
        if len(self._deadlines) >= MAX_CONNECTIONS:
            self.shutdown_request(request)
            return
        self._deadlines[request] = time.monotonic() + REQUEST_SECONDS
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._deadlines.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Cut off who sends a byte now and then; `serve_forever` calls this all the time."""
        for request, deadline in [*self._deadlines.items()]:
            if time.monotonic() > deadline:
                with contextlib.suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = super().get_request()
        connection.settimeout(REQUEST_SECONDS)
        if self.context is not None:
            # The handshake comes with the first read, which happens on the request's own thread.
            connection = self.context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        return connection, address

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away, or showed no certificate, is no news for the script's output."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _QuietHandler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Scrapes are not worth a line each."""
