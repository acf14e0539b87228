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
# From here on glibc takes every piece from the kernel anew, unless it has as much, and gives it back when it is freed;
# smaller ones, such as those in which gradients are quantised, it keeps.
LARGE_BYTES = 4 * ELEMENTS // 2 - 4096


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


def check(
    kinds: list[dict[str, Any]],
    *,
    run: Run = run_trainers,
    num_processes: int = 2,
    has_gloo: bool = False,
    **settings: Any,
) -> None:
    """No process takes a large piece of memory in a step; gloo does, in its own threads."""
    found: dict[str, dict[int, tuple[list[int], list[int]]]] = {}

    def read(name: str, line: str) -> None:
        if name.startswith("trainer") and line.startswith("[{"):  # not a warning of torch
            kind, rank, fresh, tensors = json.loads(line)
            found.setdefault(str(kind), {})[rank] = (fresh, tensors)

    with LocalCluster(**{"pservers": 2, "trainers": 2, "lease_seconds": 5, "on_line": read, **settings}) as cluster:
        environment = {"MALLOC_MMAP_THRESHOLD_": str(LARGE_BYTES), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
        codes = run(cluster, [sys.executable, str(SCRIPT), json.dumps(kinds)], environment)
        assert codes == [0, 0], "\n".join(cluster.output)
    assert list(found) == [str(kind) for kind in kinds]
    for kind, processes in found.items():
        assert sorted(processes) == list(range(num_processes))
        for rank, (fresh, tensors) in processes.items():
            assert tensors  # the profiler sees the script's own
            assert max(tensors) < LARGE_BYTES, (kind, rank, tensors)
            assert has_gloo or per_pair(fresh) < LARGE_BYTES, (kind, rank, fresh)


def per_pair(counts: list[int]) -> float:
    """Of two steps, as a rule: with local steps only every second one pushes, and the kernel takes pages back, too."""
    return statistics.median(map(sum, zip(counts[::2], counts[1::2], strict=True)))


def test_no_step_makes_a_large_buffer() -> None:
    check(KINDS, local_transport=False)


@pytest.mark.ring
def test_nor_does_a_ring() -> None:
    check(IN_A_RING, has_gloo=True, pservers=0, strategy="ring")


@pytest.mark.soak
@pytest.mark.hosts
def test_nor_do_hosts_of_several_processes() -> None:
    check(IN_HOSTS, run=run_hosts, num_processes=4, has_gloo=True)


@pytest.mark.parametrize("kind", [pytest.param({}, marks=pytest.mark.soak), {"channels_last": True}], ids=str)
def test_nor_with_steps_that_are_delayed(kind: dict[str, Any]) -> None:
    check([kind], max_delay=1)
