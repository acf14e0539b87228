"""The runs that a command means: the state folders of `gradpost up`, and the coordinator of a run.

The newest state folders are kept, one for each run. The history has a file for each run.

.gradpost/up-20261121-104811/pserver-0/…, checkpoints/…
.gradpost/history/4f1c….json
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ps_config.certificates import TlsFiles, client_files
from ps_config.environment import check_base_url, check_environment, find_path, find_setting
from ps_config.tokens import Scope
from ps_protocol.errors import Forbidden, Unauthenticated, Unreachable, UnsupportedFormat
from ps_protocol.fields import Message
from services.runtime.storage import lock_folder
from trainer_client.client.inspection import ClusterView

from .output import EXIT_FAILED, CommandError, print_json, warn

DEFAULT_ROOT = Path(".gradpost")
MAX_RUNS = 3
ADDRESS = "address"  # the file with the coordinator's address
_PREFIX = "up-"

DEFAULT_COORDINATOR = "http://127.0.0.1:7070"
TIMEOUT_SECONDS = 5.0

T = TypeVar("T")


def named_root() -> Path:
    """Return the folder that the environment or the settings file names, else `.gradpost`."""
    return find_path("state_dir") or DEFAULT_ROOT


def history_folder(root: Path) -> Path:
    """Return the folder of the history of runs, which outlives the folders of the runs."""
    return find_path("history_dir") or root / "history"


def newest_folder(root: Path) -> Path | None:
    """Return the folder of the newest run in `root` that has begun; None if there is none."""
    return max(filter(holds_a_run, _folders(root)), default=None)


def holds_a_run(folder: Path) -> bool:
    """Return whether a run has begun in this folder; otherwise, its script may have failed immediately."""
    from services.coordinator.shell import RecordFile  # takes as long to import as `gradpost status` takes otherwise

    try:
        record = RecordFile(folder).read()
    except (OSError, UnsupportedFormat):  # damaged or of another version, so there was a record
        return True
    if record is None:  # perhaps deleted because it was damaged
        return any((folder / "checkpoints").glob("*"))
    return record.run is not None and record.run.has_begun


def resume_folder(root: Path) -> tuple[Path, int]:
    """Lock the folder of the run to resume, and return it with the lock, which ends with this process.

    Raises CommandError if there is none, or it is running.
    """
    folder = newest_folder(root)
    if folder is None:
        raise CommandError(f"there is no run to resume in {root}. Give another folder with --state-dir")
    if (lock := lock_folder(folder)) is None:
        raise CommandError(f"the newest run, in {folder}, is still running")
    return folder, lock


def new_folder(root: Path) -> tuple[Path, int]:
    """Lock a folder for a new run, and return it with the lock.

    Deletes the oldest folders beyond `MAX_RUNS`, and all in which no run has begun, unless their runs are running.
    """
    folders = sorted(_folders(root))
    begun = [folder for folder in folders if holds_a_run(folder)]
    kept = begun[-MAX_RUNS + 1 :]
    for old in [folder for folder in folders if folder not in kept]:
        with suppress(OSError):  # it may belong to another user
            if (lock := lock_folder(old)) is not None:
                shutil.rmtree(old, ignore_errors=True)
                os.close(lock)
    folder = root / f"{_PREFIX}{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    lock = lock_folder(folder)
    assert lock is not None  # its name contains this process's id
    return folder, lock


def running_address(root: Path) -> str | None:
    """Return the coordinator's address of the newest run in `root` that is running; None if there is none."""
    for file in sorted(root.glob(f"{_PREFIX}*/{ADDRESS}"), reverse=True):
        lock = lock_folder(file.parent)
        if lock is None:
            return file.read_text()
        os.close(lock)
    return None


def _folders(root: Path) -> list[Path]:
    return [path for path in root.glob(f"{_PREFIX}*") if path.is_dir()]


# ---------------------------------------------------------------- the coordinator of a run


@dataclass(frozen=True, slots=True)
class Connection:
    """The coordinator's address, and the credentials for it and the pservers."""

    address: str
    is_named: bool  # given, set, or written by the newest `up`; else it is the default
    tls: TlsFiles
    token_file: Path | None

    def open(self, timeout_seconds: float = TIMEOUT_SECONDS) -> ClusterView:
        """Return a client of the coordinator."""
        return ClusterView(self.address, tls=self.tls, token_file=self.token_file, timeout_seconds=timeout_seconds)


def find_connection(coordinator: str | None, token_file: Path | None = None, scope: Scope = "read") -> Connection:
    """Return the connection that options, environment and settings file name, in this order.

    The default token is that of `scope` in `tokens_dir`. Raises CommandError for a bad address, and SettingsError.
    """
    check_environment(os.environ)
    try:
        named = coordinator or find_setting("coordinator") or running_address(named_root())
        address = check_base_url(named or DEFAULT_COORDINATOR)
    except ValueError as error:
        raise CommandError(f"the coordinator's address: {error}") from None
    folder = find_path("tokens_dir")
    token_file = token_file or find_path("token_file") or (folder and folder / scope)
    return Connection(address, named is not None, client_files(), token_file)


@contextmanager
def asking(coordinator: str | None, token_file: Path | None = None, scope: Scope = "read") -> Iterator[ClusterView]:
    """Yield a client of the coordinator; convert connection errors to CommandError with advice."""
    connection = find_connection(coordinator, token_file, scope)
    with connection.open() as view:
        if not connection.is_named:  # perhaps the run of another user
            warn(f"no `gradpost up` of this folder is running; using the coordinator at {view.coordinator}")
        try:
            yield view
        except (Unauthenticated, Forbidden) as error:
            text = (
                f"the coordinator refuses the request: {error}. Give a token with --token-file or GRADPOST_TOKENS_DIR"
            )
            raise CommandError(text, exit_code=EXIT_FAILED) from None
        except Unreachable as error:
            text = f"no coordinator: {error}. Give its address with --coordinator or GRADPOST_COORDINATOR"
            raise CommandError(text, exit_code=EXIT_FAILED) from None


def print_answer(
    coordinator: str | None,
    token_file: Path | None,
    fetch: Callable[[ClusterView], T],
    show: Callable[[T], None],
    *,
    as_json: bool,
    scope: Scope = "read",
) -> None:
    """Print the result of `fetch`: as JSON, or with `show`."""
    with asking(coordinator, token_file, scope) as view:
        answer = fetch(view)
    if as_json:
        print_json(json.loads(answer.model_dump_json()) if isinstance(answer, Message) else answer)
    else:
        show(answer)
