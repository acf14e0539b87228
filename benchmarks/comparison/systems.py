"""Starting each system: ours as a cluster of its own processes, peers as the programs in `benchmarks/peers`."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import psutil

from benchmarks.certificates import make_certificates
from trainer_client.testing import LocalCluster

from .cases import Variant
from .contestant import Contestant
from .paced import CONTROL
from .work import Work

ROOT = Path(__file__).parents[2]
OURS = "ours"
STOP_SECONDS = 20.0
KEEPING_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
LAST_LINES = 30  # of what a system printed, when it fails

Start: TypeAlias = Callable[[Work], Any]  # a context manager of a Contestant


@contextmanager
def start_ours(variant: Variant, name: str = OURS) -> Iterator[Contestant]:
    """A local cluster with these settings of the services, over HTTP/2 and TCP unless they say otherwise."""
    work = variant.work
    settings = {"durability": "none", "lease_seconds": 60, "local_transport": False, **variant.settings}
    command = [sys.executable, "-m", "benchmarks.comparison.trainer", "--work", work.dump()]

    def processes() -> list[psutil.Process]:
        return [psutil.Process(child.pid) for child in (*cluster.services, *cluster.trainers)]

    with ExitStack() as stack:
        if variant.is_secure:
            tls, _ = make_certificates(Path(stack.enter_context(tempfile.TemporaryDirectory())))
            settings |= tls
        cluster = LocalCluster(pservers=work.num_servers, trainers=work.num_trainers, **settings)
        stack.enter_context(cluster)
        contestant = Contestant(name, work, processes)
        try:
            env = {CONTROL: str(contestant.port), "PYTHONPATH": str(ROOT)}
            while len(cluster.status().pservers) < work.num_servers:
                time.sleep(0.1)  # they tell the coordinator alone that they are there
            contestant.note_idle()
            for rank in range(work.num_trainers):
                cluster.start_trainer(rank, command, env)
            with _telling(lambda: list(cluster.output)):
                contestant.wait_until_warm(lambda: all(child.is_running for child in cluster.trainers))
                yield contestant
        finally:
            contestant.close()


@contextmanager
def start_peer(
    work: Work, name: str, module: str, *roles: str, transport: str = "", spins: bool = False, keeps: bool = False
) -> Iterator[Contestant]:
    """The program of a peer: `roles` says once for each kind of process that it starts.

    With `keeps` their malloc gives nothing back to the kernel, as that of our services.
    """
    with ExitStack() as stack:
        output = stack.enter_context(tempfile.TemporaryFile("w+"))
        started: list[subprocess.Popen[bytes]] = []

        def processes() -> list[psutil.Process]:
            own = [psutil.Process(process.pid) for process in started]
            return own + [child for process in own for child in process.children(recursive=True)]

        contestant = Contestant(name, work, processes, spins=spins)
        stack.callback(_end, started)
        stack.callback(contestant.close)
        env = {**os.environ, CONTROL: str(contestant.port), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        env |= KEEPING_MALLOC if keeps else {}
        command = [sys.executable, "-m", f"benchmarks.peers.{module}", "--port", str(_free_ports(work.num_servers))]
        command += ["--work", work.dump(), "--transport", transport]
        for role in roles:
            number = {"server": work.num_servers, "trainer": work.num_trainers}.get(role, 1)
            started += [
                subprocess.Popen(
                    [*command, "--role", role, "--index", str(index)], cwd=ROOT, env=env, stdin=subprocess.DEVNULL,
                    stdout=output, stderr=subprocess.STDOUT,
                )
                for index in range(number)
            ]  # fmt: skip

        def lines() -> list[str]:
            output.seek(0)
            return output.read().splitlines()

        with _telling(lines):
            contestant.wait_until_warm(lambda: all(process.poll() is None for process in started))
            yield contestant


PEERS: dict[str, Start] = {
    "raw_sockets": lambda work: start_peer(work, "raw_sockets", "raw_sockets", "server", "trainer"),
    "torch_rpc_tcp": lambda work: start_peer(work, "torch_rpc_tcp", "torch_rpc", "server", "trainer", transport="tcp"),
    # Its shared memory is looked at by a thread that never sleeps, one in each process.
    "torch_rpc": lambda work: start_peer(work, "torch_rpc", "torch_rpc", "server", "trainer", spins=True),
    "torch_rpc_tcp_keeping": lambda work: start_peer(
        work, "torch_rpc_tcp_keeping", "torch_rpc", "server", "trainer", transport="tcp", keeps=True
    ),
    "torch_rpc_keeping": lambda work: start_peer(
        work, "torch_rpc_keeping", "torch_rpc", "server", "trainer", spins=True, keeps=True
    ),
    "gloo": lambda work: start_peer(work, "gloo", "gloo", "trainer"),
    "ray": lambda work: start_peer(work, "ray", "ray_actors", "all"),
}


def _free_ports(number: int) -> int:
    """The first of so many ports in a row that nobody uses now."""
    while True:
        with ExitStack() as stack:
            first = stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            try:
                for port in range(first + 1, first + number):
                    stack.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
            return int(first)


def _end(started: list[subprocess.Popen[bytes]]) -> None:
    """Those that have no more rounds to take end by themselves; the others are ended."""
    children = [child for process in started for child in _descendants(process)]
    for process in started:
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for child in children:
        if child.is_running():
            child.kill()


def _descendants(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    try:
        return list(psutil.Process(process.pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return []


@contextmanager
def _telling(lines: Callable[[], list[str]]) -> Iterator[None]:
    """Whoever fails inside tells what the system has printed."""
    try:
        yield
    except Exception as error:
        error.add_note("\n".join(lines()[-LAST_LINES:]))
        raise
