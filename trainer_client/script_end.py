"""How a script ends: as done, or as failed, by an exception or an exit code; also one in a child of multiprocessing."""

from __future__ import annotations

import atexit
import builtins
import functools
import multiprocessing.util
import sys
import threading
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn


@functools.cache  # once a process
def watch_end(leave: Callable[[BaseException | None], None]) -> None:
    """Call `leave` when the script ends, with the exception or the non-zero exit code that has ended it, if any."""
    ended_by: list[BaseException] = []
    previous_hook, previous_exit = sys.excepthook, sys.exit

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        ended_by.append(error)
        previous_hook(kind, error, trace)

    def exit_(status: Any = None, /) -> NoReturn:
        # SystemExit reaches no hook, and an exit function cannot see the code. In another thread it ends only that.
        if status not in (None, 0) and threading.current_thread() is threading.main_thread():
            ended_by.append(SystemExit(status))
        previous_exit(status)

    def end() -> None:
        leave(ended_by[-1] if ended_by else None)

    sys.excepthook, sys.exit = hook, exit_
    if not hasattr(sys, "ps1"):  # there, exit and quit say how to leave
        for name in ("exit", "quit"):
            if hasattr(builtins, name):  # not with `python -S`
                setattr(builtins, name, exit_)
    atexit.register(end)
    if multiprocessing.parent_process() is not None:
        _watch_end_of_child(ended_by, end)


def _watch_end_of_child(ended_by: list[BaseException], end: Callable[[], None]) -> None:
    """multiprocessing catches what ends a child, prints it, and lets no hook see it.

    Up to Python 3.12 a forked child runs no exit functions, but these, while the exception is on its way; from 3.13 on
    it runs them when that has been printed.
    """
    print_exc = traceback.print_exc

    def end_in_finally() -> None:
        if (error := sys.exc_info()[1]) is not None:
            ended_by.append(error)
        end()

    def print_and_note(*arguments: Any, **options: Any) -> None:
        error = sys.exc_info()[1]
        if error is not None and sys._getframe(1).f_globals.get("__name__") == "multiprocessing.process":
            ended_by.append(error)
        print_exc(*arguments, **options)

    traceback.print_exc = print_and_note
    multiprocessing.util.Finalize(None, end_in_finally, exitpriority=100)


def outcome_of(error: BaseException | None) -> tuple[str, str]:
    """Outcome and reason to leave with, once `error` (or nothing) has ended the script."""
    if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
        return "done", ""
    return "failed", f"{type(error).__name__}: {error}".rstrip(": ")
