"""A run of `gradpost up`: its command, its state folder, and its screen."""

from __future__ import annotations

import io
import json
import os
import re
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from rich.text import Text

from gradpost import runs, up
from gradpost.output import CommandError
from gradpost.runs import MAX_RUNS, named_root, new_folder, newest_folder, resume_folder
from gradpost.up import choose_port, make_environment, resolve_command, run_up
from gradpost.up.run import UpOptions
from gradpost.up.screen import LogLine, Screen, describe, parse_log_line, print_summary
from ps_config.environment import SETTINGS_FILE_VARIABLE
from ps_protocol.messages import (
    ClusterStatus,
    PserverHeartbeat,
    PserverState,
    PserverStatus,
    RunSummary,
)
from services.coordinator.shell import RecordFile

from ..coordinator.support import change_record, make_cluster, train


@pytest.mark.parametrize(
    ("command", "found"),
    [
        (["python", "train.py"], [sys.executable, "train.py"]),
        (["python3", "train.py"], [sys.executable, "train.py"]),
        (["pytest", "x"], [str(Path(sys.executable).with_name("pytest")), "x"]),
        (["frobnicate"], (127, "there is no command 'frobnicate'")),
        (["./notes.txt"], (126, "./notes.txt is not executable")),
    ],
)
def test_commands_are_found_beside_python(
    command: list[str], found: list[str] | tuple[int, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").touch()
    if isinstance(found, list):
        assert resolve_command(command) == found
        return
    with pytest.raises(CommandError, match=re.escape(found[1])) as caught:
        resolve_command(command)
    assert caught.value.exit_code == found[0]


def test_trainers_inherit_common_settings_and_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    kept = {"GRADPOST_PLACEMENT": "hash", "GRADPOST_MAX_STALENESS": "2", "HOME": "/root", "OMP_NUM_THREADS": "3"}
    given = {**kept, "GRADPOST_PORT": "7070", "GRADPOST_COORDINATOR": "http://c", "GRADPOST_MODE": "sync"}
    assert make_environment(given, 2, ["mode"]) == kept  # a flag hides the variable
    assert [make_environment({}, n)["OMP_NUM_THREADS"] for n in (1, 2, 3, 8, 100)] == ["8", "4", "2", "1", "1"]


def test_the_usual_port_is_used_once_if_it_is_free(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(up, "DEFAULT_PORT", port)
        assert choose_port() == 0
    (tmp_path / f"gradpost-{os.getuid()}-port-{port}").rename(tmp_path / "of-an-earlier-up")
    assert [choose_port(), choose_port()] == [port, 0]
    monkeypatch.setattr(tempfile, "tempdir", "/proc/read-only")
    assert choose_port() == port


def test_a_folder_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADPOST_STATE_DIR", "/proc/read-only")
    with pytest.raises(CommandError, match=r"^/proc/read-only cannot hold the state of the run: No such file"):
        run_up(["python"], 1, 1, {}, UpOptions())


# ---------------------------------------------------------------- the state folder


def make_folder(root: Path, minute: int, *, has_begun: bool = True, is_running: bool = False) -> Path:
    """Return the folder of a run that was started in this minute."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs.time, "strftime", lambda _: f"20261121-10{minute:02}00")
        path, lock = new_folder(root)
    cluster = make_cluster()
    train(cluster)
    change_record(cluster, has_begun=has_begun)
    RecordFile(path).write(cluster.describe())
    if not is_running:
        os.close(lock)
    return path


def test_folders_of_scripts_that_failed_at_once_replace_no_others(tmp_path: Path) -> None:
    """After three mistyped commands or failed imports the good run can still be resumed."""
    good = make_folder(tmp_path, 0)
    failed = [make_folder(tmp_path, 1 + minute, has_begun=False) for minute in range(MAX_RUNS + 1)]
    assert [path for path in failed if path.exists()] == failed[-1:]
    path, lock = resume_folder(tmp_path)
    os.close(lock)
    assert path == newest_folder(tmp_path) == good


def test_new_folders_replace_the_oldest(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "up-20990101-000000").touch()  # a file
    made = [make_folder(tmp_path, minute) for minute in range(MAX_RUNS + 2)]
    assert [path for path in made if path.exists()] == made[-MAX_RUNS:]
    assert newest_folder(tmp_path) == made[-1]
    assert (tmp_path / "notes").is_dir()
    assert (tmp_path / "up-20990101-000000").is_file()


def test_running_runs_are_kept_and_not_resumed(tmp_path: Path) -> None:
    running = [make_folder(tmp_path, minute, is_running=True) for minute in range(MAX_RUNS + 2)]
    assert all(folder.exists() for folder in running)
    with pytest.raises(CommandError, match="still running"):
        resume_folder(tmp_path)


def test_without_a_run_there_is_nothing_to_resume(tmp_path: Path) -> None:
    for root in (tmp_path, tmp_path / "nowhere"):
        assert newest_folder(root) is None
        with pytest.raises(CommandError, match="there is no run to resume in"):
            resume_folder(root)


def test_the_root_is_named_by_the_environment_or_the_settings_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GRADPOST_STATE_DIR", raising=False)
    monkeypatch.delenv(SETTINGS_FILE_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    assert named_root() == Path(".gradpost")
    (tmp_path / "settings.toml").write_text('state_dir = "there"')
    monkeypatch.setenv(SETTINGS_FILE_VARIABLE, "settings.toml")
    assert named_root() == Path("there")
    monkeypatch.setenv("GRADPOST_STATE_DIR", "elsewhere")
    assert named_root() == Path("elsewhere")


# ---------------------------------------------------------------------- the screen


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


def test_the_json_report_contains_nan_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    empty = SUMMARY.model_copy(update={"results": {"loss": float("nan")}, "rounds": 0})
    print_summary(empty, as_json=True)
    output = capsys.readouterr().out
    assert '"loss": "NaN"' in output
    assert '"seconds_a_round": 0.0' in output
