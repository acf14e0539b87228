"""`gradpost up`: a local cluster around any training script."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.coordinator.settings import CoordinatorSettings
from services.pserver.settings import PserverSettings

from ..settings import read_settings
from .local_run import LocalRun


def run_up(
    command: Sequence[str],
    num_pservers: int,
    num_trainers: int,
    settings: dict[str, Any],
    *,
    verbose: bool,
    as_json: bool,
) -> int:
    """Run `command` on a cluster of its own and return the exit code; a setting that is None was not given.

    Raises CommandError or SettingsError before anything is started.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    # The services would refuse them just the same, but in their own logs.
    read_settings(CoordinatorSettings, given)
    read_settings(PserverSettings, {"server": given.get("server")})
    run = LocalRun(command, num_pservers, num_trainers, given, verbose=verbose, as_json=as_json)
    return run.run()
