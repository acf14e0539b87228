"""The systems: Gradpost as a local cluster, and peers as the programs in `benchmarks/peers`."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import psutil

from benchmarks.certificates import make_certificates
from trainer_client.testing import Child, LocalCluster
from trainer_client.testing.guardian import Guardian

from .cases import Variant
from .contestant import Contestant
from .machines import Machine
from .paced import CONTROL
from .work import Work

ROOT = Path(__file__).parents[2]
OURS = "ours"
STOP_SECONDS = 20.0
KEEPING_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
LAST_LINES = 30  # of the output of a system that fails

Start: TypeAlias = Callable[[str, Work, Sequence[Machine]], AbstractContextManager[Contestant]]


def find_machines(role: str, work: Work, machines: Sequence[Machine]) -> Sequence[Machine]:
    """Return the machines of a role: servers have the first ones, trainers the next. Of others there is one."""
    servers, trainers = work.num_servers, work.num_trainers
    return {"server": machines[:servers], "trainer": machines[servers : servers + trainers]}.get(role, machines[:1])


class PlacedCluster(LocalCluster):
    """A local cluster with a machine for each pserver. The coordinator shares the first one."""

    def __init__(self, machines: Sequence[Machine], **settings: Any) -> None:
        super().__init__(pservers=len(machines), host=machines[0].address, insecure=True, **settings)
        self._machines = machines

    def start_pserver(self, index: int, **env: Any) -> Child:
        machine = self._machines[index]
        return machine.call(super().start_pserver, index, GRADPOST_HOST=machine.address, **env)


@contextmanager
def start_ours(name: str, variant: Variant, machines: Sequence[Machine]) -> Iterator[Contestant]:
    """Start a cluster with these settings, by default over HTTP/2 and TCP."""
    work = variant.work
    settings = {"durability": "none", "lease_seconds": 60, "local_transport": False, **variant.settings}
    command = [sys.executable, "-m", "benchmarks.comparison.trainer", "--work", work.dump()]

    def processes() -> list[psutil.Process]:
        return [psutil.Process(child.pid) for child in (*cluster.services, *cluster.trainers)]

    with ExitStack() as stack:
        servers = find_machines("server", work, machines)
        if variant.is_secure:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            tls, _ = make_certificates(folder, *{machine.address for machine in servers})
            settings |= tls
        cluster = PlacedCluster(servers, trainers=work.num_trainers, **settings)
        stack.callback(cluster.stop)
        servers[0].call(cluster.start)
        contestant = Contestant(name, work, machines, processes)
        stack.callback(contestant.close)
        while len(servers[0].call(cluster.status).pservers) < work.num_servers:
            time.sleep(0.1)  # pservers register at the coordinator alone
        contestant.note_idle()
        env = {CONTROL: contestant.control, "PYTHONPATH": str(ROOT)}
        env |= {f"GRADPOST_{name.upper()}": str(value) for name, value in variant.trainer_settings.items()}
        for rank, machine in enumerate(find_machines("trainer", work, machines)):
            machine.call(cluster.start_trainer, rank, command, env)
        with _noting(cluster.output):
            contestant.wait_until_warm(lambda: all(child.is_running for child in cluster.trainers))
            yield contestant


@contextmanager
def start_peer(
    name: str,
    work: Work,
    machines: Sequence[Machine],
    *,
    module: str,
    roles: Sequence[str],
    transport: str = "",
    spins: bool = False,
    keeps: bool = False,
) -> Iterator[Contestant]:
    """Start the program of a peer, once for each server or trainer of `roles`.

    With `keeps`, malloc returns no memory to the kernel, as in our services.
    """
    with ExitStack() as stack:
        output: deque[str] = deque(maxlen=LAST_LINES)
        guardian = Guardian()
        stack.callback(guardian.close)
        started: list[Child] = []

        def processes() -> list[psutil.Process]:
            own = [psutil.Process(child.pid) for child in started]
            return own + [child for process in own for child in process.children(recursive=True)]

        contestant = Contestant(name, work, machines, processes, spins=spins)
        stack.callback(_end, started)
        stack.callback(contestant.close)
        env = {**os.environ, CONTROL: contestant.control, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        env |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"), machines[0].interface)
        env |= KEEPING_MALLOC if keeps else {}
        meeting = find_machines(roles[0], work, machines)
        at = [f"{one.address}:{port}" for one, port in zip(meeting, _free_ports(len(meeting)), strict=True)]
        command = [sys.executable, "-m", f"benchmarks.peers.{module}", "--at", *at]
        command += ["--work", work.dump(), "--transport", transport]
        for role in roles:
            for index, machine in enumerate(find_machines(role, work, machines)):
                own = [*command, "--role", role, "--index", str(index)]
                started.append(
                    machine.call(
                        Child, f"{role} {index}", own, env=env, guardian=guardian,
                        on_line=lambda name, line: output.append(f"[{name}] {line}"),
                    )
                )  # fmt: skip
        with _noting(output):
            contestant.wait_until_warm(lambda: all(child.is_running for child in started))
            yield contestant


BOTH = ("server", "trainer")
PEERS: dict[str, Start] = {
    "raw_sockets": partial(start_peer, module="raw_sockets", roles=BOTH),
    "bare_exchange": partial(start_peer, module="bare_exchange", roles=BOTH),
    "torch_rpc_tcp": partial(start_peer, module="torch_rpc", roles=BOTH, transport="tcp"),
    # In each process a thread polls the shared memory without sleeping.
    "torch_rpc": partial(start_peer, module="torch_rpc", roles=BOTH, spins=True),
    "torch_rpc_tcp_keeping": partial(start_peer, module="torch_rpc", roles=BOTH, transport="tcp", keeps=True),
    "torch_rpc_keeping": partial(start_peer, module="torch_rpc", roles=BOTH, spins=True, keeps=True),
    "gloo": partial(start_peer, module="gloo", roles=("trainer",)),
    "gloo_ddp": partial(start_peer, module="gloo", roles=("trainer",), transport="ddp"),
    "ray": partial(start_peer, module="ray_actors", roles=("all",)),
}


def _free_ports(number: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]
        return [int(one.getsockname()[1]) for one in sockets]


def _end(started: Sequence[Child]) -> None:
    """Wait for the trainers, which end with their connections, and end the servers."""
    deadline = time.monotonic() + STOP_SECONDS
    for child in started:
        if not child.name.startswith("server"):
            child.wait_or_kill(max(0.0, deadline - time.monotonic()))
    for child in started:
        child.stop()


@contextmanager
def _noting(output: Iterable[str]) -> Iterator[None]:
    """Add the end of the system's output to an error."""
    try:
        yield
    except Exception as error:
        error.add_note("\n".join([*output][-LAST_LINES:]))
        raise
