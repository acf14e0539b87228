"""A cluster with a machine for each process. By default the coordinator shares that of the first pserver."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from ps_config.environment import PREFIX
from trainer_client.testing import Child
from trainer_client.testing.guardian import Guardian
from trainer_client.testing.local_cluster import find_our_packages

from .machines import Machine
from .trainer import MEASURED

COORDINATOR_PORT, PSERVER_PORT = 7070, 7071
LAST_LINES = 40  # of all output, when something fails
TICK_SECONDS = 0.2


class WiredCluster:
    """Running services, and trainers on request. All processes end with this one."""

    def __init__(
        self, pservers: Sequence[Machine], trainers: Sequence[Machine], folder: Path, coordinator: Machine | None = None
    ) -> None:
        """Start the services. Without pservers the strategy is a ring, whose coordinator needs a machine."""
        home = coordinator or pservers[0]
        self._trainers = trainers
        self._folder = folder
        self._lines: deque[str] = deque(maxlen=LAST_LINES)
        self._measured: dict[str, dict[str, Any]] = {}
        self._guardian = Guardian()
        self._coordinator = f"http://{home.address}:{COORDINATOR_PORT}"
        numbers: dict[str, Any] = {"GRADPOST_NUM_TRAINERS": len(trainers)}
        numbers |= {"GRADPOST_NUM_PSERVERS": len(pservers)} if pservers else {"GRADPOST_STRATEGY": "ring"}
        self._services = [self._start_service("coordinator", home, COORDINATOR_PORT, "services.coordinator", numbers)]
        for index, machine in enumerate(pservers):
            own = {"GRADPOST_PSERVER_INDEX": index}
            self._services.append(
                self._start_service(f"pserver {index}", machine, PSERVER_PORT, "services.pserver", own)
            )

    def train(
        self, arguments: Sequence[str], seconds: float, module: str = "benchmarks.wire.trainer"
    ) -> list[dict[str, Any]]:
        """Run the module of the trainers to its end, and return their measurements in the order of ranks.

        Raises RuntimeError with the end of the output if a process fails or the time is over.
        """
        self._measured.clear()
        command = [sys.executable, "-P", "-m", module, *arguments]
        children = []
        try:
            for rank, machine in enumerate(self._trainers):
                own = {"RANK": rank, "WORLD_SIZE": len(self._trainers)}
                children.append(self._start(f"trainer {rank}", machine, command, own))
            self._wait_for(children, seconds)
        finally:
            for child in children:
                child.stop(grace_seconds=5)
        return [self._measured[child.name] for child in children]

    @property
    def pserver_pids(self) -> list[int]:
        """The process ids of the pservers, by index."""
        return [service.pid for service in self._services[1:]]

    def close(self) -> None:
        for service in reversed(self._services):
            service.stop(grace_seconds=5)
        self._guardian.close()

    def _wait_for(self, trainers: Sequence[Child], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while any(trainer.is_running for trainer in trainers):
            ended = [service for service in self._services if not service.is_running]
            if ended or time.monotonic() > deadline:
                raise RuntimeError(self._describe(f"{ended} ended" if ended else f"no end after {seconds:.0f} s"))
            time.sleep(TICK_SECONDS)
        if any(trainer.exit_code for trainer in trainers):
            raise RuntimeError(self._describe(f"{trainers} failed"))

    def _start_service(self, name: str, machine: Machine, port: int, module: str, own: dict[str, Any]) -> Child:
        settings = {
            "GRADPOST_HOST": machine.address,
            "GRADPOST_PORT": port,
            "GRADPOST_INSECURE": "true",  # the network is private
            "GRADPOST_LEASE_SECONDS": 60,
            "GRADPOST_STATE_DIR": self._folder / name.replace(" ", "-"),
            **({"GRADPOST_DURABILITY": "none"} if name == "coordinator" else {}),
        }
        return self._start(name, machine, [sys.executable, "-P", "-m", module], {**settings, **own})

    def _start(self, name: str, machine: Machine, command: Sequence[str], settings: dict[str, Any]) -> Child:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
        own = {"GRADPOST_COORDINATOR": self._coordinator, "OMP_NUM_THREADS": "1", **settings}
        return Child(
            name,
            [*machine.prefix, *command],
            env=find_our_packages({**inherited, **{name: str(value) for name, value in own.items()}}, first=True),
            on_line=self._line,
            guardian=self._guardian,
        )

    def _line(self, name: str, line: str) -> None:
        if line.startswith(MEASURED):
            self._measured[name] = json.loads(line.removeprefix(MEASURED))
        else:
            self._lines.append(f"[{name}] {line}")

    def _describe(self, what: str) -> str:
        return "\n".join([what, *self._lines])


@contextmanager
def started(
    pservers: Sequence[Machine], trainers: Sequence[Machine], coordinator: Machine | None = None
) -> Iterator[WiredCluster]:
    """Yield a cluster on these machines, and end it afterwards."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="gradpost-"))
        cluster = WiredCluster(pservers, trainers, Path(folder), coordinator)
        stack.callback(cluster.close)
        yield cluster
