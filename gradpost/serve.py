"""`gradpost serve`: one service in this process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.runtime.process import import_process

from .settings import Role, read_settings, settings_class


def serve(role: Role, options: Mapping[str, Any]) -> None:
    """Run the service with these settings, which ends the process with its exit code."""
    settings = read_settings(settings_class(role), options)
    import_process(role).main(settings)
