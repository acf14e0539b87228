"""The settings of a service, its failpoints, its logs and its metrics."""

from __future__ import annotations

import errno
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from pydantic import ValidationError

import services
from ps_config.environment import SettingsError, check_environment
from services.coordinator.settings import CoordinatorSettings
from services.runtime.failpoints import NAMES, arm_failpoints, parse_failpoints, reach_failpoint
from services.runtime.logs import bind_facts, configure_logs, get_logger
from services.runtime.metrics import ServiceMetrics
from services.runtime.settings import ServiceSettings


@pytest.fixture
def settings_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "gradpost.toml"
    monkeypatch.setenv("GRADPOST_SETTINGS_FILE", str(path))
    return path


def test_unknown_variable_of_kubernetes_says_the_way_out() -> None:
    environ = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "GRADPOST_COORDINATOR_SERVICE_HOST": "10.0.0.2"}
    with pytest.raises(SettingsError, match="enableServiceLinks: false"):
        check_environment(environ)


def test_empty_variable_is_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADPOST_PORT", "")
    assert ServiceSettings().port == 0


def test_file_may_hold_other_roles_keys_but_no_unknown_ones(settings_file: Path) -> None:
    settings_file.write_text("num_trainers = 2\nport = 5\n")
    assert ServiceSettings().port == 5
    settings_file.write_text("nun_trainers = 2\n")
    with pytest.raises(SettingsError, match=r"nun_trainers; did you mean num_trainers\?"):
        ServiceSettings()


@pytest.mark.parametrize("text", [None, "port = = 5", b"\xff"])
def test_unreadable_file_is_named(settings_file: Path, text: str | bytes | None) -> None:
    if text is not None:
        settings_file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(SettingsError, match=r"gradpost\.toml cannot be read"):
        ServiceSettings()


@pytest.mark.parametrize("rules", [{"mode": "async"}, {"mode": "ssp"}, {"max_delay": 1}], ids=str)
def test_a_pull_type_that_the_mode_cannot_have_is_refused_at_the_start(rules: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="pull_type int8 needs the synchronous mode without max_delay"):
        CoordinatorSettings(pull_type="int8", **rules)


# ---------------------------------------------------------------------- failpoints


@pytest.fixture(autouse=True)
def disarm() -> Iterator[None]:
    yield
    arm_failpoints("")


@pytest.mark.parametrize(("action", "number"), [("enospc", errno.ENOSPC), ("eio", errno.EIO)])
def test_a_disk_fails_at_the_passage_that_was_named_and_at_no_other(action, number):
    arm_failpoints(f"apply.before={action}@3")
    reached = []
    for passage in range(1, 6):
        reach_failpoint("apply.after")
        try:
            reach_failpoint("apply.before")
        except OSError as error:
            reached.append((passage, error.errno))
    assert reached == [(3, number)]


@pytest.mark.parametrize("text", ["apply=kill", "apply.before", "apply.before=explode", "apply.before=kill@soon"])
def test_what_does_not_exist_is_refused(text):
    with pytest.raises(ValueError, match=r"is not a failpoint; expected NAME=kill\|stop\|enospc\|eio"):
        parse_failpoints(text)


def test_every_name_is_reached_somewhere_and_no_other():
    sources = "".join(path.read_text() for path in Path(services.__file__).parent.rglob("*.py"))
    assert set(re.findall(r'reach_failpoint\("(.*?)"\)', sources)) == NAMES


# ---------------------------------------------------------------------- logs and metrics


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
