"""docs/settings.md lists every setting of every role with its variable and default, as the models have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import pytest
from pydantic import AliasChoices
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

from ps_protocol.environment import KNOWN_VARIABLES, PREFIX, SETTINGS_FILE_VARIABLE
from services.coordinator.settings import CoordinatorSettings
from services.pserver.settings import PserverSettings
from services.runtime.settings import ServiceSettings
from trainer_client.settings import TrainerSettings

from .markdown import codes, read, section, tables

TEXT = read("settings.md")
ROLES: list[tuple[type[BaseSettings], list[str]]] = [
    (ServiceSettings, ["Every service"]),
    (CoordinatorSettings, ["Every service", "Coordinator"]),
    (PserverSettings, ["Every service", "Pserver"]),
    (TrainerSettings, ["Trainer"]),
]


def rows_of(headings: list[str]) -> dict[str, dict[str, str]]:
    """By setting; a later table wins."""
    return {codes(row["setting"])[0]: row for heading in headings for row in tables(section(TEXT, heading))[0]}


def variable_of(name: str, field: FieldInfo) -> str:
    """The variable that wins; others are told in words."""
    if isinstance(field.validation_alias, AliasChoices):
        return next(str(alias) for alias in field.validation_alias.choices if alias != name)
    return PREFIX + name.upper()


def as_text(default: Any) -> str:
    if default is None:
        return "none"
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def choices_of(annotation: Any) -> list[str]:
    """The words that a setting may be, if it is one of a few."""
    if get_origin(annotation) is Literal:
        return [str(choice) for choice in get_args(annotation)]
    if get_origin(annotation) is Union or type(annotation).__name__ == "UnionType":
        return [choice for part in get_args(annotation) for choice in choices_of(part)]
    return []


@pytest.mark.parametrize(("model", "headings"), ROLES, ids=lambda value: getattr(value, "__name__", ""))
def test_the_tables_are_the_models(model: type[BaseSettings], headings: list[str]) -> None:
    documented = {
        name: (codes(row["variable"]), row["default"]) for name, row in rows_of(headings).items() if row["meaning"]
    }
    assert documented == {
        name: ([variable_of(name, field)], as_text(field.default)) for name, field in model.model_fields.items()
    }


@pytest.mark.parametrize(("model", "headings"), ROLES, ids=lambda value: getattr(value, "__name__", ""))
def test_every_choice_is_named(model: type[BaseSettings], headings: list[str]) -> None:
    rows = rows_of(headings)
    for name, field in model.model_fields.items():
        assert set(choices_of(field.annotation)) <= set(codes(rows[name]["meaning"])), name


@pytest.mark.parametrize("model", [CoordinatorSettings, PserverSettings])
def test_every_flag_says_what_it_is_for(model: type[BaseSettings]) -> None:
    """`gradpost serve coordinator --help`."""
    assert [name for name, field in model.model_fields.items() if not field.description] == []


def documented_variables() -> set[str]:
    variables = {
        codes(row["variable"])[0]
        for _, headings in ROLES
        for heading in headings
        for row in tables(section(TEXT, heading))[0]
    }
    return {variable for variable in variables if variable.startswith(PREFIX)}


def test_every_known_variable_is_documented() -> None:
    assert KNOWN_VARIABLES - documented_variables() == {SETTINGS_FILE_VARIABLE}
    assert SETTINGS_FILE_VARIABLE in TEXT


def test_every_documented_variable_is_known() -> None:
    assert documented_variables() <= KNOWN_VARIABLES


@pytest.mark.parametrize(("model", "_headings"), ROLES, ids=lambda value: getattr(value, "__name__", ""))
def test_what_wins(
    model: type[BaseSettings], _headings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Argument over environment over file over default, for a setting that all roles have."""

    def coordinator(**arguments: str) -> str:
        make: Any = model
        return str(make(**arguments).coordinator)

    default = codes(rows_of(["Trainer"])["coordinator"]["default"])[0]
    assert coordinator() == default
    file = tmp_path / "gradpost.toml"
    file.write_text('coordinator = "http://file:1"\n')
    monkeypatch.setenv(SETTINGS_FILE_VARIABLE, str(file))
    assert coordinator() == "http://file:1"
    monkeypatch.setenv("GRADPOST_COORDINATOR", "http://environment:1")
    assert coordinator() == "http://environment:1"
    assert coordinator(coordinator="http://argument:1") == "http://argument:1"
