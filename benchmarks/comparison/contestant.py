"""A system that is measured: started, warm, and taking rounds on request."""

from __future__ import annotations

import json
import os
import re
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil

from .machines import Machine, count_sent_bytes
from .work import Work

START_SECONDS = 120.0
ROUNDS_SECONDS = 300.0  # for those of one repetition

SERVER, TRAINER = "server", "trainer"
_MARKS = {  # in the command lines of each role
    SERVER: ("-m services.", "--role server", "ray::Server"),
    TRAINER: ("benchmarks.comparison.trainer", "--role trainer", "ray::Trainer"),
}


@dataclass(frozen=True)
class Repetition:
    """Some rounds of one system."""

    seconds: float  # a round, the median of all trainers' rounds
    contributions_per_second: float  # of all trainers, each at its own pace
    cpu_seconds: dict[str, float]  # a round, by what the processes do
    wire_bytes: float  # a round, sent by all machines
    busy_cores: float = 0.0  # of the real machine, on average
    slow_seconds: float = 0.0  # the 99th percentile of all trainers' rounds

    def count_cpu_seconds(self, *roles: str) -> float:
        """Return the CPU-seconds of these roles in a round."""
        return sum(self.cpu_seconds.get(role, 0.0) for role in roles)


class Contestant:
    """One system, with a connection to each of its trainers."""

    def __init__(
        self,
        name: str,
        work: Work,
        machines: Collection[Machine],
        processes: Callable[[], list[psutil.Process]],
        *,
        spins: bool = False,
    ) -> None:
        """With `spins`, processes that busy-wait are stopped while other systems are measured."""
        self.name = name
        self._spins = spins
        self.work = work
        self._machines = {*machines}
        self._processes = processes
        self._folder = tempfile.TemporaryDirectory()
        self.control = f"{self._folder.name}/control"  # the Unix socket at which trainers report that they are warm
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.control)
        self._listener.listen()
        self._listener.settimeout(1.0)
        self._connections: list[socket.socket] = []
        self._lines: list[IO[str]] = []
        self._idle_bytes: dict[int, int] = {}  # by process

    def wait_until_warm(self, is_alive: Callable[[], bool]) -> None:
        """Wait until all trainers are warm. Raises RuntimeError if the system ends before, and TimeoutError."""
        deadline = time.monotonic() + START_SECONDS
        while len(self._lines) < self.work.num_trainers:
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                if time.monotonic() > deadline:
                    raise
                if not is_alive():
                    raise RuntimeError(f"{self.name} has ended before it was warm") from None
                continue
            connection.settimeout(ROUNDS_SECONDS)
            self._connections.append(connection)
            self._lines.append(connection.makefile("rw"))
        for lines in self._lines:
            self._read(lines)
        self._rest()

    def _rest(self) -> None:
        if self._spins:
            for process in self._processes():
                process.suspend()

    def _wake(self) -> None:
        if self._spins:
            for process in self._processes():
                process.resume()

    def take(self, num_rounds: int) -> Repetition:
        """Let it take so many rounds while all other systems wait. Raises RuntimeError if a trainer fails."""
        self._wake()
        cpu, wire = self._cpu_seconds(), self._sent_bytes()
        psutil.cpu_percent()  # the next call counts from here
        for lines in self._lines:
            print(num_rounds, file=lines, flush=True)
        answers = [self._read(lines) for lines in self._lines]
        spent = {role: seconds - cpu.get(role, 0.0) for role, seconds in self._cpu_seconds().items()}
        busy_cores = psutil.cpu_percent() / 100 * (os.cpu_count() or 1)
        wire = self._sent_bytes() - wire
        self._rest()
        rounds = sorted(seconds for answer in answers for seconds in answer["seconds"])
        return Repetition(
            seconds=statistics.median(rounds),
            slow_seconds=rounds[int(0.99 * len(rounds))],
            contributions_per_second=sum(num_rounds / sum(answer["seconds"]) for answer in answers),
            cpu_seconds={role: seconds / num_rounds for role, seconds in spent.items()},
            wire_bytes=wire / num_rounds,
            busy_cores=busy_cores,
        )

    def peak_bytes(self) -> dict[str, list[int]]:
        """Return the peak resident memory of each process, by role."""
        peaks: dict[str, list[int]] = {}
        for process in self._processes():
            peaks.setdefault(role_of(process), []).append(peak_of(process.pid))
        return peaks

    def note_idle(self) -> None:
        """Record the resident memory of all processes as that of an idle system."""
        self._idle_bytes = {process.pid: int(process.memory_info().rss) for process in self._processes()}

    def server_bytes_above_idle(self) -> int:
        """Return the largest peak of a server above its idle memory; 0 without a call of `note_idle`."""
        servers = [process.pid for process in self._processes() if role_of(process) == SERVER]
        return max((peak_of(pid) - self._idle_bytes[pid] for pid in servers if pid in self._idle_bytes), default=0)

    def close(self) -> None:
        """Close the connections, upon which the trainers end."""
        self._wake()
        for end in (*self._lines, *self._connections, self._listener):
            end.close()
        self._folder.cleanup()

    def _sent_bytes(self) -> int:
        return sum(map(count_sent_bytes, self._machines))

    def _read(self, lines: IO[str]) -> dict[str, Any]:
        line = lines.readline()
        if not line:
            raise RuntimeError(f"a trainer of {self.name} has failed")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _cpu_seconds(self) -> dict[str, float]:
        spent: dict[str, float] = {}
        for process in self._processes():
            times = process.cpu_times()
            role = role_of(process)
            spent[role] = spent.get(role, 0.0) + times.user + times.system
        return spent


def role_of(process: psutil.Process) -> str:
    command = " ".join(process.cmdline())
    return next((role for role, marks in _MARKS.items() if any(mark in command for mark in marks)), "other")


def peak_of(pid: int) -> int:
    """Return the peak resident memory of a process in bytes. Works on Linux."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found
    return 1024 * int(found[1])
