"""Child processes that do not outlive their parent, with their output line by line."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence

OnLine = Callable[[str, str], None]  # (name of the child, one line of its output without the newline)

_PR_SET_PDEATHSIG = 1


class Child:
    """One process in a process group of its own; stdout and stderr go to `on_line` from a thread.

    On Linux the kernel ends it when the thread that started it dies, so that not even `kill -9` of the parent
    leaves orphans: start children from a thread that lives as long as they do.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        on_line: OnLine,
        pass_fds: Sequence[int] = (),
        death_signal: signal.Signals = signal.SIGKILL,
    ) -> None:
        self.name = name
        self._process = subprocess.Popen(
            command,
            env={**env, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=pass_fds,
            preexec_fn=_die_with_parent(death_signal, os.getpid()),
        )
        self._pump = threading.Thread(target=self._pump_lines, args=(on_line,), name=f"output of {name}", daemon=True)
        self._pump.start()

    def __repr__(self) -> str:
        code = self._process.poll()
        return f"<Child {self.name} [pid {self.pid} | {'running' if code is None else f'exit code {code}'}]>"

    @property
    def pid(self) -> int:
        """Process id, also of the group."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.poll() is None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end, its output included, and return the exit code; negative for a signal.

        Raises subprocess.TimeoutExpired.
        """
        code = self._process.wait(timeout)
        self._pump.join(timeout=5)
        return code

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the whole group; nothing if it has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def stop(self, grace_seconds: float = 10.0) -> int:
        """SIGTERM, then SIGKILL after the grace; returns the exit code."""
        self.signal(signal.SIGTERM)
        try:
            code = self.wait(grace_seconds)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
            code = self.wait()
        self.signal(signal.SIGKILL)  # what is left of the group
        return code

    def _pump_lines(self, on_line: OnLine) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for line in output:
                on_line(self.name, line.decode(errors="replace").rstrip("\r\n"))


def _die_with_parent(number: signal.Signals, parent: int) -> Callable[[], None] | None:
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl  # looked up before the fork

    def set_death_signal() -> None:
        prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
        if os.getppid() != parent:  # it died before we asked
            os._exit(1)

    return set_death_signal
