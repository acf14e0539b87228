"""A run of `gradpost up`: its command, its state folder and its end."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from gradpost import state_folder, up
from gradpost.output import CommandError
from gradpost.state_folder import MAX_RUNS, named_root, new_folder, newest_folder, resume_folder
from gradpost.up import choose_port, make_environment, resolve_command, run_up
from gradpost.up.ending import STOP_GRACE_SECONDS, blame, end_by_script, end_by_signal
from gradpost.up.local_run import UpOptions
from ps_config.environment import SETTINGS_FILE_VARIABLE
from services.coordinator.restore import RecordFile

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
    monkeypatch.setattr("gradpost.up._num_cores", lambda: 8)
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


# ---------------------------------------------------------------- the end


def test_a_signal_is_passed_on_at_once() -> None:
    ending = end_by_signal(signal.SIGINT, now=10)
    assert (ending.exit_code, ending.reason, ending.stop_signal) == (130, "interrupted", signal.SIGINT)
    assert (ending.signal_at, ending.kill_at) == (10, 10 + STOP_GRACE_SECONDS)
    hang_up = end_by_signal(signal.SIGHUP, now=10)
    assert blame(ending, {0: -2, 1: 1}, {"ranks": [1]}, {0}) is ending
    assert (hang_up.exit_code, hang_up.reason, hang_up.stop_signal) == (129, "ended by SIGHUP", signal.SIGTERM)


def test_a_failed_script_leaves_the_others_time_to_learn_of_it() -> None:
    known, unknown = (end_by_script(1, 3, now=10, others_know=know) for know in (True, False))
    assert (known.exit_code, known.reason) == (3, "trainer 1 failed with exit code 3")
    assert known.signal_at > unknown.signal_at > 10


def test_a_second_signal_hurries_and_a_third_kills() -> None:
    ending = end_by_script(1, 3, now=10, others_know=True)
    ending.hurry(11)
    assert ending.signal_at == 11
    ending.hurry(12)
    assert ending.kill_at == 12


@pytest.mark.parametrize(
    ("codes", "failure", "ended_by_us", "exit_code", "reason"),
    [
        ({0: 1, 1: 7}, {"ranks": [1]}, (), 7, "trainer 1 failed with exit code 7"),  # trainer 0 learned of it first
        ({0: 1, 1: 7}, {"missing": [1]}, (), 7, "trainer 1 failed with exit code 7"),
        ({0: 1, 1: -15}, {"missing": [1], "detail": "trainer 1 did not"}, {1}, 1, "trainer 1 did not"),  # it hung
        ({0: 1, 1: 0}, {"ranks": [1]}, (), 1, "trainer 0 failed with exit code 1"),
        ({0: 1}, {"ranks": [1]}, (), 1, "trainer 0 failed with exit code 1"),
        ({0: 1, 1: 7}, {}, (), 1, "trainer 0 failed with exit code 1"),
    ],
)
def test_the_trainer_that_the_cluster_names_is_the_cause(
    codes: dict[int, int], failure: dict[str, Any], ended_by_us: set[int], exit_code: int, reason: str
) -> None:
    first = end_by_script(0, 1, now=10, others_know=True)
    blamed = blame(first, codes, failure, ended_by_us)
    assert (blamed.exit_code, blamed.reason) == (exit_code, reason)


# ---------------------------------------------------------------- the state folder


def begin_run(folder: Path, *, has_begun: bool = True) -> None:
    cluster = make_cluster()
    train(cluster)
    change_record(cluster, has_begun=has_begun)
    RecordFile(folder).write(cluster.describe())


def test_folders_of_scripts_that_failed_at_once_replace_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After three mistyped commands or failed imports the good run can still be resumed."""
    minutes = iter(range(10, 60))
    monkeypatch.setattr(state_folder.time, "strftime", lambda _: f"20261121-10{next(minutes)}00")
    good = new_folder(tmp_path)
    begin_run(good.path)
    (good.path / "checkpoints").mkdir()
    os.close(good.lock)
    failed = []
    for _ in range(MAX_RUNS + 1):
        folder = new_folder(tmp_path)
        begin_run(folder.path, has_begun=False)
        os.close(folder.lock)
        failed.append(folder.path)
    assert [path for path in failed if path.exists()] == failed[-1:]
    assert newest_folder(tmp_path) == good.path
    resumed = resume_folder(tmp_path)
    assert resumed.path == good.path
    os.close(resumed.lock)


def test_new_folders_replace_the_oldest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "up-20990101-000000").touch()  # a file
    made = []
    for minute in range(MAX_RUNS + 2):
        monkeypatch.setattr(state_folder.time, "strftime", lambda _, minute=minute: f"20261121-10{minute:02}00")
        folder = new_folder(tmp_path)
        begin_run(folder.path)
        os.close(folder.lock)
        made.append(folder.path)
        os.close(resume_folder(tmp_path).lock)
        assert newest_folder(tmp_path) == folder.path
    kept = [path for path in made if path.exists()]
    assert kept == made[-MAX_RUNS:]
    assert (tmp_path / "notes").is_dir()
    assert (tmp_path / "up-20990101-000000").is_file()


def test_running_runs_are_kept_and_not_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    running = []
    for minute in range(MAX_RUNS + 2):
        monkeypatch.setattr(state_folder.time, "strftime", lambda _, minute=minute: f"20261121-10{minute:02}00")
        running.append(new_folder(tmp_path))
        begin_run(running[-1].path)
    assert all(folder.path.exists() for folder in running)
    with pytest.raises(CommandError, match="still running"):
        resume_folder(tmp_path)
    for folder in running:
        os.close(folder.lock)


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
