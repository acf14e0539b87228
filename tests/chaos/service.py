"""A service of a history: its place of checkpoints and its log do what files say, and a sabotage may break its code.

Runs the service that `CHAOS_SERVICE` names. The file `CHAOS_PLACE` is read before each operation on the place, and
`CHAOS_LOG` before each record of the log. Such a file is empty, or says `slow SECONDS`, `hang`, `eio`, `enospc` or
`erofs`. A hanging operation goes on once the file says something else.
"""

from __future__ import annotations

import errno
import os
import runpy
import select
from collections.abc import Callable
from pathlib import Path
from typing import Any

from services.pserver.durable.update_log import UpdateLog
from services.runtime.storage import LocalStorage

CHECK_SECONDS = 0.02


def disturb_place(file: Path) -> None:
    """Let every operation on a local place of checkpoints do first what the file says."""
    for name in ("write", "read", "list", "delete"):
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
    """`time.sleep` fails with EINVAL where libfaketime has set the clock to before this machine was started."""
    select.select([], [], [], seconds)


if __name__ == "__main__":
    disturb_place(Path(os.environ["CHAOS_PLACE"]))
    UpdateLog.append = _disturb(UpdateLog.append, Path(os.environ["CHAOS_LOG"]))  # type: ignore[method-assign]
    if sabotage := os.environ.get("CHAOS_SABOTAGE"):
        from tests.chaos.sabotaged import SABOTAGES

        SABOTAGES[sabotage]()
    runpy.run_module(os.environ["CHAOS_SERVICE"], run_name="__main__", alter_sys=True)
