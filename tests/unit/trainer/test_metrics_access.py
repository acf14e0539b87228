"""Who may read a trainer's metrics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter

from ps_protocol.certificates import TlsFiles, client_context
from ps_protocol.tokens import SCOPES, TokenFolder
from trainer_client.metrics import MetricsServer

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
