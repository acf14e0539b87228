"""A replacement of `subprocess.Popen` for Child that forks a warm server where the command allows it."""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

SERVER = Path(__file__).with_name("server.py")
NUM_SERVERS = 2  # the order of sets differs between them, as between new processes
SET_CHILD_SUBREAPER = 36  # of <sys/prctl.h>
# Prefixes of variables that imports, or the first computation, read; and variables that are read later.
MATTERS = ("LD_", "OMP_", "MKL_", "OPENBLAS_", "TORCH", "ATEN_", "PYTHON")
DOES_NOT = ("PYTHONPATH", "PYTHONUNBUFFERED", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE")


class Order:
    """The parsed command line of Python. Raises ValueError if it needs a new interpreter."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], warm: Mapping[str, str]) -> None:
        """`warm` is the environment of the servers."""
        if command[0] != sys.executable or _what_matters(environment) != _what_matters(warm):
            raise ValueError
        self.environment = environment
        self.warnings: list[str] = []
        self.is_module = is_safe = False
        rest = list(command[1:])
        while rest and rest[0].startswith("-"):
            match rest:
                case ["-P", *rest]:
                    is_safe = True
                case ["-W", action, *rest]:
                    self.warnings.append(action)
                case ["-m", *rest]:
                    self.is_module = True
                    break
                case _:
                    raise ValueError
        if not rest:
            raise ValueError
        self.arguments = rest
        place = os.getcwd() if self.is_module else os.path.dirname(os.path.abspath(rest[0]))
        given = [folder for folder in environment.get("PYTHONPATH", "").split(os.pathsep) if folder]
        if any(os.path.exists(os.path.join(folder, "sitecustomize.py")) for folder in given):
            raise ValueError  # it would run before all imports
        self.path = [*([] if is_safe else [place]), *given]

    def packet(self, inherits: Sequence[int]) -> bytes:
        """Return the message to the server. The process inherits descriptors with these numbers."""
        more = {"environment": {**self.environment}, "folder": os.getcwd(), "inherits": inherits}
        return json.dumps({**vars(self), **more}).encode()


def _what_matters(environment: Mapping[str, str]) -> dict[str, str]:
    return {k: v for k, v in environment.items() if k.startswith(MATTERS) and k not in DOES_NOT}


class WarmProcess:
    """The part of `subprocess.Popen` that is used: a child of this process."""

    def __init__(self, pid: int, args: Sequence[str], stdout: IO[bytes]) -> None:
        self.pid = pid
        self.args = args
        self.stdout = stdout

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class WarmServers:
    """The servers, started with the first process and ended by `close`; or the one at the other end of `channel`."""

    def __init__(self, channel: socket.socket | None = None) -> None:
        self._given = channel
        self._lock = threading.Lock()
        self._environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self._servers: list[tuple[subprocess.Popen[bytes], socket.socket]] = []
        self._turns = itertools.cycle(range(NUM_SERVERS))

    def start(
        self, command: Sequence[str], *, env: Mapping[str, str], pass_fds: Sequence[int] = (), **others: Any
    ) -> Any:
        """Start a process, with the arguments of `subprocess.Popen`."""
        try:
            order = Order(command, env, self._environment)
        except ValueError:
            return subprocess.Popen(command, env=env, pass_fds=pass_fds, **others)
        read_end, write_end = os.pipe()
        try:
            with self._lock:
                channel = self._open()
                _adopt(True)
                try:
                    socket.send_fds(channel, [order.packet(pass_fds)], [write_end, *pass_fds])
                    pid = int(channel.recv(100))
                finally:
                    _adopt(False)
        finally:
            os.close(write_end)
        return WarmProcess(pid, command, os.fdopen(read_end, "rb"))

    def _open(self) -> socket.socket:
        if self._given is not None:
            return self._given
        while len(self._servers) < NUM_SERVERS:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                server = subprocess.Popen(
                    [sys.executable, str(SERVER), str(theirs.fileno())],
                    env={**self._environment, "PYTHONUNBUFFERED": "1"},
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            self._servers.append((server, ours))
        return self._servers[next(self._turns)][1]

    def close(self) -> None:
        for server, channel in self._servers:
            channel.close()
            server.wait()


def _adopt(is_on: bool) -> None:
    """Make this process the parent of orphaned descendants, or not."""
    ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, int(is_on), 0, 0, 0)
