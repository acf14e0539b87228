"""A small process that ends process groups when the process that started it is gone, however it went.

The one remedy against `kill -9` of a parent: no handler of its own can run then, and what the kernel offers (a death
signal on Linux) reaches a child, but not what that child has started.
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
    """Guards process groups from `watch` to `forget`, until `close`. Safe to use from several threads."""

    def __init__(self) -> None:
        # As a file and without site-packages: it is up in 20 ms, and no folder of the user's can shadow anything.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,  # Ctrl-C on the terminal is not for it
        )
        self._lock = threading.Lock()

    def watch(self, group: int) -> None:
        """End this process group when the parent is gone."""
        self._tell(f"watch {group}")

    def forget(self, group: int) -> None:
        """The group is empty; its number may soon be another's."""
        self._tell(f"forget {group}")

    def close(self) -> None:
        """End the guardian, and what it still guards; safe to call twice."""
        assert self._process.stdin is not None
        with self._lock, contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()

    def _tell(self, line: str) -> None:
        pipe = self._process.stdin
        assert pipe is not None
        with self._lock, contextlib.suppress(BrokenPipeError):  # it was killed; that is no reason to fail
            if not pipe.closed:
                pipe.write(line.encode() + b"\n")
                pipe.flush()


def _guard() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends with its parent, not before
    groups: set[int] = set()
    for line in sys.stdin:  # until the pipe's other end is closed, which the kernel does for the dead
        verb, group = line.split()
        (groups.add if verb == "watch" else groups.discard)(int(group))
    _send(groups, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    while groups and time.monotonic() < deadline:
        time.sleep(0.02)
        _send(groups, 0)
    _send(groups, signal.SIGKILL)


def _send(groups: set[int], number: int) -> None:
    """Signal the groups (0 only looks) and drop those that are gone."""
    for group in tuple(groups):
        try:
            os.killpg(group, number)
        except ProcessLookupError:
            groups.discard(group)
        except PermissionError:  # macOS says so of a group of zombies
            pass


if __name__ == "__main__":
    _guard()
