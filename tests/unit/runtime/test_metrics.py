"""The metrics of a process, and the lag of its loop."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from services.runtime.metrics import ServiceMetrics


def test_clients_cannot_invent_labels() -> None:
    metrics = ServiceMetrics("pserver")
    for method in ("BREW", "BREW2"):
        metrics.observe_request("unmatched", method, 404, seconds=0, received_bytes=0, sent_bytes=0)
    labels = {"route": "unmatched", "method": "other", "code": "4xx"}
    assert metrics.registry.get_sample_value("gradpost_http_requests_total", labels) == 2
    assert len(metrics._requests) == 1, "what is kept for each label must not grow with what clients invent"


def test_text_parses_and_names_are_ours_or_the_collectors() -> None:
    body, content_type = ServiceMetrics("pserver").render()
    assert content_type.startswith("text/plain")
    names = {family.name for family in text_string_to_metric_families(body.decode())}
    assert {"gradpost_service_info", "gradpost_event_loop_lag_seconds", "process_cpu_seconds"} <= names
    assert all(name.startswith(("gradpost_", "process_", "python_")) for name in names)
    assert not any(name.endswith("_created") for name in names)


@pytest.mark.parametrize(
    "accept", ["text/plain; version=abc", "application/openmetrics-text; version=x.y", ";;", "text/plain;version="]
)
def test_a_strange_accept_header_is_no_failure(accept: str) -> None:
    body, content_type = ServiceMetrics("pserver").render(accept)
    assert b"gradpost_service_info" in body
    assert "text" in content_type
