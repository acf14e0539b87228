"""`gradpost serve`: one service in this process; every setting that concerns its role is a flag of the same name."""

from __future__ import annotations

import importlib
import inspect
import types
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NoReturn, Union, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from ps_config.certificates import client_context, server_context
from services.runtime.settings import ServiceSettings
from services.runtime.start import import_process

from .settings import read_settings

Role = Literal["coordinator", "pserver"]

# Settings that are no use as a flag: of other roles, or for a program that starts this one.
_HIDDEN = {"coordinator": {"coordinator", "ready_fd"}, "pserver": {"lease_seconds", "ready_fd"}}
_METAVARS = {int: "N", float: "X", str: "TEXT"}


def serve(role: Role, arguments: Sequence[str]) -> NoReturn:
    """Parse the role's own flags and run the service; exits with its exit code."""
    make_role_app(role)(list(arguments), prog_name=f"gradpost serve {role}")
    raise SystemExit(0)


def make_role_app(role: Role) -> typer.Typer:
    """The command that has the role's settings as flags."""
    settings_class = _settings_class(role)

    def run(**flags: Any) -> None:
        settings = read_settings(settings_class, flags)
        for files, make_context in ((settings.server_tls, server_context), (settings.client_tls, client_context)):
            if files.paths:
                make_context(files)  # raises CertificateError before the service starts
        import_process(role).main(settings)  # ends the process

    run.__doc__ = f"Run a {role}. Settings: flag over GRADPOST_* over the file GRADPOST_SETTINGS_FILE over default."
    run.__signature__ = inspect.Signature(make_options(settings_class, _HIDDEN[role]))  # type: ignore[attr-defined]
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command()(run)
    return app


def _settings_class(role: Role) -> type[ServiceSettings]:
    module = importlib.import_module(f"services.{role}.settings")
    settings_class: type[ServiceSettings] = getattr(module, f"{role.capitalize()}Settings")
    return settings_class


def make_options(settings_class: type[ServiceSettings], hidden: set[str]) -> list[inspect.Parameter]:
    """The flags of a settings class, in its order. Values are parsed where those of the environment are."""
    return [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_make_option(name, field))
        for name, field in settings_class.model_fields.items()
        if name not in hidden
    ]


def _make_option(name: str, field: FieldInfo) -> Any:
    flag = "--" + name.replace("_", "-")
    text = [(field.description or "").replace("`", "")]  # they are Markdown, for docs/settings.md
    if field.default is not None and field.default is not False:
        text.append(f"[default: {field.default}]")
    help_ = " ".join(text).strip()
    inner = _without_none(field.annotation)
    if inner is bool:
        names = [f"{flag}/--no-{flag[2:]}"]
        return Annotated[bool | None, typer.Option(*names, help=help_, show_default=False)]
    metavar = "|".join(get_args(inner)) if get_origin(inner) is Literal else _METAVARS.get(inner, "FILE")
    return Annotated[str | None, typer.Option(flag, help=help_, metavar=metavar, show_default=False)]


def _without_none(annotation: Any) -> Any:
    """The type that a value has if there is one; `Annotated` is undone."""
    if get_origin(annotation) in (Union, types.UnionType):
        [annotation] = (part for part in get_args(annotation) if part is not type(None))
    return annotation.__origin__ if get_origin(annotation) is Annotated else annotation
