"""Hosts on loopback, of two processes each: agents of torchrun, or processes with the environment that they set."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from torch.distributed import TCPStore

from trainer_client.testing import LocalCluster
from trainer_client.testing.processes import Child

from .trainer_processes import forkserver

NUM_HOSTS = 2
PROCESSES = 2  # of each
WORLD = NUM_HOSTS * PROCESSES
ROOT = str(Path(__file__).parents[2])


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def torchrun(host: int, port: int, *options: str) -> list[str]:
    """`python -m torch.distributed.run` is what torchrun is. The first host has the store of all, on this port."""
    of_all = [f"--nnodes={NUM_HOSTS}", f"--nproc-per-node={PROCESSES}", "--no-python"]
    where = [f"--node-rank={host}", "--master-addr=127.0.0.1", f"--master-port={port}"]
    return [sys.executable, "-m", "torch.distributed.run", *of_all, *where, *options]


def start_hosts(cluster: LocalCluster, command: list[str], **more: str) -> list[Child]:
    port = free_port()
    env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": ROOT, **more}
    return [cluster.start_trainer(host, [*torchrun(host, port), *command], env) for host in range(NUM_HOSTS)]


def torchrun_environment(rank: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun sets for one process; the first host's agent has a store on this port."""
    host, process = divmod(rank, PROCESSES)
    return {
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": str(WORLD),
        "LOCAL_RANK": str(process),
        "LOCAL_WORLD_SIZE": str(PROCESSES),
        "GROUP_RANK": str(host),
        "GROUP_WORLD_SIZE": str(NUM_HOSTS),
    }


def fork_hosts(work: Callable[..., None], of_all: Mapping[str, str], *arguments: object) -> list[int | None]:
    """Call `work(environment, *arguments)` in processes that have imported torch already; returns their exit codes."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # of the first host's agent
    processes = []
    for rank in range(WORLD):
        environment = {**of_all, **torchrun_environment(rank, store.port)}
        processes.append(forkserver.Process(target=work, args=(environment, *arguments), daemon=True))
        processes[-1].start()
    for process in processes:
        process.join(40)
        if process.exitcode is None:
            process.kill()
            process.join()
    return [process.exitcode for process in processes]
