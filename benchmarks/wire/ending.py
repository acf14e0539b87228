"""An end that cleans up, whoever asks for it."""

from __future__ import annotations

import signal
import sys


def clean_up_when_told_to_end() -> None:
    """From now on SIGTERM and SIGHUP leave all `with` blocks of the main thread."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
