"""`gradpost up` as a real process, and a look at everything it leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import gradpost

ROOT = Path(gradpost.__file__).parents[1]
PROGRAM = ROOT / "tests" / "warm" / "program.py"
SECONDS = 100  # a busy machine takes long to import torch four times
MARK = "UP_TEST_MARK"

# Without torch: it is up at once. It leaves a process behind, as a data loader might, and says so.
IDLE = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("ready", flush=True)
time.sleep(600)
"""

# A few rounds of real training; what it does in one of them is up to the test.
TRAIN = """
import os, signal, sys, time
import torch
from gradpost import RemoteOptimizer, connect

torch.set_num_threads(1)
session = connect()
print(f"rank {{session.rank}} of {{session.world_size}}, {{sys.executable}}")
model = torch.nn.Linear(8, 2)
optimizer = RemoteOptimizer(torch.optim.SGD(model.named_parameters(), lr=0.1))
for step in range({rounds}):
    optimizer.zero_grad()
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
    {in_each_round}
session.report(loss=loss.item(), accuracy=0.5)
"""


def train_script(folder: Path, *, rounds: int = 5, in_each_round: str = "pass") -> Path:
    script = folder / "train.py"
    script.write_text(TRAIN.format(rounds=rounds, in_each_round=in_each_round))
    return script


def clean_environment() -> dict[str, str]:
    """Return this process's environment without settings of another cluster."""
    return {k: v for k, v in os.environ.items() if not k.startswith("GRADPOST_")}


class RunningUp:
    """`gradpost up` with these arguments; on leaving the block it is killed if it has not ended.

    What it starts is forked from a warm server, and computes on one thread; if `cold` it is as a user has it.
    """

    def __init__(
        self,
        *arguments: object,
        folder: Path,
        stdin: int = subprocess.DEVNULL,
        stdout: int = subprocess.PIPE,
        cold: bool = False,
        **environ: str,
    ) -> None:
        self.mark = uuid.uuid4().hex
        is_cold = cold or sys.platform != "linux"
        program = ["-P", "-m", "gradpost"] if is_cold else [str(PROGRAM), "gradpost"]
        threads = {} if is_cold else {"OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, *program, "up", *map(str, arguments)],
            cwd=folder,
            env={**clean_environment(), "PYTHONPATH": str(ROOT), MARK: self.mark, **threads, **environ},
            stdin=stdin,
            stdout=stdout,
            stderr=subprocess.PIPE if stdout == subprocess.PIPE else stdout,
            text=True,
        )

    def __enter__(self) -> RunningUp:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()

    def finish(self) -> tuple[int, str, str]:
        """Wait for the end; returns exit code, stdout and stderr."""
        stdout, stderr = self.process.communicate(timeout=SECONDS)
        return self.process.returncode, stdout, stderr

    def wait_for(self, *lines: str) -> None:
        """Read stdout until each of these lines has come."""
        missing = set(lines)
        assert self.process.stdout is not None
        while missing:
            line = self.process.stdout.readline()
            assert line, f"the output ended before {missing}"
            missing.discard(line.rstrip("\n"))

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def left(self) -> dict[int, str]:
        """Return the command lines of all living processes that it has started, directly or not, by process id."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                environ, command = (folder / "environ").read_bytes(), (folder / "cmdline").read_bytes()
            except OSError:  # gone, or another's
                continue
            if f"{MARK}={self.mark}".encode() in environ.split(b"\0"):  # a zombie has none
                found[int(folder.name)] = command.replace(b"\0", b" ").decode()
        return found

    def has_left_nothing(self, seconds: float = 10) -> bool:
        """Return whether all of these are gone; a killed process needs a moment to die."""
        return wait_until(lambda: not self.left(), seconds)

    def pid_of(self, part: str) -> int:
        """Return the process whose command line holds this part."""
        [pid] = (pid for pid, command in self.left().items() if part in command)
        return pid


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
