"""A service of a history whose checkpoint store and log are disturbed by files, and whose code may be sabotaged.

Runs the service `CHAOS_SERVICE`. The file `CHAOS_PLACE` is read before each operation on the checkpoint store, and
`CHAOS_LOG` before each record of the log. The file is empty or has `slow SECONDS`, `hang`, `eio`, `enospc` or `erofs`.
A hanging operation continues once the file has another content. At SIGUSR1 the service arms the failpoints in the file
`CHAOS_FAILPOINTS`. The names of these files, except for `CHAOS_PLACE`, continue with the id of the process.
"""

from __future__ import annotations

import errno
import os
import runpy
import select
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from services.pserver.durable.update_log import UpdateLog
from services.runtime import failpoints
from services.runtime.storage import LocalStorage

CHECK_SECONDS = 0.02


def disturb_place(file: Path) -> None:
    """Disturb each operation on a local checkpoint store by the file."""
    for name in ("write", "copy_file", "read", "list", "delete"):
        setattr(LocalStorage, name, _disturb(getattr(LocalStorage, name), file))


def _disturb(operation: Callable[..., Any], file: Path) -> Callable[..., Any]:
    def disturbed(*arguments: Any) -> Any:
        while (order := file.read_text()) == "hang":
            _sleep(CHECK_SECONDS)
        action, _, seconds = order.partition(" ")
        if action == "slow":
            _sleep(float(seconds))
        elif action:
            number = getattr(errno, action.upper())
            raise OSError(number, f"{os.strerror(number)} (the campaign's)")
        return operation(*arguments)

    return disturbed


def _sleep(seconds: float) -> None:
    """Sleep without `time.sleep`, which fails (EINVAL) if libfaketime sets the clock to before the machine's start."""
    select.select([], [], [], seconds)


def _find_own(name: str) -> Path:
    return Path(f"{os.environ[name]} of {os.getpid()}")


def _arm_failpoints(*_: object) -> None:
    """Arm failpoints as `arm_failpoints` does, but without a log entry, which a signal handler must not write."""
    failpoints._armed.clear()
    failpoints._armed.update(failpoints.parse_failpoints(_find_own("CHAOS_FAILPOINTS").read_text()))


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, _arm_failpoints)
    disturb_place(Path(os.environ["CHAOS_PLACE"]))
    (own_log := _find_own("CHAOS_LOG")).touch()
    UpdateLog.append_frame = _disturb(UpdateLog.append_frame, own_log)  # type: ignore[method-assign]
    if sabotage := os.environ.get("CHAOS_SABOTAGE"):
        from tests.chaos.sabotaged import SABOTAGES

        SABOTAGES[sabotage][0]()
    runpy.run_module(os.environ["CHAOS_SERVICE"], run_name="__main__", alter_sys=True)
