"""A local cluster whose network, clocks and code can be disturbed."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from trainer_client.testing import Child, LocalCluster

from .proxy import Proxy
from .setup import Setup

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("trainer.py")
_FAKETIME = ("/usr/lib/*/faketime/libfaketimeMT.so.1", "/usr/*/lib/faketime/libfaketimeMT.so.1")


def find_libfaketime() -> Path | None:
    """Return the library that makes clocks jump (Debian's package libfaketime), if it is installed."""
    return next((path for pattern in _FAKETIME for path in Path("/").glob(pattern[1:])), None)


class ChaosCluster(LocalCluster):
    """A local cluster with a proxy before each service. The folder has the files of services and trainers."""

    def __init__(self, setup: Setup, folder: Path, *, sabotage: str | None, **arguments: Any) -> None:
        super().__init__(
            pservers=setup.num_pservers,
            trainers=setup.num_trainers,
            state_dir=folder / "state",
            environ={
                **{name: value for name, value in os.environ.items() if not name.startswith("GRADPOST_")},
                "PYTHONPATH": str(ROOT),
                "OMP_NUM_THREADS": "1",
                "CHAOS_SABOTAGE": sabotage or "",
            },
            **setup.settings,
            **arguments,
        )
        self.setup = setup
        self.folder = folder
        self.proxies = [Proxy(self.name_client, partial(self.find_port, i)) for i in range(setup.num_pservers)]
        self.coordinator_proxy = Proxy(self.name_client, lambda: int(self.address.rpartition(":")[2]))
        self.lives = [0] * setup.num_trainers
        self._faketime = find_libfaketime() if setup.fakes_time else None

    def stop(self, grace_seconds: float = 10.0) -> dict[str, int]:
        """See LocalCluster."""
        codes = super().stop(grace_seconds)
        for proxy in (*self.proxies, self.coordinator_proxy):
            proxy.close()
        return codes

    def environment(self) -> dict[str, str]:
        """See LocalCluster. Trainers and pservers reach the coordinator through its proxy."""
        env = super().environment()
        if self.address:
            env["GRADPOST_COORDINATOR"] = self.coordinator_proxy.address
        return env

    def restart_coordinator(self, **env: Any) -> Child:
        """Start the coordinator again at its address, without waiting until it serves: it may die before."""
        self._coordinator = self._spawn_service(
            "coordinator",
            "services.coordinator",
            GRADPOST_PORT=self.address.rpartition(":")[2],
            GRADPOST_NUM_PSERVERS=self.num_pservers,
            GRADPOST_NUM_TRAINERS=self.num_trainers,
            **env,
        )
        return self._coordinator

    def start_rank(self, rank: int) -> Child:
        """Start another incarnation of a trainer."""
        self.lives[rank] += 1
        command = [sys.executable, "-P", str(SCRIPT), str(self.folder), str(self.lives[rank])]
        return self.start_trainer(rank, command)

    def start_rival(self, index: int) -> Child:
        """Start a second process for a running pserver."""
        return self._spawn_service(f"rival of pserver {index}", "services.pserver", GRADPOST_PSERVER_INDEX=str(index))

    def clock_file(self, name: str) -> Path:
        """Return the file with the offset of a process's wall clock, in seconds with a sign."""
        return self.folder / f"clock of {name}"

    def place_file(self, name: str) -> Path:
        """Return the file that says what a service's place of checkpoints does: see `service.py`."""
        return self.folder / f"place of {name}"

    def log_file(self, name: str) -> Path:
        """Return the file that says what the log of a pserver does: see `service.py`."""
        return self.folder / f"log of {name}"

    def name_client(self, port: int) -> str:
        """Return the trainer with a connection from this port, or "another"."""
        for child in self.trainers:
            with contextlib.suppress(psutil.Error):  # it has just ended
                if any(one.laddr.port == port for one in psutil.Process(child.pid).net_connections("tcp")):
                    return child.name
        return "another"

    def find_port(self, index: int) -> int:
        """Return the port at which a pserver listens; 0 while it does not."""
        with contextlib.suppress(psutil.Error, IndexError):
            for one in psutil.Process(self.pservers[index].pid).net_connections("tcp"):
                if one.status == psutil.CONN_LISTEN:
                    return int(one.laddr.port)
        return 0

    def _spawn_service(self, name: str, module: str, *, pass_fds: Sequence[int] = (), **env: Any) -> Child:
        if name.startswith("pserver"):
            env["GRADPOST_ADVERTISE_ADDRESS"] = self.proxies[int(name.split()[1])].address
        place, log = self.place_file(name), self.log_file(name)
        place.touch()
        log.touch()
        env |= {"CHAOS_SERVICE": module, "CHAOS_PLACE": place, "CHAOS_LOG": log}
        env = {key: str(value) for key, value in env.items()} | self._clock_of(name)
        return super()._spawn_service(name, "tests.chaos.service", pass_fds=pass_fds, **env)

    def _clock_of(self, name: str) -> dict[str, str]:
        # Not for trainers: under libfaketime 0.9.10 a time.sleep of Python is refused (EINVAL).
        if self._faketime is None:
            return {}
        file = self.clock_file(name)
        if not file.exists():
            file.write_text("+0")
        return {
            "LD_PRELOAD": str(self._faketime),
            "FAKETIME_TIMESTAMP_FILE": str(file),
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_CACHE_DURATION": "1",
        }
