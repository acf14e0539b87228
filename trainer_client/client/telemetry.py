"""Metrics of a trainer, the port on which Prometheus scrapes them, and the newest output of the script."""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import ssl
import sys
import threading
import traceback
from collections import deque
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from ps_config.certificates import TlsFiles, server_context
from ps_config.hosts import authority, reachable_host
from ps_protocol.process_reports import MAX_LINE, MAX_LINES, MAX_TRACEBACK, OutputLines, ScriptInfo

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


class OutputBuffer:
    """The newest lines of a script. They are numbered, so that a line that is sent twice counts once."""

    def __init__(self) -> None:
        self.traceback: str | None = None  # of the exception that ended the script
        self._lines: deque[str] = deque(maxlen=MAX_LINES)
        self._num_lines = 0  # lines that the script has written
        self._num_received = 0  # lines of them that an answered request has carried, or that came before these
        self._unfinished: dict[str, str] = {}  # the text after the last newline, by stream
        self._lock = threading.RLock()  # a signal handler may print, too
        self._pid = os.getpid()

    def add(self, stream: str, text: str) -> None:
        """Add text of a stream. Does nothing in a forked child, whose copy of the lock may be held."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            *lines, rest = (self._unfinished.get(stream, "") + encodable(text)).split("\n")
            self._lines.extend(_redraw(line).rstrip("\r")[:MAX_LINE] for line in lines[-MAX_LINES:])
            self._num_lines += len(lines)
            rest = _redraw(rest)
            self._unfinished[stream] = rest.rstrip("\r")[:MAX_LINE] + "\r" * rest.endswith("\r")

    def describe(self) -> OutputLines:
        """Return the lines that no answered request has carried, and the unfinished line of each stream."""
        with self._lock:
            first = max(self._num_received, self._num_lines - len(self._lines))
            lines = list(self._lines)[len(self._lines) - (self._num_lines - first) :]
            rest = (line.rstrip("\r")[:MAX_LINE] for line in self._unfinished.values())
            return OutputLines(first=first, lines=tuple(lines), unfinished=tuple(filter(None, rest)))

    def note_answered(self, sent: OutputLines) -> None:
        """Note that a request with these lines was answered."""
        self._num_received = sent.first + len(sent.lines)

    def note_exception(self, error: BaseException | None) -> None:
        """Keep the traceback of the exception that ended the script."""
        if error is not None and error.__traceback__ is not None:
            self.traceback = encodable("".join(traceback.format_exception(error))[-MAX_TRACEBACK:])


def encodable(text: str) -> str:
    """Return the text without lone surrogates, which a message cannot contain."""
    return text.encode(errors="replace").decode()


def _redraw(line: str) -> str:
    """Return what a terminal shows of a line that is redrawn, with its last carriage return.

    >>> _redraw("10 %\\r20 %\\r")
    '20 %\\r'
    """
    return line[line.rstrip("\r").rfind("\r") + 1 :]


class KeptStream:
    """A stream that passes everything on unchanged, and adds the written text to a buffer."""

    def __init__(self, name: str, stream: Any, buffer: OutputBuffer) -> None:
        self._name = name
        self._stream = stream
        self._buffer: OutputBuffer | None = buffer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> Any:
        """Write to the stream, and keep the text."""
        written = self._stream.write(text)
        if self._buffer is not None:
            with contextlib.suppress(Exception):  # the script must not fail because of this
                self._buffer.add(self._name, text)
        return written

    def writelines(self, lines: Any) -> None:
        """Write each line."""
        for line in lines:
            self.write(line)

    def remove(self) -> None:
        """Stop keeping, and put the stream back unless the script has replaced it meanwhile."""
        self._buffer = None  # a logging handler may write to this object for as long as the process lives
        if getattr(sys, self._name) is self:
            setattr(sys, self._name, self._stream)


def keep_streams(buffer: OutputBuffer) -> list[KeptStream]:
    """Replace `sys.stdout` and `sys.stderr` by streams that add their text to a buffer. Return them."""
    streams = [
        KeptStream(name, getattr(sys, name), buffer) for name in ("stdout", "stderr") if getattr(sys, name) is not None
    ]
    for stream in streams:
        setattr(sys, stream._name, stream)
    return streams


def describe_script(run_name: str | None) -> ScriptInfo:
    """Return the command line of this process. A path below the working directory is shown from there."""
    program, *arguments = sys.argv or [""]
    path = Path(program)
    if path.is_absolute() and path.is_relative_to(Path.cwd()):
        program = str(path.relative_to(Path.cwd()))
    return ScriptInfo(command=encodable(shlex.join([program, *arguments])), run_name=run_name)
