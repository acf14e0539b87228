"""The port on which Prometheus scrapes a trainer."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter

from ps_config.certificates import CertificateError, TlsFiles, client_context
from ps_protocol.errors import Unreachable
from trainer_client import ParameterClient
from trainer_client.metrics import MetricsServer

from ..protocol.test_certificates import Authority


@contextmanager
def serving(tls: TlsFiles = TlsFiles()) -> Iterator[str]:  # noqa: B008 - frozen
    """Yield the address of the page."""
    registry = CollectorRegistry()
    Counter("steps", "Steps.", registry=registry)
    server = MetricsServer(registry, "127.0.0.1", 0, tls)
    try:
        yield f"{server.address}/metrics"
    finally:
        server.close()


def test_the_port_needs_no_token_and_is_free_once_it_is_closed() -> None:
    with serving() as url:
        assert "steps_total" in httpx.get(url).text
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)


def test_with_tls_only_a_certificate_of_the_authority_is_let_in(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    client, files = authority.issue("client"), authority.issue("metrics")
    with serving(files) as url:
        assert url.startswith("https://127.0.0.1:")
        with httpx.Client(verify=client_context(client)) as http:
            assert "steps_total" in http.get(url).text
        with httpx.Client(verify=client_context(TlsFiles(client.ca))) as http, pytest.raises(httpx.TransportError):
            http.get(url)


def test_a_connection_without_a_handshake_blocks_neither_the_port_nor_its_end(tmp_path: Path) -> None:
    files = Authority(tmp_path / "authority").issue("all")
    with (
        serving(files) as url,
        socket.create_connection(("127.0.0.1", httpx.URL(url).port or 0)),
        httpx.Client(verify=client_context(files), timeout=10) as http,
    ):
        assert "steps_total" in http.get(url).text


@pytest.mark.asyncio
async def test_a_trainer_that_cannot_join_frees_its_metrics_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(Unreachable):
        await ParameterClient("http://127.0.0.1:9", retry_seconds=0.1, metrics_port=port).join()
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_wrong_tls_files_are_named(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    files = TlsFiles(None, authority.issue("one").cert, authority.issue("other").key)
    with pytest.raises(CertificateError, match="does not belong to the certificate"), serving(files):
        pass
