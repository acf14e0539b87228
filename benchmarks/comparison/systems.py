"""The systems: Gradpost as a local cluster, and peers as the programs in `benchmarks/peers`."""

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
LAST_LINES = 30  # of the output of a system that fails

Start: TypeAlias = Callable[[Work], Any]  # a context manager of a Contestant


@contextmanager
def start_ours(variant: Variant, name: str = OURS) -> Iterator[Contestant]:
    """Start a local cluster with these settings, by default over HTTP/2 and TCP."""
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
                time.sleep(0.1)  # pservers register at the coordinator alone
            contestant.note_idle()
            for rank in range(work.num_trainers):
                cluster.start_trainer(rank, command, env)
            with _noting_output(lambda: list(cluster.output)):
                contestant.wait_until_warm(lambda: all(child.is_running for child in cluster.trainers))
                yield contestant
        finally:
            contestant.close()


@contextmanager
def start_peer(
    work: Work, name: str, module: str, *roles: str, transport: str = "", spins: bool = False, keeps: bool = False
) -> Iterator[Contestant]:
    """Start the program of a peer, once for each server or trainer of `roles`.

    With `keeps`, malloc returns no memory to the kernel, as in our services.
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

        with _noting_output(lines):
            contestant.wait_until_warm(lambda: all(process.poll() is None for process in started))
            yield contestant


PEERS: dict[str, Start] = {
    "raw_sockets": lambda work: start_peer(work, "raw_sockets", "raw_sockets", "server", "trainer"),
    "bare_exchange": lambda work: start_peer(work, "bare_exchange", "bare_exchange", "server", "trainer"),
    "torch_rpc_tcp": lambda work: start_peer(work, "torch_rpc_tcp", "torch_rpc", "server", "trainer", transport="tcp"),
    # In each process a thread polls the shared memory without sleeping.
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
    """Return the first of so many consecutive free ports."""
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
    """Wait for processes that have finished their rounds, and kill the others."""
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
def _noting_output(lines: Callable[[], list[str]]) -> Iterator[None]:
    """Add the end of the system's output to an error."""
    try:
        yield
    except Exception as error:
        error.add_note("\n".join(lines()[-LAST_LINES:]))
        raise
