"""The training script's command line and environment."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Collection, Mapping, Sequence

from ps_config.environment import PREFIX, check_environment
from trainer_client.testing.local_cluster import use_this_python

from ..output import CommandError

EXIT_NOT_FOUND = 127  # as shells, env and timeout say it
EXIT_NOT_EXECUTABLE = 126

# Settings that `up` decides for each process; the value of another process must not be inherited.
_DECIDED_HERE = """
    coordinator host port advertise_address ready_fd pserver_index num_pservers num_trainers metrics_port
    exit_when_done state_dir resume log_format log_level
"""


def resolve_command(command: Sequence[str]) -> list[str]:
    """The command to run; `python` is the one that runs this, so that what is installed beside it is found.

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
    """What the processes inherit: all of `environ`, GRADPOST_* settings included, but for what `up` decides.

    That is also each setting of which there was a flag (by its name): a variable must not tell the trainers otherwise.
    As torchrun does, it keeps the trainers from taking all cores each, unless OMP_NUM_THREADS says otherwise. Raises
    SettingsError for an unknown GRADPOST_* variable.
    """
    check_environment(environ)
    decided = {PREFIX + name.upper() for name in (*_DECIDED_HERE.split(), *flags)}
    kept = {name: value for name, value in environ.items() if name not in decided}
    kept.setdefault("OMP_NUM_THREADS", str(max(1, _num_cores() // num_trainers)))
    return kept


def trainer_environment(rank: int, num_trainers: int) -> dict[str, str]:
    """What scripts written for torchrun read besides RANK and WORLD_SIZE."""
    return {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(num_trainers)}


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
