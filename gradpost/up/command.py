"""The training script's command line and environment."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Collection, Mapping, Sequence

from ps_config.environment import PREFIX, check_environment
from trainer_client.testing.local_cluster import use_this_python

from ..output import CommandError

EXIT_NOT_FOUND = 127  # as in shells, env and timeout
EXIT_NOT_EXECUTABLE = 126

# Settings that `up` sets for each process, which must not inherit the value of another one.
_SET_BY_UP = """
    coordinator host port advertise_address ready_fd pserver_index num_pservers num_trainers metrics_port
    exit_when_done state_dir resume log_format log_level
"""


def resolve_command(command: Sequence[str]) -> list[str]:
    """Return the command with its path; `python` is this interpreter, so that its packages are found.

    Raises CommandError if there is no such command.
    """
    name, *arguments = command
    if name in ("python", "python3"):
        return [sys.executable, *arguments]
    path = shutil.which(name, path=use_this_python(os.environ)["PATH"])
    if path is not None:
        return [path, *arguments]
    if os.path.isfile(name):
        hint = f"; did you mean: python {name}" if name.endswith(".py") else ""
        raise CommandError(f"{name} is not executable{hint}", exit_code=EXIT_NOT_EXECUTABLE)
    raise CommandError(f"there is no command {name!r}", exit_code=EXIT_NOT_FOUND)


def make_environment(environ: Mapping[str, str], num_trainers: int, flags: Collection[str] = ()) -> dict[str, str]:
    """Return the environment of all processes: `environ` without the settings that `up` or a flag sets.

    Unless OMP_NUM_THREADS is set, the trainers share the cores. Raises SettingsError for an unknown GRADPOST_*
    variable.
    """
    check_environment(environ)
    set_here = {PREFIX + name.upper() for name in (*_SET_BY_UP.split(), *flags)}
    kept = {name: value for name, value in environ.items() if name not in set_here}
    kept.setdefault("OMP_NUM_THREADS", str(max(1, _num_cores() // num_trainers)))
    return kept


def trainer_environment(rank: int, num_trainers: int) -> dict[str, str]:
    """Return the variables that torchrun sets besides RANK and WORLD_SIZE."""
    return {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(num_trainers)}


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
