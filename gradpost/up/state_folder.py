"""Where `gradpost up` keeps what its services write: a folder for each run, of which the newest stay.

.gradpost/up-20261121-104811/pserver-0/…, checkpoints/…
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

from ps_protocol.environment import PREFIX, read_settings_file

from ..output import CommandError

DEFAULT_ROOT = Path(".gradpost")
KEPT_RUNS = 3
_PREFIX = "up-"


def named_root() -> Path:
    """The folder that the environment or the settings file names, else `.gradpost`."""
    name = os.environ.get(f"{PREFIX}STATE_DIR") or read_settings_file(os.environ).get("state_dir")
    return Path(name) if name else DEFAULT_ROOT


def newest_folder(root: Path) -> Path | None:
    """The folder of the newest run in `root`; None if there is none."""
    return max(_folders(root), default=None)


def resume_folder(root: Path) -> Path:
    """The folder of the run to be resumed. Raises CommandError if there is none."""
    folder = newest_folder(root)
    if folder is None:
        raise CommandError(f"there is no run to resume in {root} (--state-dir)")
    return folder


def new_folder(root: Path) -> Path:
    """A folder for a new run; of the older ones those that are too many are deleted."""
    for old in sorted(_folders(root))[: -KEPT_RUNS + 1]:
        shutil.rmtree(old, ignore_errors=True)
    folder = root / f"{_PREFIX}{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    folder.mkdir(parents=True)
    return folder


def _folders(root: Path) -> list[Path]:
    return [path for path in root.glob(f"{_PREFIX}*") if path.is_dir()]
