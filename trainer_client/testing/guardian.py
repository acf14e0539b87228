"""A small process that ends process groups once the process that started it has ended.

It is needed for `kill -9` of the parent, which runs no handler. The kernel's death signal (on Linux) reaches the
children, but not the processes that they have started.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

GRACE_SECONDS = 2.0  # between SIGTERM and SIGKILL


class Guardian:
    """The guard of process groups from `watch` to `forget`, until `close`. It may be used from several threads."""

    def __init__(self) -> None:
        # As a file and without site-packages: it starts in 20 ms, and no folder of the user can shadow a module.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,  # Ctrl-C on the terminal must not end it
        )
        self._lock = threading.Lock()

    def watch(self, group: int) -> None:
        """End this process group when the parent has ended."""
        self._tell(f"watch {group}")

    def forget(self, group: int) -> None:
        """Stop guarding a group that is empty: its number may be used again."""
        self._tell(f"forget {group}")

    def close(self) -> None:
        """End the guardian and the groups that it still guards. A second call does nothing."""
        assert self._process.stdin is not None
        with self._lock, contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()

    def _tell(self, line: str) -> None:
        pipe = self._process.stdin
        assert pipe is not None
        with self._lock, contextlib.suppress(BrokenPipeError):  # it was killed
            if not pipe.closed:
                pipe.write(line.encode() + b"\n")
                pipe.flush()


def _guard() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends with its parent
    groups: set[int] = set()
    for line in sys.stdin:  # until the other end of the pipe is closed: by the kernel, if the parent has ended
        verb, group = line.split()
        (groups.add if verb == "watch" else groups.discard)(int(group))
    _send(groups, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    while groups and time.monotonic() < deadline:
        time.sleep(0.02)
        _send(groups, 0)
    _send(groups, signal.SIGKILL)


def _send(groups: set[int], number: int) -> None:
    """Signal the groups (0 only tests that they exist), and drop those that have ended."""
    for group in tuple(groups):
        try:
            os.killpg(group, number)
        except ProcessLookupError:
            groups.discard(group)
        except PermissionError:  # by macOS, for a group of zombies
            pass


if __name__ == "__main__":
    _guard()
