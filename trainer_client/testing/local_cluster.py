"""A cluster of real processes on loopback: one coordinator, M pservers, and as many trainers as one likes."""

from __future__ import annotations

import os
import select
import signal
import ssl
import sys
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import httpx

from ps_protocol.messages import ClusterStatus, PserverState, RunSummary
from ps_protocol.routes import STATE, STATUS, SUMMARY

from .processes import Child, OnLine

START_SECONDS = 30.0


class LocalCluster:
    """Starts services with `python -P -m services.…`, so that a user's own `services` folder cannot shadow ours.

        with LocalCluster(pservers=2, trainers=2, lease_seconds=1) as cluster:
            codes = cluster.run_trainers([sys.executable, "train.py"])

    `settings` are those of the services (`server="uvicorn"`, `round_timeout_seconds=2`, …). Output goes to `on_line`,
    and is kept in `output` for the message of a failing test.
    """

    def __init__(self, *, pservers: int = 2, trainers: int = 2, on_line: OnLine | None = None, **settings: Any) -> None:
        self.num_pservers = pservers
        self.num_trainers = trainers
        self.address = ""
        self.output: list[str] = []
        self.coordinator: Child
        self.pservers: list[Child] = []
        self.trainers: list[Child] = []
        self._settings = {f"GRADPOST_{name.upper()}": str(value) for name, value in settings.items()}
        self._on_line = on_line
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        children = [self.coordinator, *self.pservers, *self.trainers] if self.address else []
        return f"<LocalCluster [{self.address or 'not started'} | {children}]>"

    # ------------------------------------------------------------------ life

    def start(self) -> LocalCluster:
        """Start the services; returns once the coordinator serves. The pservers register when they are ready."""
        read_fd, write_fd = os.pipe()
        try:
            self.coordinator = self._spawn_service(
                "coordinator",
                "services.coordinator",
                pass_fds=(write_fd,),
                GRADPOST_PORT=self._settings.get("GRADPOST_PORT", "0"),
                GRADPOST_READY_FD=str(write_fd),
                GRADPOST_NUM_PSERVERS=str(self.num_pservers),
                GRADPOST_NUM_TRAINERS=str(self.num_trainers),
            )
            os.close(write_fd)
            write_fd = -1
            self.address = self._read_address(read_fd)
        finally:
            os.close(read_fd)
            if write_fd != -1:
                os.close(write_fd)
        for index in range(self.num_pservers):
            self.start_pserver(index)
        return self

    def start_pserver(self, index: int) -> Child:
        """Start the pserver with this index."""
        child = self._spawn_service(
            f"pserver {index}", "services.pserver", GRADPOST_PORT="0", GRADPOST_PSERVER_INDEX=str(index)
        )
        self.pservers.append(child)
        return child

    def _spawn_service(self, name: str, module: str, pass_fds: Sequence[int] = (), **env: str) -> Child:
        return Child(
            name,
            [sys.executable, "-P", "-m", module],
            env={**self.environment(), **self._settings, **env},
            on_line=self._line,
            pass_fds=pass_fds,
            death_signal=signal.SIGTERM,
        )

    def _read_address(self, fd: int) -> str:
        ready, _, _ = select.select([fd], [], [], START_SECONDS)
        address = os.read(fd, 1000).decode().strip() if ready else ""
        if not address:
            self.stop()
            raise RuntimeError("the coordinator did not start:\n" + "\n".join(self.output))
        return address

    def stop(self) -> dict[str, int]:
        """End everything that still runs; returns the exit code of every child by name."""
        children = [*self.trainers, *self.pservers, *([self.coordinator] if hasattr(self, "coordinator") else [])]
        for child in children:
            child.signal(signal.SIGTERM)
        return {child.name: child.stop() for child in children}

    def __enter__(self) -> LocalCluster:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    # ------------------------------------------------------------------ trainers

    def environment(self) -> dict[str, str]:
        """The environment of a process that belongs to this cluster, without settings of another one."""
        env = {k: v for k, v in os.environ.items() if not k.startswith("GRADPOST_") and k not in ("RANK", "WORLD_SIZE")}
        env["PATH"] = os.path.dirname(sys.executable) + os.pathsep + env.get("PATH", "")
        if self.address:
            env["GRADPOST_COORDINATOR"] = self.address
        if "GRADPOST_TLS_CA" in self._settings:
            env["GRADPOST_TLS_CA"] = self._settings["GRADPOST_TLS_CA"]
        return env

    def start_trainer(self, rank: int, command: Sequence[str], env: Mapping[str, str] | None = None) -> Child:
        """Start one trainer process with this rank."""
        child = Child(
            f"trainer {rank}",
            command,
            env={**self.environment(), "RANK": str(rank), "WORLD_SIZE": str(self.num_trainers), **(env or {})},
            on_line=self._line,
        )
        self.trainers.append(child)
        return child

    def run_trainers(
        self, command: Sequence[str], timeout: float = 120, env: Mapping[str, str] | None = None
    ) -> list[int]:
        """Run all trainers with the same command to their end; returns their exit codes in the order of ranks."""
        started = [self.start_trainer(rank, command, env) for rank in range(self.num_trainers)]
        return [child.wait(timeout) for child in started]

    # ------------------------------------------------------------------ looking

    def _line(self, name: str, line: str) -> None:
        with self._lock:
            self.output.append(f"[{name}] {line}")
        if self._on_line is not None:
            self._on_line(name, line)

    def status(self) -> ClusterStatus:
        """How the cluster stands."""
        return ClusterStatus.model_validate_json(self._get(self.address + STATUS))

    def summary(self) -> RunSummary:
        """The run in a few numbers."""
        return RunSummary.model_validate_json(self._get(self.address + SUMMARY))

    def pserver_state(self, index: int, *, digest: bool = False) -> PserverState:
        """What pserver `index` tells about itself."""
        address = next(p.address for p in self.status().pservers if p.index == index)
        return PserverState.model_validate_json(self._get(f"{address}{STATE}?digest={str(digest).lower()}"))

    def _get(self, url: str) -> bytes:
        verify: Any = self._settings.get("GRADPOST_TLS_CA", True)
        if isinstance(verify, str):
            verify = ssl.create_default_context(cafile=verify)
        response = httpx.get(url, timeout=10, trust_env=False, verify=verify)
        response.raise_for_status()
        return response.content
