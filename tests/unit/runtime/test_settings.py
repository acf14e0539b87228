"""The settings of a service, and its failpoints: each fails once, at the passage that is named."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

import services
from ps_config.environment import SettingsError, check_environment
from services.coordinator.settings import CoordinatorSettings
from services.runtime.failpoints import NAMES, arm_failpoints, parse_failpoints, reach_failpoint
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
