"""The state folders of `gradpost up`, one for each run; the newest are kept. The history has a file for each run.

.gradpost/up-20261121-104811/pserver-0/…, checkpoints/…
.gradpost/history/4f1c….json
"""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress
from pathlib import Path

from ps_config.environment import find_path
from ps_protocol.errors import UnsupportedFormat
from services.runtime.storage import lock_folder

from .output import CommandError

DEFAULT_ROOT = Path(".gradpost")
MAX_RUNS = 3
ADDRESS = "address"  # the file with the coordinator's address
_PREFIX = "up-"


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
