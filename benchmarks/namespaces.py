"""Network namespaces as machines, for benchmarks and tests.

A namespace exists as long as a process in it. That process ends with its standard input, which the kernel closes even
after `kill -9` of this one.
"""

from __future__ import annotations

import ctypes
import subprocess
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

_CLONE_NEWNET = 0x40000000


class Namespace:
    """A network namespace and the process that keeps it. Commands run in it with `prefix`."""

    def __init__(self) -> None:
        self._keeper = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "echo; exec cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C on the terminal must not end it
        )  # fmt: skip
        assert self._keeper.stdout is not None
        if not self._keeper.stdout.readline():
            self.close()
            raise OSError("a network namespace cannot be created here")
        self.pid = self._keeper.pid
        self.prefix = ["nsenter", f"--net=/proc/{self.pid}/ns/net"]

    def run(self, command: str) -> None:
        """Run `ip` or `tc` in it. Raises OSError with its output."""
        run([*self.prefix, *command.split()])

    def enter(self) -> None:
        """Move the calling thread, and no other, into this namespace permanently."""
        with open(f"/proc/{self.pid}/ns/net") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns")

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function on a thread in this namespace, and return its result. A socket stays in its namespace."""
        outcome: list[T | BaseException] = []

        def work() -> None:
            try:
                self.enter()
                outcome.append(function(*arguments))
            except BaseException as error:
                outcome.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        [found] = outcome
        if isinstance(found, BaseException):
            raise found
        return found

    def close(self) -> None:
        self._keeper.communicate()  # closes its input


def run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
