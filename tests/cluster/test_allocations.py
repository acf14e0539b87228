"""Memory: no step of a trainer is given a large piece of it, nor does a coordinator keep any for clients that leave.

Of trainers over HTTP/2; over HTTP/1.1 the blocks of a bucket are joined for every push. `topk` is left out: its choice
is torch's own and takes memory.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainer_client.testing import LocalCluster

from .allocation_script import ELEMENTS
from .trainer_processes import start_hosts

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.extended,
    pytest.mark.skipif(sys.platform != "linux", reason="counts the page faults of allocations by glibc"),
]
ALLOCATION_SCRIPT = Path(__file__).with_name("allocation_script.py")


# From here on glibc takes every piece from the kernel again, unless it has as much, and gives it back when it is freed;
# smaller ones, such as those in which gradients are quantised, it keeps.
LARGE_BYTES = 4 * ELEMENTS // 2 - 4096
KINDS: list[dict[str, Any]] = [
    {},
    {"push_type": "bfloat16", "pull_type": "bfloat16"},
    {"push_type": "int8", "pull_type": "int8"},
    {"max_grad_norm": 1.0},
    {"overlap": True, "accumulate_steps": 2},
    {"channels_last": True, "overlap": True, "overlap_pulls": True},
    {"channels_last": True, "local_steps": 2},
]
IN_A_RING: list[dict[str, Any]] = [
    {"overlap": True, "accumulate_steps": 2},
    {"overlap": True, "max_grad_norm": 1.0},
    {"channels_last": True},
]
RING = {"pservers": 0, "strategy": "ring"}


def run_hosts(cluster: LocalCluster, command: list[str], *, env: dict[str, str]) -> list[int]:
    return [host.wait(100) for host in start_hosts(cluster, command, **env)]


def per_pair(counts: list[int]) -> int:
    """Return the least of two steps: with local steps every second one pushes; what else touches pages only adds."""
    return min(map(sum, zip(counts[::2], counts[1::2], strict=True)))


@pytest.mark.overlap
@pytest.mark.parametrize(
    ("kinds", "settings", "run", "num_processes"),
    [
        (KINDS, {"local_transport": False}, LocalCluster.run_trainers, 2),
        pytest.param(IN_A_RING, RING, LocalCluster.run_trainers, 2, marks=pytest.mark.ring),
        pytest.param(
            [{}, {"overlap": True}, {"channels_last": True}],
            {},
            run_hosts,
            4,
            marks=[pytest.mark.soak, pytest.mark.hosts],
        ),
        ([{"channels_last": True}], {"max_delay": 1}, LocalCluster.run_trainers, 2),
    ],
    ids=["pservers", "ring", "hosts", "delay"],
)
def test_no_step_makes_a_large_buffer(
    kinds: list[dict[str, Any]], settings: dict[str, Any], run: Callable[..., list[int]], num_processes: int
) -> None:
    """No process takes a large piece of memory in a step; gloo does, in its own threads."""
    found: dict[str, dict[int, tuple[list[int], list[int]]]] = {}
    has_gloo = settings == RING or run is run_hosts

    def read(name: str, line: str) -> None:
        if name.startswith("trainer") and line.startswith("[{"):  # not a warning of torch
            kind, rank, fresh, tensors = json.loads(line)
            found.setdefault(str(kind), {})[rank] = (fresh, tensors)

    with LocalCluster(**{"pservers": 2, "trainers": 2, "lease_seconds": 5, "on_line": read, **settings}) as cluster:
        environment = {"MALLOC_MMAP_THRESHOLD_": str(LARGE_BYTES), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
        codes = run(cluster, [sys.executable, str(ALLOCATION_SCRIPT), json.dumps(kinds)], env=environment)
        assert codes == [0, 0], "\n".join(cluster.output)
    assert list(found) == [str(kind) for kind in kinds]
    for kind, processes in found.items():
        assert sorted(processes) == list(range(num_processes))
        for rank, (fresh, tensors) in processes.items():
            assert tensors  # the profiler sees the script's own
            assert max(tensors) < LARGE_BYTES, (kind, rank, tensors)
            assert has_gloo or per_pair(fresh) < LARGE_BYTES, (kind, rank, fresh)


def resident_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"process {pid} has no resident memory")


def ask(port: int) -> socket.socket:
    """Ask for the chart library, 4.8 MB, with a receive buffer of 4 KiB."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.settimeout(30)
    sock.connect(("127.0.0.1", port))
    sock.sendall(b"GET /dashboard/plotly.min.js HTTP/1.1\r\nHost: localhost\r\n\r\n")
    return sock


@pytest.mark.alone
def test_clients_that_read_one_byte_and_leave_take_no_memory() -> None:
    with LocalCluster(pservers=0, trainers=1, strategy="ring") as cluster:
        port, pid = int(cluster.address.rpartition(":")[2]), cluster.coordinator.pid
        with ask(port) as first:
            assert first.recv(1) == b"H"
        before = resident_bytes(pid)  # the library has been read and zipped
        for _ in range(150):
            socks = [ask(port) for _ in range(20)]
            for sock in socks:
                assert sock.recv(1) == b"H"
                sock.close()
        assert resident_bytes(pid) - before < 100 * 1024 * 1024
