"""Memory of the trainer's hot path is made once: no step after the first ones is given any large piece of it.

Over HTTP/2; over HTTP/1.1 the blocks of a bucket are joined for every push. So it is with `topk`, whose choice is
torch's own and takes memory.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainer_client.testing import LocalCluster

from .allocation_script import ELEMENTS
from .torchrun import start_hosts

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.overlap,
    pytest.mark.extended,
    pytest.mark.skipif(sys.platform != "linux", reason="counts the page faults of allocations by glibc"),
]

SCRIPT = Path(__file__).with_name("allocation_script.py")
PARAMETER_BYTES = 4 * ELEMENTS
# From here on glibc takes every piece from the kernel anew, and gives it back when it is freed; smaller ones, such as
# those in which gradients are quantised, it keeps.
LARGE_BYTES = PARAMETER_BYTES // 2 - 4096
LARGE_IN_A_RING = PARAMETER_BYTES - 4096  # gloo takes two pieces of 1 MiB for each collective, whatever its size
FIRST_STEPS = 2  # with local steps the first push is in the second


def per_pair(counts: list[int]) -> float:
    """Of two steps, as a rule: with local steps only every second one pushes, and the kernel takes pages back, too."""
    return statistics.median(map(sum, zip(counts[FIRST_STEPS::2], counts[FIRST_STEPS + 1 :: 2], strict=True)))


KINDS: list[dict[str, Any]] = [
    {},
    {"overlap": True},
    {"overlap": True, "overlap_pulls": True},
    {"push_type": "bfloat16", "pull_type": "bfloat16"},
    {"push_type": "int8", "pull_type": "int8"},
    {"local_steps": 2},
    {"max_grad_norm": 1.0},
    {"overlap": True, "accumulate_steps": 2},
    {"channels_last": True},
    {"channels_last": True, "overlap": True, "overlap_pulls": True},
    {"channels_last": True, "local_steps": 2},
]
IN_HOSTS: list[dict[str, Any]] = [{}, {"overlap": True}, {"channels_last": True}]
IN_A_RING: list[dict[str, Any]] = [
    {},
    {"overlap": True, "accumulate_steps": 2},
    {"overlap": True, "max_grad_norm": 1.0},
    {"channels_last": True},
]


Run = Callable[[LocalCluster, list[str], dict[str, str]], list[int]]


def run_trainers(cluster: LocalCluster, command: list[str], environment: dict[str, str]) -> list[int]:
    return cluster.run_trainers(command, env=environment)


def run_hosts(cluster: LocalCluster, command: list[str], environment: dict[str, str]) -> list[int]:
    return [host.wait(100) for host in start_hosts(cluster, command, **environment)]


def measure(
    kinds: list[dict[str, Any]], large_bytes: int = LARGE_BYTES, *, run: Run = run_trainers, **settings: Any
) -> dict[str, list[int]]:
    """For each kind the counts of all steps; of all processes, which do the same, the smallest ones."""
    found: dict[str, list[int]] = {}

    def read(name: str, line: str) -> None:
        if name.startswith("trainer") and line.startswith("["):
            kind, counts = json.loads(line)
            others = found.get(str(kind), counts)
            found[str(kind)] = [min(pair) for pair in zip(counts, others, strict=True)]

    with LocalCluster(**{"pservers": 2, "trainers": 2, "lease_seconds": 5, "on_line": read, **settings}) as cluster:
        environment = {"MALLOC_MMAP_THRESHOLD_": str(large_bytes), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
        codes = run(cluster, [sys.executable, str(SCRIPT), json.dumps(kinds)], environment)
        assert codes == [0, 0], "\n".join(cluster.output)
    return found


def test_no_step_makes_a_large_buffer() -> None:
    found = measure(KINDS, local_transport=False)
    assert len(found) == len(KINDS)
    for kind, counts in found.items():
        assert per_pair(counts) < LARGE_BYTES, (kind, counts)


@pytest.mark.ring
def test_nor_does_a_ring() -> None:
    found = measure(IN_A_RING, LARGE_IN_A_RING, pservers=0, strategy="ring")
    assert len(found) == len(IN_A_RING)
    for kind, counts in found.items():
        assert per_pair(counts) < LARGE_IN_A_RING, (kind, counts)


@pytest.mark.hosts
def test_nor_do_hosts_of_several_processes() -> None:
    found = measure(IN_HOSTS, LARGE_IN_A_RING, run=run_hosts)
    assert len(found) == len(IN_HOSTS)
    for kind, counts in found.items():
        assert per_pair(counts) < LARGE_IN_A_RING, (kind, counts)


@pytest.mark.parametrize("kind", [{}, {"channels_last": True}], ids=str)
def test_nor_with_steps_that_are_delayed(kind: dict[str, Any]) -> None:
    [counts] = measure([kind], max_delay=1).values()
    assert per_pair(counts) < LARGE_BYTES, counts
