"""The tables of docs/settings.md, from the fields of the models."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from pydantic import AliasChoices
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

from ps_config.environment import PREFIX
from ps_config.settings import Settings
from services.coordinator.settings import CoordinatorSettings
from services.pserver.settings import PserverSettings
from services.runtime.settings import ServiceSettings
from trainer_client.settings import TrainerSettings

from ..markdown import codes
from .tables import code, put_table

MODELS: dict[str, type[BaseSettings]] = {
    "Every process": Settings,
    "Every service": ServiceSettings,
    "Coordinator": CoordinatorSettings,
    "Pserver": PserverSettings,
    "Trainer": TrainerSettings,
}


def renew(text: str) -> str:
    for heading, model in MODELS.items():
        text = put_table(text, heading, ("setting", "variable", "default", "meaning"), _rows(model))
    return text


def _rows(model: type[BaseSettings]) -> Iterator[list[str]]:
    """What the model itself has; what it inherits stands in another table."""
    classes = [cls for cls in (model, *model.__bases__) if cls is model or not issubclass(cls, BaseSettings)]
    declared = {name for cls in classes for name in inspect.get_annotations(cls)}
    for name, field in model.model_fields.items():
        if name in declared:
            yield [code([name]), code([_variable(name, field)]), _default(field.default), _meaning(field)]


def _variable(name: str, field: FieldInfo) -> str:
    """The variable that wins; others are told in words."""
    if isinstance(field.validation_alias, AliasChoices):
        return next(str(alias) for alias in field.validation_alias.choices if alias != name)
    return PREFIX + name.upper()


def _default(default: Any) -> str:
    if default is None:
        return "none"
    return code([str(default).lower() if isinstance(default, bool) else default])


def _meaning(field: FieldInfo) -> str:
    """The description, after the choices if it does not explain them all."""
    description = field.description or ""
    choices = _choices(field.annotation)
    if set(choices) <= set(codes(description)):
        return description
    *others, last = (code([choice]) for choice in choices)
    return f"{', '.join(others)} or {last}; {description}"


def _choices(annotation: Any) -> list[str]:
    """The words that a setting may be, if it is one of a few."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [choice for part in get_args(annotation) for choice in _choices(part)]
