"""Folders that one process at a time may use."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

LOCK = "lock"


def lock_folder(folder: Path) -> int | None:
    """Lock a folder, which is made if need be, until the returned descriptor is closed, or the process ends.

    None if another process has it. A file named `lock` is left in it; children do not inherit the descriptor. Raises
    OSError if the disk cannot be used.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
