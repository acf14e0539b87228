"""The errors of Gradpost in a script, and the script's end. This file replaces nothing of the user's interpreter.

The tracebacks of our errors end with the script's own line; GRADPOST_LOG_LEVEL=debug shows all frames. The code of
`sys.exit(3)` outside of a `with` block is not visible to a process: it leaves as done, and its parent sees the code.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import threading
from bdb import BdbQuit
from collections.abc import Callable
from multiprocessing.util import Finalize
from types import FrameType, TracebackType
from typing import ParamSpec, TypeVar

from ps_config.environment import CallError, SettingsError
from ps_protocol.errors import GradpostError, RunStopped, TrainerLost

P = ParamSpec("P")
T = TypeVar("T")

_OURS = (GradpostError, SettingsError, CallError)
_HIDDEN = {"gradpost", "ps_config", "ps_protocol", "trainer_client", "torch"}  # torch wraps `step` of every optimizer


def hide_frames(method: Callable[P, T]) -> Callable[P, T]:
    """Raise the errors of Gradpost without the frames below this one; without those above it if nothing catches them.

    Python adds the frames above while the exception is being raised, so only `sys.excepthook` can drop them.
    """

    @functools.wraps(method)
    def call(*arguments: P.args, **options: P.kwargs) -> T:
        try:
            return method(*arguments, **options)
        except _OURS as error:
            if not isinstance(sys.excepthook, _ErrorHook):
                sys.excepthook = _ErrorHook(sys.excepthook)
            drop_all_frames(error)
            raise

    return call


def drop_all_frames(error: BaseException) -> None:
    """Drop the frames of an error and of its cause, because forty lines of coroutines would hide its message."""
    if not _shows_all_frames():
        error.__suppress_context__ = True
        error.__traceback__ = None
        if (cause := error.__cause__) is not None:
            cause.__traceback__ = cause.__cause__ = cause.__context__ = None


def drop_frames(error: BaseException | None) -> None:
    """Drop the frames of Gradpost and torch from the end of the traceback, if this is an error of Gradpost."""
    if not isinstance(error, _OURS) or _shows_all_frames():
        return
    last, entry = None, error.__traceback__
    while entry is not None:
        if entry.tb_frame.f_globals.get("__name__", "").partition(".")[0] not in _HIDDEN:
            last = entry
        entry = entry.tb_next
    if last is None:
        error.__traceback__ = None
    else:
        last.tb_next = None


class _ErrorHook:
    """The `sys.excepthook` of the next uncaught exception. It passes the exception on to the hook before it."""

    def __init__(self, before: Callable[[type[BaseException], BaseException, TracebackType | None], object]) -> None:
        self._before = before

    def __call__(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if sys.excepthook is self:
            sys.excepthook = self._before
        drop_frames(error)
        if isinstance(error, GradpostError) and not _shows_all_frames():
            error.__cause__ = None  # the message has its text
        if isinstance(error, RunStopped | TrainerLost) and self._before is sys.__excepthook__:
            print(f"gradpost: {error}", file=sys.stderr)  # the line of the script that waited is not the cause
        else:
            self._before(kind, error, traceback)


def _shows_all_frames() -> bool:
    return os.environ.get("GRADPOST_LOG_LEVEL") == "debug"


# ---------------------------------------------------------------- the end of a script


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
