"""The settings of docs/settings.md: every one is described and known to all roles, and what wins is as it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic_settings import BaseSettings

from ps_config.environment import KNOWN_VARIABLES, PREFIX, SETTINGS_FILE_VARIABLE

from .markdown import codes, read, tables
from .reference.settings import MODELS

TEXT = read("settings.md")

each_model = pytest.mark.parametrize("model", MODELS.values(), ids=lambda model: model.__name__)


@each_model
def test_every_setting_says_what_it_is_for(model: type[BaseSettings]) -> None:
    assert [name for name, field in model.model_fields.items() if not field.description] == []


def test_the_documented_variables_are_the_known_ones() -> None:
    """A misspelt one is refused by what ps_config knows, without any model."""
    documented = {codes(row["variable"])[0] for table in tables(TEXT) for row in table}
    assert {name for name in documented if name.startswith(PREFIX)} == KNOWN_VARIABLES - {SETTINGS_FILE_VARIABLE}
    assert SETTINGS_FILE_VARIABLE in TEXT


@each_model
def test_what_wins(model: type[BaseSettings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Argument over environment over file over default, for a setting that all roles have."""

    def coordinator(**arguments: str) -> str:
        make: Any = model
        return str(make(**arguments).coordinator)

    assert coordinator() == model.model_fields["coordinator"].default
    file = tmp_path / "gradpost.toml"
    file.write_text('coordinator = "http://file:1"\n')
    monkeypatch.setenv(SETTINGS_FILE_VARIABLE, str(file))
    assert coordinator() == "http://file:1"
    monkeypatch.setenv("GRADPOST_COORDINATOR", "http://environment:1")
    assert coordinator() == "http://environment:1"
    assert coordinator(coordinator="http://argument:1") == "http://argument:1"
