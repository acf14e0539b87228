"""`gradpost dashboard`: the runs that have ended, without a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

from ps_config.hosts import is_loopback
from services.coordinator.dashboard.routes import serve_history
from services.coordinator.history import RunHistory
from services.runtime.logs import configure_logs

from .output import CommandError, print_line
from .state_folder import history_folder, named_root


def show_dashboard(state_dir: Path | None, host: str, port: int) -> NoReturn:
    """Serve the dashboard of the history. Raises CommandError without a run, or if other machines could reach it."""
    if not is_loopback(host):
        raise CommandError(
            f"--host: {host or 'every interface'} can be reached from other machines, and this command checks no "
            "tokens. Omit --host, and forward the port from the other machine: ssh -L 7080:127.0.0.1:7080"
        )
    configure_logs("dashboard", level="warning")
    history = RunHistory(history_folder(state_dir or named_root()))
    if not history.entries():
        raise CommandError(
            f"there is no run in {history.folder}, where a run that has trained is kept when it ends. "
            "Give another folder with --state-dir"
        )
    serve_history(history, host, port, lambda address: print_line(f"dashboard: {address}", flush=True))
