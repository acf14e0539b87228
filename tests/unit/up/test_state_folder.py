"""Each run gets a folder of its own; the newest stay, and nothing else is touched."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gradpost.output import CommandError
from gradpost.up import state_folder
from gradpost.up.state_folder import MAX_RUNS, named_root, new_folder, newest_folder, resume_folder
from ps_config.environment import SETTINGS_FILE_VARIABLE
from services.coordinator.record import RecordFile, describe_cluster

from ..coordinator.support import make_cluster, train


def begin_run(folder: Path, *, has_begun: bool = True) -> None:
    cluster = make_cluster()
    train(cluster)
    cluster.run.has_begun = has_begun
    RecordFile(folder).write(describe_cluster(cluster))


def test_a_script_that_could_not_be_started_pushes_nothing_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistyped command, or an import that fails: three of them, and then the good run is resumed."""
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


def test_new_folders_push_the_oldest_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_what_is_running_stays_and_is_not_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_there_may_be_nothing_to_resume(tmp_path: Path) -> None:
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
