"""Child processes with all processes that they start, and their output line by line."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from signal import SIGKILL, SIGTERM, Signals
from typing import Literal

from .guardian import Guardian

Inherited = Collection[Literal["stdin", "output"]]  # the streams of this process that a child shares
OnLine = Callable[[str, str], None]  # (name of the child, one line of its output without the newline)

LINGER_SECONDS = 0.5  # for output of other processes of the group, once the child itself has ended
MAX_LINE_BYTES = 64 * 1024

start_process: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen  # replaced by a faster one in tests


class Child:
    """A process in a session and process group of its own. The rest of its group is killed when it has ended.

    A thread passes the lines of stdout and stderr to `on_line`. Of a line that was overwritten with carriage returns
    (a progress bar) it passes only the visible part. Instead, the process may inherit stdin, and stdout and stderr. A
    `guardian` ends the group if this process is killed.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        on_line: OnLine,
        pass_fds: Sequence[int] = (),
        guardian: Guardian | None = None,
        inherits: Inherited = (),
    ) -> None:
        self.name = name
        self._on_line = on_line
        self._guardian = guardian
        self.exit_code: int | None = None
        self._ended = threading.Event()
        self._lock = threading.Lock()  # held while signalling and while reaping
        self._process = start_process(
            command,
            env={**env, "PYTHONUNBUFFERED": "1"},
            stdin=None if "stdin" in inherits else subprocess.DEVNULL,
            stdout=None if "output" in inherits else subprocess.PIPE,
            stderr=None if "output" in inherits else subprocess.STDOUT,
            start_new_session=True,
            pass_fds=pass_fds,
        )
        if guardian is not None:
            guardian.watch(self.pid)
        self._pump = threading.Thread(target=self._pump_lines, name=f"output of {name}", daemon=True)
        self._pump.start()
        threading.Thread(target=self._await_end, name=f"end of {name}", daemon=True).start()

    def __repr__(self) -> str:
        state = "running" if self.exit_code is None else f"exit code {self.exit_code}"
        return f"<Child {self.name} [pid {self.pid} | {state}]>"

    @property
    def pid(self) -> int:
        """The id of the process, which is also that of its group."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """True until the process has ended."""
        return not self._ended.is_set()

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process and of its output, and return the exit code, which is negative for a signal.

        Raises subprocess.TimeoutExpired.
        """
        if not self._ended.wait(timeout):
            assert timeout is not None
            raise subprocess.TimeoutExpired(self._process.args, timeout)
        assert self.exit_code is not None
        return self.exit_code

    def signal(self, number: Signals) -> None:
        """Send a signal to the whole group, unless the process has ended."""
        with self._lock:
            if self.exit_code is None:
                self._signal_group(number)

    def stop(self, grace_seconds: float = 10.0) -> int:
        """Send SIGTERM, and SIGKILL after `grace_seconds`; return the exit code."""
        self.signal(SIGTERM)
        return self.wait_or_kill(grace_seconds)

    def wait_or_kill(self, grace_seconds: float) -> int:
        """Wait for the end, send SIGKILL after `grace_seconds`, and return the exit code."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(grace_seconds)
        self.signal(SIGKILL)
        return self.wait()

    def _signal_group(self, number: Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS refuses a group of zombies
            os.killpg(self.pid, number)

    def _await_end(self) -> None:
        if hasattr(os, "waitid"):  # macOS has it from Python 3.13 on
            # Not reaped yet: as long as it is a zombie, the number of its group cannot be used again.
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        else:
            self._process.wait()
        self._pump.join(LINGER_SECONDS)
        with self._lock:
            self._signal_group(SIGKILL)
            self.exit_code = self._process.wait()
        self._pump.join(LINGER_SECONDS)  # a process that left the group may keep the pipe open
        if self._guardian is not None:
            self._guardian.forget(self.pid)
        self._ended.set()

    def _pump_lines(self) -> None:
        if self._process.stdout is None:  # inherited
            return
        rest = b""
        with self._process.stdout as output:
            while chunk := output.read1(MAX_LINE_BYTES):  # type: ignore[attr-defined]
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    self._emit(line)
                if len(rest) > MAX_LINE_BYTES:
                    self._emit(rest)
                    rest = b""
        if rest:
            self._emit(rest)

    def _emit(self, line: bytes) -> None:
        visible = line.rstrip(b"\r").rpartition(b"\r")[2]
        self._on_line(self.name, visible.decode(errors="replace"))


_ROOT = str(Path(__file__).parents[2])  # the folder that holds our packages


def use_this_python(environ: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of the environment in which `python` is this process's interpreter."""
    folder = os.path.dirname(sys.executable)
    return {**environ, "PATH": folder + os.pathsep + environ.get("PATH", os.defpath)}


def find_our_packages(environ: Mapping[str, str], *, first: bool) -> dict[str, str]:
    """Return a copy of the environment in which Python finds our packages, also in a checkout that is not installed.

    They come `first` for a service, so that nothing on the PYTHONPATH shadows `services`, and last for a script.
    """
    given = environ.get("PYTHONPATH")
    if not given and _ROOT in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        return {**environ}
    parts = [part for part in ([_ROOT, given] if first else [given, _ROOT]) if part]
    return {**environ, "PYTHONPATH": os.pathsep.join(parts)}
