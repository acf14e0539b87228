"""The processes of hosts, as torchrun starts them."""

from __future__ import annotations

import random
import socket
import sys
from contextlib import suppress

NUM_HOSTS = 2
PROCESSES = 2  # of each
WORLD = NUM_HOSTS * PROCESSES


def free_port() -> int:
    """Return a port that the system gives to no connection before it is used."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def torchrun(host: int, port: int, *options: str) -> list[str]:
    """Return the command of `torchrun`. The first host has the store of all, on this port."""
    of_all = [f"--nnodes={NUM_HOSTS}", f"--nproc-per-node={PROCESSES}", "--no-python"]
    where = [f"--node-rank={host}", "--master-addr=127.0.0.1", f"--master-port={port}"]
    return [sys.executable, "-m", "torch.distributed.run", *of_all, *where, *options]


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
