from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from ps_config.environment import SettingsError, check_environment
from services.coordinator.settings import CoordinatorSettings
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


def test_every_roles_variables_are_known_to_every_role(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GRADPOST_BUCKET_BYTES", "GRADPOST_NUM_TRAINERS", "GRADPOST_THREADS"):
        monkeypatch.setenv(name, "1")
    ServiceSettings()


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
