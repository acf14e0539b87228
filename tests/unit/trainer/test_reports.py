"""Values that a trainer reports: its metrics and its log."""

from __future__ import annotations

import io
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter

from ps_config.certificates import CertificateError, TlsFiles, client_context
from ps_protocol.errors import Unreachable
from trainer_client.client.coordinator_client import make_log
from trainer_client.client.run_client import RunClient
from trainer_client.client.settings import read_settings
from trainer_client.client.telemetry import MetricsServer

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


def test_with_tls_a_reader_needs_a_certificate_and_a_silent_one_blocks_nothing(authority: Authority) -> None:
    client, files = authority.issue("client"), authority.issue("metrics")
    with serving(files) as url, socket.create_connection(("127.0.0.1", httpx.URL(url).port or 0)):
        assert url.startswith("https://127.0.0.1:")
        with httpx.Client(verify=client_context(client), timeout=10) as http:
            assert "steps_total" in http.get(url).text
        with httpx.Client(verify=client_context(TlsFiles(client.ca))) as http, pytest.raises(httpx.TransportError):
            http.get(url)


def test_wrong_tls_files_are_named(authority: Authority) -> None:
    files = TlsFiles(None, authority.issue("one").cert, authority.issue("other").key)
    with pytest.raises(CertificateError, match="does not belong to the certificate"), serving(files):
        pass


def test_a_trainer_that_cannot_join_frees_its_metrics_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(Unreachable):
        RunClient(read_settings(coordinator="http://127.0.0.1:9", retry_seconds=0.1, metrics_port=port)).join()
    with socket.create_server(("127.0.0.1", port)):
        pass


# ---------------------------------------------------------------- log


def test_text_of_other_trainers_neither_breaks_lines_nor_controls_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stderr", terminal)
    make_log(trainer=0).info("trainer 1 failed: no data\nforged\x1b[2A", error="a\nb")
    assert terminal.getvalue().count("\n") == 1
    assert "\x1b[2A" not in terminal.getvalue()
