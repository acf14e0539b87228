"""The memory of a coordinator whose clients leave without reading what they asked for."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from trainer_client.testing import LocalCluster

pytestmark = [pytest.mark.cluster, pytest.mark.extended, pytest.mark.alone]

NUM_REQUESTS, AT_ONCE = 3000, 20
MAX_GROWN_BYTES = 100 * 1024 * 1024


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


def test_clients_that_read_one_byte_and_leave_take_no_memory() -> None:
    with LocalCluster(pservers=0, trainers=1, strategy="ring") as cluster:
        port, pid = int(cluster.address.rpartition(":")[2]), cluster.coordinator.pid
        with ask(port) as first:
            assert first.recv(1) == b"H"
        before = resident_bytes(pid)  # the library has been read and zipped
        for _ in range(NUM_REQUESTS // AT_ONCE):
            socks = [ask(port) for _ in range(AT_ONCE)]
            for sock in socks:
                assert sock.recv(1) == b"H"
                sock.close()
        assert resident_bytes(pid) - before < MAX_GROWN_BYTES
