"""`gradpost up`: a training script on a local cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ps_config.environment import find_setting
from services.coordinator.settings import CoordinatorSettings
from services.pserver.settings import PserverSettings

from ..output import CommandError
from ..settings import read_settings
from .command import resolve_command
from .local_run import LocalRun
from .state_folder import named_root, new_folder, resume_folder

DEFAULT_PSERVERS = 2


def run_up(
    command: Sequence[str],
    num_pservers: int | None,
    num_trainers: int,
    settings: Mapping[str, Any],
    *,
    max_restarts: int = 0,
    verbose: bool,
    as_json: bool,
) -> int:
    """Run `command` on a new local cluster and return the exit code; `settings` are the given options.

    Without `num_pservers` the strategy decides. Raises CommandError or SettingsError before anything is started.
    """
    given = dict(settings)
    if not max_restarts and find_setting("on_trainer_loss") is None:
        given.setdefault("on_trainer_loss", "fail")  # no lost trainer can rejoin
    # Checked here too, since the services would report errors in their own logs only.
    pservers = {} if num_pservers is None else {"num_pservers": num_pservers}
    cluster = read_settings(CoordinatorSettings, {**given, **pservers})
    if cluster.strategy == "ring" and max_restarts:
        raise CommandError(
            "--max-restarts: a ring cannot continue without a trainer, and a restarted one cannot rejoin it"
        )
    read_settings(PserverSettings, {})
    resolved = resolve_command(command)  # before a folder is made for the run
    root = Path(given.pop("state_dir", named_root()))
    given["state_dir"] = (resume_folder(root) if given.get("resume") else new_folder(root)).path
    run = LocalRun(
        resolved,
        0 if cluster.strategy == "ring" else DEFAULT_PSERVERS if num_pservers is None else num_pservers,
        num_trainers,
        given,
        max_restarts=max_restarts,
        tolerates_losses=cluster.on_trainer_loss == "continue",
        verbose=verbose,
        as_json=as_json,
    )
    return run.run()
