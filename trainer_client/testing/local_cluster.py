"""A cluster of real processes on loopback: one coordinator, M pservers, and any number of trainers."""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from ps_config.certificates import client_files
from ps_config.environment import PREFIX, find_path, find_setting
from ps_config.hosts import authority, reachable_host, take_port
from ps_protocol.messages import ClusterStatus, RunSummary
from ps_protocol.vocabulary import Rank

from ..client.inspection import ClusterView
from .guardian import Guardian
from .processes import Child, Inherited, OnLine, find_our_packages, use_this_python

START_SECONDS = 60.0  # importing takes a second or two, and much longer on a busy machine
# Settings of the services that their trainers need as well.
_SHARED = ("GRADPOST_TLS_CA", "GRADPOST_TLS_CLIENT_CERT", "GRADPOST_TLS_CLIENT_KEY", "GRADPOST_TOKENS_DIR")
MAX_KEPT_LINES = 10_000
BACKLOG = 1024
_SERVING = re.compile(r'(?=.*"event": "serving").*"address": "([^"]+)"')  # the log of a service


class LocalCluster:
    """A cluster whose services run as `python -P -m services.…`, so that no folder called `services` shadows them.

        with LocalCluster(pservers=2, trainers=2, lease_seconds=1) as cluster:
            codes = cluster.run_trainers([sys.executable, "train.py"])

    With `strategy="ring"` there are no pservers, and `pservers` is 0.

    `settings` are those of the services (`mode="async"`, `round_timeout_seconds=2`, …); trainers get those of TLS
    and the `tokens_dir` as well. Without `state_dir` the state of the services is deleted in the end. All processes
    inherit `environ`, by default this process's environment without the settings of another cluster. Their output goes
    to `on_line`, and the newest lines stay in `output`. No process outlives this one, even after `kill -9`, nor does
    any process that a script has started.
    """

    def __init__(
        self,
        *,
        pservers: int = 2,
        trainers: int = 2,
        on_line: OnLine | None = None,
        environ: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> None:
        self.num_pservers = pservers
        self.num_trainers = trainers
        self.address = ""
        self.output: deque[str] = deque(maxlen=MAX_KEPT_LINES)
        self.pservers: list[Child] = []
        self.standbys: list[Child] = []
        self.follows: dict[Child, int] = {}  # the pserver that each standby was started for
        self._addresses: dict[Child, list[str]] = {}  # at which a service has logged that it serves
        self.trainers: list[Child] = []
        self._coordinator: Child | None = None
        self._environ = (
            {k: v for k, v in os.environ.items() if not k.startswith(PREFIX)} if environ is None else environ
        )
        self._settings = {f"{PREFIX}{name.upper()}": str(value) for name, value in settings.items()}
        self._own_state = None if "state_dir" in settings else tempfile.TemporaryDirectory(prefix="gradpost-")
        if self._own_state is not None:
            self._settings["GRADPOST_STATE_DIR"] = self._own_state.name
        self._on_line = on_line
        self._lock = threading.Lock()
        self._guardian: Guardian | None = None
        self._view: ClusterView | None = None

    def __repr__(self) -> str:
        children = [self._coordinator, *self.pservers, *self.trainers]
        return f"<LocalCluster [{self.address or 'not started'} | {[c for c in children if c is not None]}]>"

    @property
    def coordinator(self) -> Child:
        """The coordinator's process."""
        assert self._coordinator is not None, "the cluster has not been started"
        return self._coordinator

    @property
    def services(self) -> list[Child]:
        """The coordinator and the pservers, as far as they have been started."""
        return [*([] if self._coordinator is None else [self._coordinator]), *self.pservers]

    # ------------------------------------------------------------------ services

    def start(self) -> LocalCluster:
        """Start the services, and return once the coordinator serves. The pservers register when they are ready.

        Raises ListenError, and RuntimeError with the coordinator's output if it does not start.
        """
        self.launch()
        self.wait_for_coordinator()
        return self

    def launch(self) -> None:
        """Start the services without waiting. Connections to the coordinator are accepted at once, and answered later.

        Raises ListenError.
        """
        self._guardian = Guardian()
        self._spawn_coordinator(int(self._settings.get("GRADPOST_PORT", "0")))
        for index in range(self.num_pservers):
            self.start_pserver(index)

    def wait_for_coordinator(self, give_up: Callable[[], bool] = lambda: False) -> None:
        """Wait until the coordinator serves.

        Ends the cluster and raises RuntimeError with the coordinator's output if it does not start, or if `give_up`
        returns True meanwhile.
        """
        deadline = time.monotonic() + START_SECONDS
        while not self.find_address(self.coordinator):
            if not self.coordinator.is_running or give_up() or time.monotonic() > deadline:
                self.stop()
                raise RuntimeError("the coordinator did not start:\n" + "\n".join(self.output))
            time.sleep(0.02)

    def restart_coordinator(self, **env: Any) -> Child:
        """Start the coordinator again, once it has ended, with its state and its address."""
        self.coordinator.wait()
        # Only the first process resumes an earlier run; the next one continues with the processes of this run.
        self._spawn_coordinator(int(self.address.rpartition(":")[2]), **{"GRADPOST_RESUME": "false", **env})
        self.wait_for_coordinator()
        return self.coordinator

    def restart(self, service: Child) -> Child:
        """Start a service again that has ended. Raises as `start` if it is the coordinator and does not start."""
        if service is self._coordinator:
            return self.restart_coordinator()
        return self.start_pserver(self.pservers.index(service))

    def _spawn_coordinator(self, port: int, **env: Any) -> None:
        environ = {**self._environ, **self._settings}
        host = self._settings.get("GRADPOST_HOST", "127.0.0.1")
        with take_port(host, port) as bound:
            bound.listen(BACKLOG)
            scheme = "https" if find_setting("tls_cert", environ) else "http"
            self.address = f"{scheme}://{authority(reachable_host(host), bound.getsockname()[1])}"
            self._coordinator = self._spawn_service(
                "coordinator",
                "services.coordinator",
                pass_fds=(bound.fileno(),),
                GRADPOST_LISTEN_FD=str(bound.fileno()),
                GRADPOST_NUM_TRAINERS=str(self.num_trainers),
                **({"GRADPOST_NUM_PSERVERS": str(self.num_pservers)} if self.num_pservers else {}),
                **env,
            )

    def start_pserver(self, index: int, **env: Any) -> Child:
        """Start the pserver with this index, again if it has ended, with variables of its own."""
        own = {"GRADPOST_PORT": "0", "GRADPOST_PSERVER_INDEX": str(index), **env}
        child = self._spawn_service(f"pserver {index}", "services.pserver", **own)
        if index < len(self.pservers):
            self.pservers[index] = child
        else:
            self.pservers.append(child)
        return child

    def start_standby(self, index: int, **env: Any) -> Child:
        """Start a process that follows the pserver with this index."""
        own = {"GRADPOST_PORT": "0", "GRADPOST_FOLLOW": str(index), **env}
        child = self._spawn_service(f"standby of pserver {index}", "services.pserver", **own)
        self.standbys.append(child)
        self.follows[child] = index
        return child

    def exchange(self, index: int, standby: Child) -> None:
        """Rename a standby that has become a pserver. The process before it, if it still runs, follows it now."""
        former, self.pservers[index] = self.pservers[index], standby
        self.standbys.remove(standby)
        standby.name = f"pserver {index}"
        if former.is_running:
            former.name = f"standby of pserver {index}"
            self.standbys.append(former)
            self.follows[former] = index

    def find_address(self, service: Child) -> str:
        """Return the newest address of a service; empty until it serves."""
        return next(reversed(self._addresses[service]), "")

    def report_end(self, index: int, service: Child) -> None:
        """Report the end of the process of a pserver, or of a standby of it. Raises GradpostError."""
        if address := self.find_address(service):
            self.view.report_end(index, address)

    def _spawn_service(self, name: str, module: str, *, pass_fds: Sequence[int] = (), **env: Any) -> Child:
        logs = {"GRADPOST_LOG_FORMAT": "json", "GRADPOST_LOG_LEVEL": "info"}  # `handle_line` reads them
        env = {**self.environment(), **logs, "GRADPOST_HOST": "127.0.0.1", **self._settings, **env}
        if "GRADPOST_TOKENS_DIR" in env and "GRADPOST_TOKEN_FILE" not in self._settings:
            env.pop("GRADPOST_TOKEN_FILE", None)  # the token of trainers is not sufficient for a service
        addresses: list[str] = []

        def handle_line(name: str, line: str) -> None:
            if found := _SERVING.search(line):
                addresses.append(found[1])
            self._line(name, line)

        child = Child(
            name,
            [sys.executable, "-P", "-m", module],
            env=find_our_packages(env, first=True),
            on_line=handle_line,
            pass_fds=pass_fds,
            guardian=self._guardian,
        )
        self._addresses[child] = addresses
        return child

    def stop(self, grace_seconds: float = 10.0) -> dict[str, int]:
        """End all running processes, and return the exit code of every child by name."""
        children = [*self.trainers, *self.standbys, *reversed(self.services)]
        for child in children:
            child.signal(signal.SIGTERM)
        deadline = time.monotonic() + grace_seconds
        codes = {child.name: child.wait_or_kill(max(0.0, deadline - time.monotonic())) for child in children}
        if self._guardian is not None:
            self._guardian.close()
        if self._view is not None:
            self._view.close()
        if self._own_state is not None:
            self._own_state.cleanup()
        return codes

    def __enter__(self) -> LocalCluster:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    # ------------------------------------------------------------------ trainers

    def environment(self) -> dict[str, str]:
        """Return the environment of a process of this cluster, in which `python` is this process's interpreter."""
        env = use_this_python(self._environ)
        for name in ("RANK", "WORLD_SIZE", "GRADPOST_COORDINATOR"):
            env.pop(name, None)
        if self.address:
            env["GRADPOST_COORDINATOR"] = self.address
        return env | {name: self._settings[name] for name in _SHARED if name in self._settings}

    def start_trainer(
        self, rank: Rank, command: Sequence[str], env: Mapping[str, str] | None = None, inherits: Inherited = ()
    ) -> Child:
        """Start the trainer with this rank, again if it has ended. The first starts are in the order of ranks.

        It shares the streams of this process that it `inherits`.
        """
        own = {"RANK": str(rank), "WORLD_SIZE": str(self.num_trainers), **(env or {})}
        child = Child(
            f"trainer {rank}",
            command,
            env=find_our_packages({**self.environment(), **own}, first=False),
            on_line=self._line,
            guardian=self._guardian,
            inherits=inherits,
        )
        if rank < len(self.trainers):
            self.trainers[rank] = child
        else:
            self.trainers.append(child)
        return child

    def run_trainers(
        self, command: Sequence[str], timeout: float = 120, env: Mapping[str, str] | None = None
    ) -> list[int]:
        """Run all trainers with the same command to their end, and return their exit codes in the order of ranks."""
        started = [self.start_trainer(rank, command, env) for rank in range(self.num_trainers)]
        return [child.wait(timeout) for child in started]

    # ------------------------------------------------------------------ inspection

    def _line(self, name: str, line: str) -> None:
        with self._lock:
            self.output.append(f"[{name}] {line}")
        if self._on_line is not None:
            self._on_line(name, line)

    @property
    def view(self) -> ClusterView:
        """The inspection API of this cluster."""
        with self._lock:
            if self._view is None:
                environ = {**self._environ, **self._settings}
                folder = find_path("tokens_dir", environ)
                token_file = folder and folder / "admin"  # for `report_end`
                self._view = ClusterView(self.address, tls=client_files(environ), token_file=token_file)
            return self._view

    def status(self) -> ClusterStatus:
        """Return the status of the cluster."""
        return self.view.status()

    def summary(self) -> RunSummary:
        """Return the summary of the run."""
        return self.view.summary()
