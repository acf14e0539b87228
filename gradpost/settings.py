"""Settings as options of commands, and `gradpost serve`.

An option takes precedence over its `GRADPOST_*` variable, that over the settings file, and that over the default.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import types
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import typer
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from ps_config.certificates import client_context, server_context
from ps_config.settings import describe_problem
from services.runtime.process import import_process
from services.runtime.settings import ServiceSettings

from .output import CommandError

Role = Literal["coordinator", "pserver"]
S = TypeVar("S", bound=ServiceSettings)

# Settings without an option: those of other roles, and those for a program that starts this one.
_HIDDEN = {"coordinator": {"coordinator", "listen_fd"}, "pserver": {"lease_seconds", "listen_fd"}}
_UP_GROUPS = {  # the titles in `gradpost up --help`, and their settings
    "Options": "strategy mode max_delay nonfinite",
    "Failures": "resume on_trainer_loss min_trainers rejoin_timeout_seconds round_timeout_seconds lease_seconds",
    "Checkpoints and paths": "durability replica_loss checkpoint_rounds keep_checkpoints checkpoints state_dir",
    "Wire types": "push_type pull_type topk",
    "Slice plan": "min_block_size placement",
    "Asynchronous modes": "max_staleness wait_for_apply read_consistency max_queued compensation dc_lambda",
}
_UP_SETTINGS = {name: title for title, names in _UP_GROUPS.items() for name in names.split()}
# How the description of a setting without a default ends.
_IF_UNSET = re.compile(r"(?:; none: |\. Default: )")
_ALIASES = {"round_timeout_seconds": "--round-timeout", "rejoin_timeout_seconds": "--rejoin-timeout"}
_METAVARS = {int: "N", float: "X", str: "TEXT"}


def settings_class(role: Role) -> type[ServiceSettings]:
    """Import and return the settings class of a role."""
    found: type[ServiceSettings] = getattr(
        importlib.import_module(f"services.{role}.settings"), f"{role.capitalize()}Settings"
    )
    return found


def read_settings(cls: type[S], options: Mapping[str, Any]) -> S:
    """Build the settings and check their TLS files; options that are None are ignored.

    Raises CommandError with one line for each problem, or SettingsError.
    """
    given = {name: value for name, value in options.items() if value is not None}
    try:
        settings = cls(**given)
    except ValidationError as error:
        flags = {name: "--" + name.replace("_", "-") for name in given}
        raise CommandError(*(describe_problem(cls, problem, flags) for problem in error.errors())) from None
    for files, make_context in ((settings.server_tls, server_context), (settings.client_tls, client_context)):
        if files.paths:
            make_context(files)
    return settings


def serve(role: Role, options: Mapping[str, Any]) -> None:
    """Run a service in this process, which exits when it ends."""
    import_process(role).main(read_settings(settings_class(role), options))


@functools.cache
def make_options(command: str) -> list[Any]:
    """Return typer's options for the settings of `up`, or of a role, in the order of their groups or fields.

    Their values are text, which the settings parse as they parse the environment.
    """
    fields = settings_class("pserver" if command == "pserver" else "coordinator").model_fields
    names = list(_UP_SETTINGS) if command == "up" else [name for name in fields if name not in _HIDDEN[command]]

    def command_function() -> None: ...

    command_function.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=_annotate(name, fields[name], _UP_SETTINGS[name] if command == "up" else None),
            )
            for name in names
        ]
    )
    app = typer.Typer(add_completion=False)
    app.command()(command_function)
    options: list[Any] = typer.main.get_command(app).params
    return options


def _annotate(name: str, field: FieldInfo, group: str | None) -> Any:
    flag, kind, default = name.replace("_", "-"), _without_none(field.annotation), field.default
    text, *if_unset = _IF_UNSET.split((field.description or "").replace("`", ""))  # Markdown, for docs/settings.md
    if default is not None:
        if_unset = [flag if default is True else f"no-{flag}" if default is False else default]
    help_ = f"{text} [default: {if_unset[0]}]" if if_unset else text
    if kind is bool:
        option = typer.Option(f"--{flag}/--no-{flag}", help=help_, show_default=False, rich_help_panel=group)
        return Annotated[bool | None, option]
    metavar = "|".join(get_args(kind)) if get_origin(kind) is Literal else _METAVARS.get(kind, "FILE")
    names = [f"--{flag}", *filter(None, [_ALIASES.get(name)])]
    option = typer.Option(*names, help=help_, metavar=metavar, show_default=False, rich_help_panel=group)
    return Annotated[str | None, option]


def _without_none(annotation: Any) -> Any:
    """Return the type of a value that is not None, without `Annotated`."""
    if get_origin(annotation) in (Union, types.UnionType):
        [annotation] = (part for part in get_args(annotation) if part is not type(None))
    return annotation.__origin__ if get_origin(annotation) is Annotated else annotation
