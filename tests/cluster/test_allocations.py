"""Memory of the trainer's hot path is made once: no step after the first ones is given any large piece of it.

Over HTTP/2; over HTTP/1.1 the blocks of a bucket are joined for every push. So it is with `topk`, whose choice is
torch's own and takes memory.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest

from trainer_client.testing import LocalCluster

from .allocation_script import ELEMENTS

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
]


def measure(kinds: list[dict[str, Any]], **settings: Any) -> dict[str, list[int]]:
    """For each kind the counts of all steps; of two trainers, who do the same, the smaller ones."""
    found: dict[str, list[int]] = {}

    def read(name: str, line: str) -> None:
        if name.startswith("trainer") and line.startswith("["):
            kind, counts = json.loads(line)
            others = found.get(str(kind), counts)
            found[str(kind)] = [min(pair) for pair in zip(counts, others, strict=True)]

    with LocalCluster(pservers=2, trainers=2, lease_seconds=5, on_line=read, **settings) as cluster:
        environment = {"MALLOC_MMAP_THRESHOLD_": str(LARGE_BYTES), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
        codes = cluster.run_trainers([sys.executable, str(SCRIPT), json.dumps(kinds)], env=environment)
        assert codes == [0, 0], "\n".join(cluster.output)
    return found


def test_no_step_makes_a_large_buffer() -> None:
    found = measure(KINDS, local_transport=False)
    assert len(found) == len(KINDS)
    for kind, counts in found.items():
        assert per_pair(counts) < LARGE_BYTES, (kind, counts)


def test_nor_with_steps_that_are_delayed() -> None:
    [counts] = measure([{}], max_delay=1).values()
    assert per_pair(counts) < LARGE_BYTES, counts
