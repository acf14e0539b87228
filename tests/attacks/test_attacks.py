"""A pserver under attack goes on serving, changes nothing and takes no memory; `benchmarks/attacks` measures it."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator

import psutil
import pytest
import pytest_asyncio

from benchmarks.attacks.arena import MIB, Arena, open_arena
from benchmarks.attacks.attacker import ATTACKS
from trainer_client.testing import LocalCluster

from ..soaking import is_soaking, parametrize_sampled

pytestmark = [pytest.mark.cluster, pytest.mark.extended, pytest.mark.alone, pytest.mark.asyncio(loop_scope="module")]

# The benchmark measures; here the machine may be doing anything else at the same time, so that a ratio of two p99 says
# little. What does not hold is off by far more: by gigabytes, and seconds.
MAX_P99_SECONDS, MAX_P99_RATIO = 0.3, 4
MAX_GROWN_BYTES = 160 * MIB  # bodies and replies may take 64 MiB each
MAX_GROWN_BYTES_BY = {"large_headers_unread": 16 * MIB}  # of 24 MB that a request no longer needs
MAX_KEPT_BYTES = 96 * MIB  # of these, by the C library
MAX_KEPT_AGAIN_BYTES = 24 * MIB

# An attack is longer than the time that slow clients have.
ATTACK_SECONDS, CALM_SECONDS, SLOW_SECONDS = (4, 1, 2) if is_soaking() else (2.5, 0.5, 1)
TIMES = {"header_timeout_seconds": SLOW_SECONDS, "body_timeout_seconds": SLOW_SECONDS}

# Whose connections or requests the server has to end by itself; one of these says so.
ENDED = {
    "rapid_reset": "GOAWAY ENHANCE_YOUR_CALM",
    "continuation_flood": "GOAWAY ENHANCE_YOUR_CALM",
    "empty_frames": "GOAWAY ENHANCE_YOUR_CALM",
    "settings_flood": "GOAWAY ENHANCE_YOUR_CALM",
    "ping_flood": "GOAWAY ENHANCE_YOUR_CALM",
    "priority_flood": "GOAWAY ENHANCE_YOUR_CALM",
    "made_you_reset": "GOAWAY PROTOCOL_ERROR|GOAWAY ENHANCE_YOUR_CALM",
    "data_after_end": "GOAWAY PROTOCOL_ERROR|RST_STREAM STREAM_CLOSED",
    "zero_window": "connection closed",
    "large_headers_unread": "connection closed",
    "silent_connections": "connection closed",
    "slow_headers": "connection closed",
    "slow_bodies": "408",
}

SAMPLE = ("rapid_reset", "zero_window", "slow_bodies")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def arena() -> AsyncIterator[Arena]:
    async with open_arena(**TIMES) as arena:
        yield arena


@parametrize_sampled("name", ATTACKS, SAMPLE)
async def test_an_attack_is_harmless(arena: Arena, name: str) -> None:
    verdict = await arena.judge(name, ATTACK_SECONDS, CALM_SECONDS)
    assert verdict.num_failed == 0, verdict
    assert verdict.state_is_unchanged
    assert verdict.p99_during < max(MAX_P99_SECONDS, MAX_P99_RATIO * verdict.p99_before), verdict
    assert verdict.grown_bytes < MAX_GROWN_BYTES_BY.get(name, MAX_GROWN_BYTES), verdict
    assert verdict.kept_bytes < MAX_KEPT_BYTES, verdict
    assert any(end in verdict.outcome for end in ENDED.get(name, "").split("|")), verdict


@parametrize_sampled("name", ["zero_window", "slow_readers", "slow_bodies"], ["slow_readers"])
async def test_the_same_once_more_takes_no_more_memory(arena: Arena, name: str) -> None:
    await arena.judge(name, ATTACK_SECONDS, CALM_SECONDS)
    verdict = await arena.judge(name, ATTACK_SECONDS, CALM_SECONDS)
    assert verdict.kept_bytes < MAX_KEPT_AGAIN_BYTES, verdict


async def test_too_many_connections_are_refused_and_do_not_stay() -> None:
    """All places are taken by silent connections; a good client gets one when their time is over."""
    async with open_arena(max_connections=50, **TIMES) as arena:
        verdict = await arena.judge("silent_connections", 2 * ATTACK_SECONDS, CALM_SECONDS)
    assert verdict.state_is_unchanged
    assert verdict.grown_bytes < MAX_GROWN_BYTES


def ask_for_charts(port: int) -> socket.socket:
    """Ask for the chart library, 4.8 MB, with a receive buffer of 4 KiB, and read one byte of it."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.settimeout(30)
    sock.connect(("127.0.0.1", port))
    sock.sendall(b"GET /dashboard/plotly.min.js HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert sock.recv(1) == b"H"
    return sock


async def test_clients_that_read_one_byte_and_leave_take_no_memory() -> None:
    with LocalCluster(pservers=0, trainers=1, strategy="ring") as cluster:
        process = psutil.Process(cluster.coordinator.pid)
        port = int(cluster.address.rpartition(":")[2])
        ask_for_charts(port).close()
        before = process.memory_info().rss  # the library has been read and zipped
        for _ in range(150):
            for sock in [ask_for_charts(port) for _ in range(20)]:
                sock.close()
        assert process.memory_info().rss - before < 100 * MIB
