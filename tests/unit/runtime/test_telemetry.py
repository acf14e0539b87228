"""The logs and metrics of a process."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
import structlog

from services.runtime.logs import bind_facts, configure_logs, get_logger
from services.runtime.metrics import ServiceMetrics


def json_lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    captured = capsys.readouterr()
    assert captured.out == ""
    return [json.loads(line) for line in captured.err.splitlines()]


def test_json_lines_carry_role_facts_and_context(capsys: pytest.CaptureFixture[str]) -> None:
    log = get_logger()  # before it is configured, as modules do
    configure_logs("pserver")
    bind_facts(pserver=0, run="5f0c")
    with structlog.contextvars.bound_contextvars(trainer=1):
        log.info("round applied", round=7)
    log.info("idle")
    first, second = json_lines(capsys)
    assert first.pop("timestamp").endswith("Z")
    assert first == {
        "event": "round applied",
        "level": "info",
        "role": "pserver",
        "pserver": 0,
        "run": "5f0c",
        "trainer": 1,
        "round": 7,
    }
    assert "trainer" not in second


FORGED = "no data\n12:00:00 [info     ] members installed\x1b[2A"


@pytest.mark.parametrize("log_format", ["console", "json"])
def test_text_of_others_makes_no_line_of_its_own_and_moves_no_cursor(
    log_format: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trainer's reason is logged, and so is what a request was called; either may come from anybody."""
    configure_logs("coordinator", log_format)
    get_logger().info(f"trainer 1 failed: {FORGED}", reason=FORGED, parameters=[FORGED])
    logging.getLogger("httpx").warning("trouble with %s", FORGED)
    secret = "swordfish" * 2
    try:
        raise ValueError(FORGED)
    except ValueError as error:
        get_logger().error("unexpected error", exc_info=error)
    written = capsys.readouterr().err
    assert written.count("members installed") == 5
    assert not [line for line in written.splitlines() if line.startswith("12:00:00")]
    assert "ValueError" in written
    assert not [text for text in ("\x1b", secret) if text in written]


# ---------------------------------------------------------------------- metrics


def test_clients_cannot_invent_labels() -> None:
    metrics = ServiceMetrics("pserver")
    for method in ("BREW", "BREW2"):
        metrics.observe_request("unmatched", method, 404, seconds=0, received_bytes=0, sent_bytes=0)
    labels = {"route": "unmatched", "method": "other", "code": "4xx"}
    assert metrics.registry.get_sample_value("gradpost_http_requests_total", labels) == 2
    assert len(metrics._requests) == 1, "what is kept for each label must not grow with what clients invent"


@pytest.mark.parametrize(
    "accept", ["text/plain; version=abc", "application/openmetrics-text; version=x.y", ";;", "text/plain;version="]
)
def test_a_strange_accept_header_is_no_failure(accept: str) -> None:
    body, content_type = ServiceMetrics("pserver").render(accept)
    assert b"gradpost_service_info" in body
    assert "text" in content_type
