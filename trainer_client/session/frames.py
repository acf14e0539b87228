"""`hide_frames`: the errors of Gradpost in a script, without frames that are not the script's."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from ps_config.environment import SettingsError
from ps_protocol.errors import GradpostError

P = ParamSpec("P")
T = TypeVar("T")


def hide_frames(method: Callable[P, T]) -> Callable[P, T]:
    """Raise the errors of Gradpost without the frames below this one, unless GRADPOST_LOG_LEVEL is `debug`."""

    @wraps(method)
    def call(*arguments: P.args, **options: P.kwargs) -> T:
        try:
            return method(*arguments, **options)
        except (GradpostError, SettingsError) as error:
            if os.environ.get("GRADPOST_LOG_LEVEL") == "debug":
                raise
            raise error.with_traceback(None) from None

    return call
