"""The end of a script: done, or failed by an exception. This file replaces nothing of the user's interpreter.

The code of `sys.exit(3)` outside of a `with` block is not visible to a process: it leaves as done, and its parent
process sees the code.
"""

from __future__ import annotations

import atexit
import functools
import sys
import threading
from bdb import BdbQuit
from collections.abc import Callable
from multiprocessing.util import Finalize
from types import FrameType

from ps_protocol.errors import GradpostError


@functools.cache  # once a process
def watch_end(leave: Callable[[BaseException | None], None], pid: int) -> None:
    """Call `leave` when the script of this process (`pid`) ends, with the exception that ended it, if any."""
    is_interactive = hasattr(sys, "ps1") or bool(sys.flags.inspect)  # an exception there ends one statement only

    def end() -> None:
        leave(_find_exception_of_child(child) or (None if is_interactive else _find_uncaught_exception()))

    atexit.register(end)
    child = _find_frame_of_child()
    if child is not None:
        Finalize(None, end, exitpriority=100)


def _find_uncaught_exception() -> BaseException | None:
    """Return the exception that left the outermost frame; CPython notes it before it calls any `sys.excepthook`.

    Prompts that a script opens, such as `code.interact`, and callbacks of C libraries note theirs, too, from a frame
    that has a caller.
    """
    traceback = getattr(sys, "last_traceback", None)
    return sys.last_value if traceback is not None and traceback.tb_frame.f_back is None else None


def _find_frame_of_child() -> FrameType | None:
    """Return the frame in which multiprocessing runs the main thread of this process, if this is a child of it."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_code.co_qualname != "BaseProcess._bootstrap":
        frame = frame.f_back
    return frame


def _find_exception_of_child(frame: FrameType | None) -> BaseException | None:
    """Return what ended a child: multiprocessing catches its exception.

    Up to Python 3.12 finalizers run while the exception is being raised. From 3.13 on exit functions run instead, when
    only the exit code is left.
    """
    if frame is None:
        return None
    code = frame.f_locals.get("exitcode")
    if code is None:
        return sys.exc_info()[1]
    return SystemExit(code) if code else None


def outcome_of(error: BaseException | None) -> tuple[str, str, str | None]:
    """Return the outcome, the reason and the code with which a trainer leaves, once `error` has ended the script."""
    if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
        return "done", "", None
    code = error.code if isinstance(error, GradpostError) else None
    reason = f"{type(error).__qualname__}: {error}".rstrip(": ")
    if isinstance(error, BdbQuit):
        reason += ": breakpoint() found no terminal; gradpost up gives its own to a single trainer (--trainers 1)"
    return "failed", reason, code
