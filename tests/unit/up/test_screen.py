"""The screen of `gradpost up`, and the log lines that it shows."""

from __future__ import annotations

import io
import json
import os
import sys

import pytest
from rich.text import Text

from gradpost.up.screen import LogLine, Screen, parse_log_line


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
    with screen.live(lambda: Text("never shown")):
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


def test_the_exception_of_a_process_is_that_of_its_newest_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    screen = make_screen()
    for line in (
        "ValueError: not in a traceback",
        "Traceback (most recent call last):",
        '  File "train.py", line 3, in <module>',
        "KeyError: 'fc'",
        "",
        "During handling of the above exception, another exception occurred:",
        "",
        "Traceback (most recent call last):",
        '  File "train.py", line 5, in <module>',
        "gradpost.BadModel: a module.py: is missing",
    ):
        screen.show_line("trainer 1", line)
    assert screen.exceptions == {"trainer 1": "BadModel: a module.py: is missing"}
    assert len(capsys.readouterr().out.splitlines()) == 10


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
    with screen.live(lambda: Text("round 7")):
        screen.show_line("trainer 0", "epoch 1")
    output = terminal.getvalue()
    assert output.index("epoch 1") < output.rindex("round 7")
    assert output.rindex("\x1b[2K") > output.rindex("round 7")  # erased at the end


def test_a_closed_pipe_is_reported_without_an_error() -> None:
    class Gone(io.StringIO):
        def __init__(self) -> None:
            super().__init__()
            self.read_end, self.write_end = os.pipe()

        def fileno(self) -> int:
            return self.write_end

        def write(self, text: str) -> int:
            raise BrokenPipeError

    gone, reports = Gone(), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", gone)
        screen = Screen(verbose=False, as_json=False, on_closed=lambda: reports.append(True))
        screen.show_line("trainer 0", "epoch 1")
    assert reports == [True]
    assert os.fstat(gone.write_end).st_rdev == os.stat(os.devnull).st_rdev
    os.close(gone.read_end)
    os.close(gone.write_end)


# ---------------------------------------------------------------- log lines


@pytest.mark.parametrize(
    "line",
    ["", "epoch 1", "{", "[1]", '{"event": 1, "role": "x", "level": "info"}', '{"event": "mine"}'],
)
def test_the_output_of_a_script_is_no_log_line(line: str) -> None:
    assert parse_log_line(line) is None


def test_a_log_line_is_shortened() -> None:
    entry = {
        "role": "trainer", "run": "5f0c", "trainer": 1, "event": "waiting", "level": "info",
        "timestamp": "2026-01-01T00:00:00Z", "round": 3, "text": "a b", "quoted": 'a"b', "empty": "",
    }  # fmt: skip
    assert parse_log_line(json.dumps(entry)) == LogLine("info", 'waiting round=3 text="a b" quoted="a\\"b" empty=""')
    entry = {"role": "coordinator", "run": "5f0c", "event": "training", "level": "info"}
    assert parse_log_line(json.dumps(entry)) == LogLine("info", "training run=5f0c")


def test_control_characters_in_log_lines_are_escaped() -> None:
    entry = {"role": "coordinator", "event": "failed: a\nforged\x1b[2A", "level": "info", "exception": "E: a\x1b[2A"}
    line = parse_log_line(json.dumps(entry))
    assert line is not None
    assert not line.is_warning
    assert line == LogLine("info", "failed: a\\nforged\\x1b[2A\nE: a\\x1b[2A")
