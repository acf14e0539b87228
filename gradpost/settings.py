"""Settings on the command line: flag over `GRADPOST_*` over file over default, and errors that name their source."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, SettingsError

from ps_config.environment import PREFIX, SETTINGS_FILE_VARIABLE

from .output import CommandError

S = TypeVar("S", bound=BaseSettings)


def read_settings(cls: type[S], flags: Mapping[str, Any]) -> S:
    """Build the settings; a flag that is None was not given. Raises CommandError with one line for each problem."""
    given = {name: value for name, value in flags.items() if value is not None}
    try:
        return cls(**given)
    except ValidationError as error:
        raise CommandError(*(_describe(problem, given) for problem in error.errors())) from None
    except SettingsError as error:
        raise CommandError(str(error)) from None


def _describe(problem: ErrorDetails, given: Mapping[str, Any]) -> str:
    message = problem["msg"].removeprefix("Value error, ")
    if not problem["loc"]:
        return message
    name = str(problem["loc"][0])
    variable = PREFIX + name.upper()
    if name in given:
        source = "--" + name.replace("_", "-")
    elif variable in os.environ:
        source = variable
    else:
        source = f"{name} in {os.environ.get(SETTINGS_FILE_VARIABLE)}"
    return f"{source}: {message[:1].lower()}{message[1:]}, not {str(problem['input'])!r:.200}"
