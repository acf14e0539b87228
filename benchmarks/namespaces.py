"""Network namespaces for what wants machines of its own; also those of the tests.

A namespace lives as long as a process in it; the one that keeps it ends when its standard input does, which the kernel
sees to even after `kill -9`.
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
    """A network namespace and the process that keeps it; what `prefix` starts runs in it."""

    def __init__(self) -> None:
        self._keeper = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "echo; exec cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C on the terminal is not for it
        )  # fmt: skip
        assert self._keeper.stdout is not None
        if not self._keeper.stdout.readline():
            self.close()
            raise OSError("there can be no network namespace here")
        self.pid = self._keeper.pid
        self.prefix = ["nsenter", f"--net=/proc/{self.pid}/ns/net"]

    def run(self, command: str) -> None:
        """Run `ip` or `tc` in it. Raises OSError with what that said."""
        run([*self.prefix, *command.split()])

    def enter(self) -> None:
        """Take the calling thread, and no other, into this namespace for good."""
        with open(f"/proc/{self.pid}/ns/net") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns")

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """What a function returns on a thread in this namespace. A socket stays where it was made."""
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
