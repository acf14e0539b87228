"""Hosts on loopback: each a real agent of torchrun with two processes."""

from __future__ import annotations

import socket
import sys

from trainer_client.testing import LocalCluster
from trainer_client.testing.processes import Child

NUM_HOSTS = 2
PROCESSES = 2  # of each


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def start_hosts(cluster: LocalCluster, *command: str, max_restarts: int = 0, **env: str) -> list[Child]:
    """`python -m torch.distributed.run` is what torchrun is. Its first host has the store of all."""
    port = free_port()
    options = [f"--nnodes={NUM_HOSTS}", f"--nproc-per-node={PROCESSES}", f"--max-restarts={max_restarts}"]
    where = ["--master-addr=127.0.0.1", f"--master-port={port}", "--monitor-interval=0.1"]
    return [
        cluster.start_trainer(
            host,
            [sys.executable, "-m", "torch.distributed.run", *options, f"--node-rank={host}", *where, *command],
            {"OMP_NUM_THREADS": "1", **env},
        )
        for host in range(NUM_HOSTS)
    ]
