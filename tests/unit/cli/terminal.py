"""A command on a terminal of its own, as a person sees it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time

from .conftest import ROOT

TIMEOUT_SECONDS = 30.0
LINES, COLUMNS = 30, 100


class Terminal:
    """`gradpost` with these arguments; ended at the end of the block."""

    def __init__(self, *arguments: str) -> None:
        self._main, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
        self.shown = ""  # without colours, and with one blank for several
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "gradpost", *arguments],
            env={
                **{name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")},
                **{"PYTHONPATH": str(ROOT), "TERM": "xterm-256color"},
            },
            stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that Ctrl-C is a signal
        )  # fmt: skip
        os.close(terminal)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._main)

    def wait_for(self, text: str) -> str:
        """Wait until this is written, and return all that was written from then on; what came before is forgotten."""
        give_up = time.monotonic() + TIMEOUT_SECONDS
        while text not in self.shown:
            self._read(give_up, text)
        self.shown = self.shown[self.shown.index(text) + len(text) :]
        return self.shown

    def type(self, keys: str) -> None:
        os.write(self._main, keys.encode())

    def wait(self) -> int:
        return self._process.wait(TIMEOUT_SECONDS)

    def _read(self, give_up: float, text: str) -> None:
        ready, _, _ = select.select([self._main], [], [], max(0.0, give_up - time.monotonic()))
        complaint = f"{text!r} was not written; this was: {self.shown[-2000:]!r}"
        assert ready, complaint
        try:
            written = os.read(self._main, 1 << 20).decode(errors="replace")
        except OSError:  # the process has ended
            raise AssertionError(complaint) from None
        self.shown = re.sub(r"\x1b\[[\d;]*m|(?<=\s)\s+", "", self.shown + written)
