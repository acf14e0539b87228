"""The metrics of a process, and the lag of its loop."""

from __future__ import annotations

import asyncio
import time

import pytest
from prometheus_client import Gauge
from prometheus_client.parser import text_string_to_metric_families

from ps_config.process_meter import watch_loop_lag
from services.runtime.metrics import ServiceMetrics


def test_clients_cannot_invent_labels() -> None:
    metrics = ServiceMetrics("pserver")
    for method in ("BREW", "BREW2"):
        metrics.observe_request("unmatched", method, 404, seconds=0, received_bytes=0, sent_bytes=0)
    labels = {"route": "unmatched", "method": "other", "code": "4xx"}
    assert metrics.registry.get_sample_value("gradpost_http_requests_total", labels) == 2
    assert len(metrics._requests) == 1, "what is kept for each label must not grow with what clients invent"


def test_request_without_an_answer() -> None:
    metrics = ServiceMetrics("pserver")
    metrics.observe_request("/v1/get", "GET", 0, seconds=0, received_bytes=0, sent_bytes=0)
    labels = {"route": "/v1/get", "method": "GET", "code": "none"}
    assert metrics.registry.get_sample_value("gradpost_http_requests_total", labels) == 1


def test_registries_are_apart_and_roles_add_to_theirs() -> None:
    first, second = ServiceMetrics("pserver"), ServiceMetrics("coordinator")
    Gauge("gradpost_round", "Newest round.", registry=first.registry).set(7)
    assert b"gradpost_round 7.0" in first.render()[0]
    assert b"gradpost_round" not in second.render()[0]


def test_text_parses_and_names_are_ours_or_the_collectors() -> None:
    body, content_type = ServiceMetrics("pserver").render()
    assert content_type.startswith("text/plain")
    names = {family.name for family in text_string_to_metric_families(body.decode())}
    assert {"gradpost_service_info", "gradpost_event_loop_lag_seconds", "process_cpu_seconds"} <= names
    assert all(name.startswith(("gradpost_", "process_", "python_")) for name in names)
    assert not any(name.endswith("_created") for name in names)


def test_openmetrics_when_asked_for() -> None:
    body, content_type = ServiceMetrics("pserver").render("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")


@pytest.mark.parametrize(
    "accept", ["text/plain; version=abc", "application/openmetrics-text; version=x.y", ";;", "text/plain;version="]
)
def test_a_strange_accept_header_is_no_failure(accept: str) -> None:
    body, content_type = ServiceMetrics("pserver").render(accept)
    assert b"gradpost_service_info" in body
    assert "text" in content_type


async def test_a_blocked_loop_shows_and_an_idle_one_does_not() -> None:
    seen: list[float] = []
    watch = asyncio.create_task(watch_loop_lag(seen.append, interval_seconds=0.02))
    await asyncio.sleep(0.15)
    idle = min(seen)
    seen.clear()
    time.sleep(0.1)  # noqa: ASYNC251 (that is the fault)
    await asyncio.sleep(0.05)
    watch.cancel()
    assert idle < 0.02
    assert 0.08 < max(seen) < 5
