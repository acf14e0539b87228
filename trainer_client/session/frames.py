"""The errors of Gradpost in a script: their tracebacks end with the script's own line.

GRADPOST_LOG_LEVEL=debug shows all frames.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import wraps
from types import TracebackType
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

    @wraps(method)
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
