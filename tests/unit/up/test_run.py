"""A run of `gradpost up`: its command, its state folder and its end."""

from __future__ import annotations

import os
import re
import socket
import sys
import tempfile
from pathlib import Path

import pytest

from gradpost import runs, up
from gradpost.output import CommandError
from gradpost.runs import MAX_RUNS, named_root, new_folder, newest_folder, resume_folder
from gradpost.up import choose_port, make_environment, resolve_command, run_up
from gradpost.up.run import UpOptions
from ps_config.environment import SETTINGS_FILE_VARIABLE
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
