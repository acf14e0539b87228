from __future__ import annotations

import io
import json
import logging
import sys
import warnings
from typing import Any

import pytest
import structlog

from services.runtime.logs import bind_facts, configure_logs, get_logger


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


def test_other_libraries_speak_through_the_same_renderer_and_only_to_warn(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("pserver", "json", "debug")
    for name in ("uvicorn.error", "httpx"):
        logging.getLogger(name).info("chatter")
    logging.getLogger("httpx").warning("trouble %s", 7)
    (line,) = json_lines(capsys)
    assert (line["event"], line["logger"], line["level"], line["role"]) == ("trouble 7", "httpx", "warning", "pserver")


def test_warnings_are_logs(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("pserver", "json")
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        logging.captureWarnings(False)  # pytest has put its own hook in place since
        logging.captureWarnings(True)
        warnings.warn("old tensor", stacklevel=1)
    (line,) = json_lines(capsys)
    assert "old tensor" in line["event"]


def test_exceptions_are_one_json_line_without_local_variables(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("pserver", "json")
    secret = "swordfish" * 2
    try:
        raise ValueError("bad")
    except ValueError as error:
        get_logger().error("failed", exc_info=error)
    (line,) = json_lines(capsys)
    assert "ValueError: bad" in line["exception"]
    assert secret not in line["exception"]


@pytest.mark.parametrize(("level", "lines"), [("debug", 4), ("info", 3), ("warning", 2), ("error", 1)])
def test_level(level: Any, lines: int, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("pserver", "json", level)
    log = get_logger()
    for write in (log.debug, log.info, log.warning, log.error):
        write("line")
    assert len(json_lines(capsys)) == lines


def test_console_on_a_terminal_is_coloured_and_short(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stderr", terminal)
    configure_logs("pserver")
    get_logger().info("round applied", round=7)
    assert "\x1b[" in terminal.getvalue()
    assert "round applied" in terminal.getvalue()
    assert len(terminal.getvalue().splitlines()) == 1


def test_console_elsewhere_has_no_colours(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("pserver", "console")
    get_logger().info("round applied", round=7)
    line = capsys.readouterr().err
    assert "\x1b[" not in line
    assert "round=7" in line


FORGED = "no data\n12:00:00 [info     ] members installed\x1b[2A"


@pytest.mark.parametrize("log_format", ["console", "json"])
def test_text_of_others_makes_no_line_of_its_own_and_moves_no_cursor(
    log_format: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trainer's reason is logged, and so is what a request was called; either may come from anybody."""
    configure_logs("coordinator", log_format)
    get_logger().info(f"trainer 1 failed: {FORGED}", reason=FORGED, parameters=[FORGED])
    logging.getLogger("httpx").warning("trouble with %s", FORGED)
    try:
        raise ValueError(FORGED)
    except ValueError as error:
        get_logger().error("unexpected error", exc_info=error)
    written = capsys.readouterr().err
    assert written.count("members installed") == 5
    assert not [line for line in written.splitlines() if line.startswith("12:00:00")]
    assert "\x1b" not in written
