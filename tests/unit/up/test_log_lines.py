from __future__ import annotations

import json

import pytest

from gradpost.up.screen import LogLine, parse_log_line


@pytest.mark.parametrize(
    "line",
    [
        "",
        "epoch 1",
        "{",
        "{}",
        "[1]",
        '{"event": 1, "role": "x", "level": "info"}',
        '{"loss": 0.5}',
        '{"event": "mine"}',
    ],
)
def test_what_a_script_prints_is_no_log_line(line: str) -> None:
    assert parse_log_line(line) is None


def test_who_it_is_and_when_stand_elsewhere() -> None:
    entry = {
        "role": "trainer", "run": "5f0c", "trainer": 1, "event": "waiting", "level": "info",
        "timestamp": "2026-01-01T00:00:00Z", "round": 3, "text": "a b", "quoted": 'a"b', "empty": "",
    }  # fmt: skip
    assert parse_log_line(json.dumps(entry)) == LogLine("info", 'waiting round=3 text="a b" quoted="a\\"b" empty=""')
    entry = {"role": "coordinator", "run": "5f0c", "event": "training", "level": "info"}
    assert parse_log_line(json.dumps(entry)) == LogLine("info", "training run=5f0c")


def test_a_traceback_follows_in_lines_of_its_own() -> None:
    entry = {"role": "pserver", "pserver": 0, "event": "it failed", "level": "error", "exception": "Traceback:\n  line"}
    line = parse_log_line(json.dumps(entry))
    assert line == LogLine("error", "it failed\nTraceback:\n  line")
    assert line.is_warning


def test_text_of_others_makes_no_line_of_its_own_and_moves_no_cursor() -> None:
    entry = {"role": "coordinator", "event": "failed: a\nforged\x1b[2A", "level": "info", "exception": "E: a\x1b[2A"}
    line = parse_log_line(json.dumps(entry))
    assert line == LogLine("info", "failed: a\\nforged\\x1b[2A\nE: a\\x1b[2A")
