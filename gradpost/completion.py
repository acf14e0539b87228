"""What the shell offers when somebody presses Tab, beyond what typer knows by itself."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand

PATIENCE_SECONDS = 1.0  # somebody waits at a prompt


class RoleCommand(TyperCommand):
    """`gradpost serve ROLE`, whose flags are the settings of the role."""

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """The flags that begin so."""
        from .serve import Role, make_role_app

        role: Role = "coordinator" if self.name == "coordinator" else "pserver"
        return typer.main.get_command(make_role_app(role)).shell_complete(ctx, incomplete)


def complete_parameter(ctx: typer.Context) -> list[str]:
    """Names of parameters of the run that trains; none if nobody answers at once."""
    from .status import open_view

    try:
        with open_view(
            ctx.params.get("coordinator"), ctx.params.get("token_file"), timeout_seconds=PATIENCE_SECONDS
        ) as view:
            return [one["name"] for one in view.parameters()["parameters"]]  # typer takes those that fit
    except Exception:  # a line on the terminal would only be in the way
        return []
