from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gradpost.output import CommandError
from gradpost.up.command import make_environment, resolve_command
from ps_config.environment import SettingsError


@pytest.mark.parametrize("name", ["python", "python3"])
def test_python_is_the_one_that_runs_this(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert resolve_command([name, "train.py"]) == [sys.executable, "train.py"]


def test_what_is_installed_beside_python_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PATH")
    [path, argument] = resolve_command(["pytest", "x"])
    assert (Path(path).parent, argument) == (Path(sys.executable).parent, "x")


def test_a_command_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CommandError, match="there is no command 'frobnicate'") as caught:
        resolve_command(["frobnicate"])
    assert caught.value.exit_code == 127
    Path("notes.txt").touch()
    with pytest.raises(CommandError, match=r"notes\.txt is not executable$") as caught:
        resolve_command(["./notes.txt"])
    assert caught.value.exit_code == 126


def test_settings_are_passed_on_but_for_those_of_one_process() -> None:
    environ = {
        "GRADPOST_PLACEMENT": "hash",
        "GRADPOST_PORT": "7070",
        "GRADPOST_COORDINATOR": "http://c",
        "HOME": "/root",
    }
    assert make_environment({**environ, "OMP_NUM_THREADS": "3"}, 2) == {
        "GRADPOST_PLACEMENT": "hash",
        "HOME": "/root",
        "OMP_NUM_THREADS": "3",
    }


def test_trainers_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradpost.up.command._num_cores", lambda: 8)
    assert [make_environment({}, n)["OMP_NUM_THREADS"] for n in (1, 2, 3, 8, 100)] == ["8", "4", "2", "1", "1"]


def test_a_misspelt_setting_is_refused() -> None:
    with pytest.raises(SettingsError, match="did you mean GRADPOST_PLACEMENT"):
        make_environment({"GRADPOST_PLACEMNT": "hash"}, 2)


def test_a_flag_hides_the_variable_from_the_trainers() -> None:
    environ = {"GRADPOST_MODE": "sync", "GRADPOST_MAX_STALENESS": "2", "OMP_NUM_THREADS": "1"}
    assert make_environment(environ, 2, ["mode"]) == {"GRADPOST_MAX_STALENESS": "2", "OMP_NUM_THREADS": "1"}
