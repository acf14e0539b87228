"""Who may read a trainer's metrics."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter

from ps_protocol.certificates import TlsFiles, client_context
from ps_protocol.tokens import SCOPES, TokenFolder
from trainer_client.metrics import MAX_CONNECTIONS, MetricsServer

from ..protocol.test_certificates import Authority, serial
from ..protocol.test_tokens import put


@contextmanager
def serving(**protection: Any) -> Iterator[MetricsServer]:
    registry = CollectorRegistry()
    Counter("steps", "Steps.", registry=registry)
    server = MetricsServer(registry, "127.0.0.1", 0, lambda: True, **protection)
    try:
        yield server
    finally:
        server.close()


def test_tokens(tmp_path: Path) -> None:
    for scope in SCOPES:
        put(tmp_path / scope, f"{scope}-xxxxxxxxxxxxxxxxxxxx")
    with serving(tokens=TokenFolder(tmp_path)) as server, httpx.Client(base_url=server.address) as http:
        refused = http.get("/metrics")
        assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
        assert http.get("/metrics", headers={"authorization": "Bearer x"}).status_code == 401
        assert http.get("/other").status_code == 401
        for scope in SCOPES:
            shown = http.get("/metrics", headers={"authorization": f"Bearer {scope}-xxxxxxxxxxxxxxxxxxxx"})
            assert "steps_total" in shown.text
        assert [http.get(probe).status_code for probe in ("/healthz", "/readyz")] == [200, 200]


def test_hosts() -> None:
    with serving() as server, httpx.Client(base_url=server.address) as http:
        assert "steps_total" in http.get("/metrics").text
        assert http.get("/metrics", headers={"host": "localhost:1"}).status_code == 200
        assert http.get("/metrics", headers={"host": "evil.example"}).status_code == 421


def test_tls_and_its_renewal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    authority = Authority(tmp_path / "authority")
    client, files = authority.issue("client"), authority.issue("metrics")
    assert files.cert
    with serving(tls=files) as server:
        assert server.address.startswith("https://127.0.0.1:")
        seen = []
        for _ in range(2):
            with (
                httpx.Client(verify=client_context(client)) as http,
                http.stream("GET", f"{server.address}/metrics") as response,
            ):
                assert response.status_code == 200
                tls = response.extensions["network_stream"].get_extra_info("ssl_object")
                seen.append(int(tls.getpeercert()["serialNumber"], 16))
            assert seen[-1] == serial(files.cert)
            authority.issue("metrics")
        assert len(set(seen)) == 2
        with httpx.Client(verify=client_context(TlsFiles(client.ca))) as http, pytest.raises(httpx.TransportError):
            http.get(f"{server.address}/metrics")
    assert capfd.readouterr().err == ""


def test_connections_that_say_nothing_take_few_threads_and_not_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads are those of a training script."""
    monkeypatch.setattr("trainer_client.metrics.REQUEST_SECONDS", 1.0)
    before = threading.active_count()
    with serving() as server, contextlib.ExitStack() as opened:
        where = ("127.0.0.1", server.port)
        silent = [opened.enter_context(socket.create_connection(where)) for _ in range(3 * MAX_CONNECTIONS)]
        begun = time.monotonic()
        for connection in silent:
            connection.settimeout(0.2)
        num_closed = 0
        while num_closed < len(silent):
            assert threading.active_count() - before <= MAX_CONNECTIONS + 1
            assert time.monotonic() - begun < 10
            num_closed = sum(is_closed_after_a_byte(connection) for connection in silent)
        assert time.monotonic() - begun > 0.9
        assert "steps_total" in httpx.get(f"{server.address}/metrics").text


def is_closed_after_a_byte(connection: socket.socket) -> bool:
    try:
        connection.sendall(b"G")
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True
