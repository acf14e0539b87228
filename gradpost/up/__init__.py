"""`gradpost up`: a training script on a local cluster."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ps_config.environment import PREFIX, check_environment, find_setting
from services.coordinator.settings import CoordinatorSettings
from services.pserver.settings import PserverSettings
from services.runtime.storage import lock_folder
from trainer_client.testing.processes import use_this_python

from ..output import EXIT_FAILED, CommandError
from ..runs import history_folder, named_root, new_folder, resume_folder
from ..settings import read_settings
from .run import LocalRun, UpOptions

EXIT_NOT_EXECUTABLE = 126  # as in shells, env and timeout
EXIT_NOT_FOUND = 127
DEFAULT_PORT: int = CoordinatorSettings.model_fields["port"].default

# Settings that `up` sets for each process, which must not inherit the value of another one.
_SET_BY_UP = """
    coordinator host port advertise_address listen_fd pserver_index follow num_pservers num_trainers
    metrics_port exit_when_done state_dir resume log_format log_level
"""


def run_up(
    command: Sequence[str],
    num_pservers: int | None,
    num_trainers: int,
    settings: Mapping[str, Any],
    options: UpOptions,
) -> int:
    """Run `command` on a new local cluster and return the exit code; `settings` are those given as options.

    Without `num_pservers` the strategy decides. Raises CommandError or SettingsError before anything is started.
    """
    given = dict(settings)
    if not options.max_restarts and find_setting("on_trainer_loss") is None:
        given.setdefault("on_trainer_loss", "fail")  # no lost trainer can rejoin
    given["standbys"] = options.standbys
    # Checked here too, since the services would report errors in their own logs only.
    pservers = {} if num_pservers is None else {"num_pservers": num_pservers}
    cluster = read_settings(CoordinatorSettings, {**given, **pservers})
    if cluster.strategy == "ring" and options.max_restarts:
        raise CommandError("--max-restarts needs pservers: a ring cannot continue without a trainer, or take it back")
    read_settings(PserverSettings, {})
    resolved = resolve_command(command)  # before a folder is made for the run
    root = Path(given.pop("state_dir", named_root()))
    given.setdefault("port", choose_port())
    given["history_dir"] = history_folder(root)
    try:
        given["state_dir"], _ = resume_folder(root) if given.get("resume") else new_folder(root)
    except OSError as error:
        text = f"{root} cannot hold the state of the run: {error.strerror}. Give another folder with --state-dir"
        raise CommandError(text, exit_code=EXIT_FAILED) from None
    program = sys.argv[0] if Path(sys.argv[0]).name == "gradpost" and not shutil.which("gradpost") else "gradpost"
    resume = shlex.join([program, "up", "--resume", *(word for word in sys.argv[2:] if word != "--resume")])
    environ = make_environment(os.environ, num_trainers, given)
    return LocalRun(resolved, num_trainers, given, cluster, environ, options, resume).run()


def choose_port() -> int:
    """Return the coordinator's usual port if it is free, else 0.

    No other `up` of this user takes it meanwhile, if there is a folder for temporary files.
    """
    with suppress(OSError):  # a read-only disk
        if lock_folder(Path(tempfile.gettempdir()) / f"gradpost-{os.getuid()}-port-{DEFAULT_PORT}") is None:
            return 0
    with socket.socket() as attempt:
        attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the coordinator does
        try:
            attempt.bind(("127.0.0.1", DEFAULT_PORT))
        except OSError:
            return 0
    return DEFAULT_PORT


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
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    kept.setdefault("OMP_NUM_THREADS", str(max(1, num_cores // num_trainers)))
    return kept
