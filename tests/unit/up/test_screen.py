"""The screen of `gradpost up`: its live line, its report, and the output and log lines that it shows."""

from __future__ import annotations

import io
import json
import sys
from typing import Any

import pytest
from rich.text import Text

from gradpost.up.screen import LogLine, Screen, describe, parse_log_line, print_summary
from ps_protocol.messages import (
    ClusterStatus,
    PserverHeartbeat,
    PserverState,
    PserverStatus,
    RunSummary,
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def make_screen(*, verbose: bool = False, as_json: bool = False) -> Screen:
    return Screen(verbose=verbose, as_json=as_json, on_closed=lambda: None)


def on_terminal(monkeypatch: pytest.MonkeyPatch, **environ: str) -> tuple[Screen, Terminal]:
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"TERM": "xterm-256color", "COLUMNS": "40", **environ}.items():
        monkeypatch.setenv(name, value)
    terminal = Terminal()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        return make_screen(), terminal


def log_line(level: str, event: str) -> str:
    return json.dumps({"role": "pserver", "event": event, "level": level})


def test_a_pipe_gets_plain_and_unchanged_lines(capsys: pytest.CaptureFixture[str]) -> None:
    screen = make_screen()
    screen.show_line("trainer 0", "x" * 500 + " \x1b[31mred\x1b[0m [bold] :smile:")
    screen.print_message("done", "red")
    stdout, stderr = capsys.readouterr()
    assert stdout == "[trainer 0] " + "x" * 500 + " \x1b[31mred\x1b[0m [bold] :smile:\n"
    assert stderr == "gradpost: done\n"


def test_an_option_shows_all_lines_and_another_moves_them_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    make_screen(verbose=True).show_line("pserver 0", log_line("info", "registered"))
    make_screen(as_json=True).show_line("trainer 0", "epoch 1")
    assert capsys.readouterr() == ("[pserver 0] registered\n", "[trainer 0] epoch 1\n")


def test_only_warnings_and_crashes_of_services_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    screen = make_screen()
    screen.show_line("pserver 0", log_line("info", "registered"))
    screen.show_line("pserver 0", log_line("warning", "no heartbeat"))
    screen.show_line("pserver 0", "Segmentation fault")
    screen.show_line("trainer 0", log_line("info", "waiting"))
    shown = ["[pserver 0] no heartbeat", "[pserver 0] Segmentation fault", "[trainer 0] waiting"]
    assert capsys.readouterr().out.splitlines() == shown
    screen.reveal("pserver 0")
    screen.reveal("pserver 0")
    assert capsys.readouterr().out.splitlines() == ["[pserver 0] registered"]


def test_the_tracebacks_of_an_interruption_are_hidden(capsys: pytest.CaptureFixture[str]) -> None:
    screen = make_screen()
    screen.hides_interrupts = True
    for last in ("KeyboardInterrupt", "KeyError: 'fc'"):
        for line in ("Traceback (most recent call last):", '  File "train.py", line 3, in <module>', last, "saved"):
            screen.show_line("trainer 1", line)
    assert capsys.readouterr().out.splitlines() == [
        *("[trainer 1] saved", "[trainer 1] KeyError: 'fc'", "[trainer 1] saved")
    ]


def test_a_terminal_gets_colours_and_no_movements(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, terminal = on_terminal(monkeypatch)
    screen.show_line("trainer 0", "a \x1b[31mred\x1b[0m \x1b[2J\x1b[1;1H[bold]")
    screen.show_line("pserver 0", log_line("error", "it failed"))
    screen.print_message("over \x1b[2J", "red")
    screen.show_line("trainer 0", "word " * 30)  # is left to the terminal to break
    assert terminal.getvalue().splitlines() == [
        "\x1b[36m[trainer 0] \x1b[0ma \x1b[31mred\x1b[0m [bold]",
        "\x1b[33m[pserver 0] \x1b[0m\x1b[31mit failed\x1b[0m",
        "\x1b[31mgradpost: over \\x1b[2J\x1b[0m",
        "\x1b[36m[trainer 0] \x1b[0m" + "word " * 30,
    ]
    screen, terminal = on_terminal(monkeypatch, NO_COLOR="1")
    screen.show_line("trainer 0", "a \x1b[31mred\x1b[0m")
    assert terminal.getvalue() == "[trainer 0] a red\n"


def test_the_live_line_stays_below_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, terminal = on_terminal(monkeypatch)
    with screen.live(Text("round 7")):
        screen.show_line("trainer 0", "epoch 1")
    output = terminal.getvalue()
    assert output.index("epoch 1") < output.rindex("round 7")
    assert output.rindex("\x1b[2K") > output.rindex("round 7")  # erased at the end


# ---------------------------------------------------------------- log lines


@pytest.mark.parametrize(
    ("line", "entry"),
    [
        ("", None),
        ("{", None),
        ("[1]", None),
        ('{"event": 1, "role": "x", "level": "info"}', None),
        ('{"event": "mine"}', None),
        (
            '{"role": "trainer", "run": "5f0c", "trainer": 1, "event": "waiting", "level": "info", '
            '"timestamp": "2026", "round": 3, "text": "a b", "quoted": "a\\"b", "empty": ""}',
            LogLine("info", 'waiting round=3 text="a b" quoted="a\\"b" empty=""'),
        ),
        (
            '{"role": "coordinator", "event": "a\\nforged\\u001b[2A", "level": "error", "exception": "E: a\\u001b[2A"}',
            LogLine("error", "a\\nforged\\x1b[2A\nE: a\\x1b[2A"),
        ),
    ],
)
def test_log_lines_are_shortened_and_escaped_and_other_lines_are_none(line: str, entry: LogLine | None) -> None:
    assert parse_log_line(line) == entry


# ---------------------------------------------------------------- progress and report


STATUS: dict[str, Any] = {
    "at": 107.0, "run": "5f0c", "attempt": 0, "state": "training", "mode": "sync", "num_pservers": 1,
    "num_trainers": 2, "waiting_for": (), "failure": None, "plan_digest": "d", "num_parameters": 1,
    "parameter_bytes": 4, "round": 7, "pservers": (), "trainers": (),
}  # fmt: skip
SHARD = PserverState(
    incarnation=1, run="5f0c", round=1234, index=0, shard_bytes=1000, pushed_bytes=2_000_000, pulled_bytes=3_000_000
)
SUMMARY = RunSummary(
    run="5f0c", state="finished", mode="sync", transport="HTTP/2", num_trainers=2, rounds=1234, seconds=61.7,
    results={"loss": 0.25, "accuracy": 0.98333}, shards=(SHARD,),
)  # fmt: skip
WAITING = PserverHeartbeat(incarnation=1, run="5f0c", round=7, missing=(1,), waiting_seconds=7.2)


@pytest.mark.parametrize(
    ("status", "line"),
    [
        ({"state": "gathering", "waiting_for": ("trainer 0", "pserver 1")}, "waiting for trainer 0, pserver 1"),
        ({}, "training: round 1,234  20.0 rounds/s  elapsed 1:01  accuracy 0.9833  loss 0.25"),
        (
            {"pservers": (PserverStatus(index=0, address="http://p", heartbeat_age_seconds=0, heartbeat=WAITING),)},
            "training: round 1,234  20.0 rounds/s  elapsed 1:01  waiting for trainer 1 (7 s)  accuracy 0.9833  loss "
            "0.25",
        ),
    ],
)
def test_the_live_line(status: dict[str, Any], line: str) -> None:
    assert describe(ClusterStatus(**STATUS | status), SUMMARY) == line


def test_the_report_ends_with_the_runs_line(capsys: pytest.CaptureFixture[str]) -> None:
    print_summary(SUMMARY, as_json=False)
    assert capsys.readouterr().out == (
        "\n"
        "rounds  seconds  seconds a round  accuracy  loss\n"
        " 1,234  61.7                0.05    0.9833  0.25\n"
        "\n"
        "pserver  shard bytes  pushed bytes  pulled bytes\n"
        "      0        1,000     2,000,000     3,000,000\n"
        "\n"
        "trained: mode=sync transport=HTTP/2 accuracy=0.9833 rounds=1234 seconds=61.7\n"
    )


def test_the_json_report_contains_nan_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    empty = SUMMARY.model_copy(update={"results": {"loss": float("nan")}, "rounds": 0})
    print_summary(empty, as_json=True)
    output = capsys.readouterr().out
    assert '"loss": "NaN"' in output
    assert '"seconds_a_round": 0.0' in output
