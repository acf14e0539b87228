"""Options that typer does not know by itself: the settings of services, and the completion of parameters."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand

PATIENCE_SECONDS = 1.0  # a person waits at a prompt


class SettingsCommand(TyperCommand):
    """A command with settings as options; its function finds the given ones in `ctx.obj`.

    The settings are imported when the options are needed, because that takes half a second.
    """

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the function's own parameters, the settings and `--help`."""
        from .settings import make_options

        own = len(self.params)
        parameters = super().get_params(ctx)
        return [*parameters[:own], *make_options(str(self.name)), *parameters[own:]]

    def invoke(self, ctx: Any) -> Any:
        """See click.Command."""
        own = {parameter.name for parameter in self.params}
        others = {name: ctx.params.pop(name) for name in ctx.params.keys() - own}
        ctx.obj = {name: value for name, value in others.items() if value is not None}
        return super().invoke(ctx)


def complete_parameter(ctx: typer.Context) -> list[str]:
    """Return the names of the parameters of the run that trains; none if the coordinator does not answer at once."""
    from .status import open_view

    try:
        with open_view(
            ctx.params.get("coordinator"), ctx.params.get("token_file"), timeout_seconds=PATIENCE_SECONDS
        ) as view:
            return [one["name"] for one in view.parameters()["parameters"]]  # typer takes those that fit
    except Exception:  # a line on the terminal would only be in the way
        return []
