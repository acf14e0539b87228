"""Options that several commands share, and options beyond typer's own: settings, and completed parameter names."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

COMPLETION_SECONDS = 1.0  # the user waits at a prompt


class SettingsCommand(TyperCommand):
    """A command with settings as options; `ctx.obj` contains the given ones.

    The settings are imported on demand, because that takes half a second.
    """

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the function's own parameters, the settings and `--help`."""
        from .settings import make_options

        own = len(self.params)
        parameters = super().get_params(ctx)
        return [*parameters[:own], *make_options(str(self.name)), *parameters[own:]]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, and the options under the titles of their groups."""
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": []}
        for parameter in self.get_params(ctx):
            if record := parameter.get_help_record(ctx):
                is_option = parameter.param_type_name == "option"
                title = (getattr(parameter, "rich_help_panel", None) or "Options") if is_option else "Arguments"
                groups.setdefault(title, []).append(record)
        for title, records in groups.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)

    def invoke(self, ctx: Any) -> Any:
        """Move the given settings to `ctx.obj`, and call the function."""
        own = {parameter.name for parameter in self.params}
        others = {name: ctx.params.pop(name) for name in ctx.params.keys() - own}
        ctx.obj = {name: value for name, value in others.items() if value is not None}
        return super().invoke(ctx)


def complete_parameter(ctx: typer.Context) -> list[str]:
    """Return the parameter names of the run that trains; an empty list if the coordinator does not answer in time."""
    from ps_protocol.routes import PARAMETERS

    from .runs import find_connection

    try:
        connection = find_connection(ctx.params.get("coordinator"), ctx.params.get("token_file"))
        with connection.open(COMPLETION_SECONDS) as view:
            return [
                one["name"] for one in view.get(dict[str, Any], PARAMETERS)["parameters"]
            ]  # typer selects the matching ones
    except Exception:  # an error message would garble the prompt
        return []


Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Coordinator = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="The coordinator's address [default: GRADPOST_COORDINATOR, else that of the newest `up` in this folder, "
        "else http://127.0.0.1:7070].",
    ),
]
TokenPath = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        metavar="FILE",
        help="The token to send [default: GRADPOST_TOKEN_FILE, else the file of its scope in GRADPOST_TOKENS_DIR].",
    ),
]
ParameterName = Annotated[
    str, typer.Argument(metavar="NAME", help="The name of the parameter.", autocompletion=complete_parameter)
]
