"""The cost of a step for each machine, with pservers and with a ring: bytes of its interface, processor time.

    python -m benchmarks.wire.strategies [--megabits 1000] [--elements 12500000] [--report FILE.md]

Needs Linux, root, `ip` and `tc` (iproute2). The machine's own network is not changed. With the defaults it takes 5
minutes.

Each cluster trains three times: to warm up, a few steps, and more steps. The difference between the last two is divided
by the number of additional steps, which excludes start, initial values and heartbeats.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil

from ..report import PACKAGES, make_head, make_parser, publish
from .cluster import WiredCluster, started
from .machines import Machine, connected_machines, count_bytes, prepare

MEGABIT = 1_000_000
BYTES = 4  # of an element
FEW_STEPS = 2
LAYERS = 4
MAX_ERROR = 1e-3
START_SECONDS = 120.0

TEXT = """\
SGD, {elements} elements of float32 in four layers, nothing overlapped, every process on a machine of its own: network
namespaces on one bridge, every link held to {megabits:g} Mbit/s each way by a token bucket. Bytes are those of the
machines' interfaces, headers and acknowledgements included, and processor time that of their processes; of one machine
and one step, means of {steps} steps and of the machines with the same role. Seconds are medians of trainer 0's steps;
all machines share these processors. **Off** is the largest difference of these machines' bytes, in either direction,
from the formula: 2 (N - 1) S / N for a trainer of a ring, S for one with pservers, N S / M for a pserver."""

# Trainers and pservers; 0 of these: a ring.
SHAPES = [(2, 0), (3, 0), (4, 0), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)]


@dataclass(frozen=True)
class Node:
    """The cost of a step for one machine, and its bytes in one direction by the formula."""

    role: str
    out_bytes: float
    in_bytes: float
    cpu_seconds: float
    formula_bytes: float

    @property
    def error(self) -> float:
        """The larger relative difference to the formula of both directions."""
        return max(abs(one / self.formula_bytes - 1) for one in (self.out_bytes, self.in_bytes))


@dataclass(frozen=True)
class Cost:
    """The cost of a step of one cluster."""

    num_trainers: int
    num_pservers: int
    num_bytes: int  # S
    seconds: float
    nodes: tuple[Node, ...]


def formula(role: str, num_bytes: int, num_trainers: int, num_pservers: int) -> float:
    """Return the bytes in each direction of one machine in one step.

    >>> formula("trainer", 120, 3, 0), formula("trainer", 120, 3, 2), formula("pserver", 120, 3, 2)
    (160.0, 120, 180.0)
    """
    if role == "pserver":
        return num_trainers * num_bytes / num_pservers
    return num_bytes if num_pservers else 2 * (num_trainers - 1) * num_bytes / num_trainers


def measure(num_trainers: int, num_pservers: int, bits: int, elements: int, steps: int) -> Cost:
    """Measure one cluster. Raises OSError without machines, RuntimeError if a process fails or takes too long."""
    with cluster_of(num_trainers, num_pservers, bits) as (cluster, pservers, trainers):
        _train(cluster, elements, FEW_STEPS)
        before = _look(pservers + trainers, cluster)
        few = _train(cluster, elements, FEW_STEPS)
        between = _look(pservers + trainers, cluster)
        many = _train(cluster, elements, FEW_STEPS + steps)
        after = _look(pservers + trainers, cluster)
    if max(trainer["relative_error"] for trainer in many) > MAX_ERROR:
        raise RuntimeError("the trainers have a wrong result")
    num_bytes, nodes = BYTES * elements, []
    for i in range(num_pservers + num_trainers):
        role = "pserver" if i < num_pservers else "trainer"
        out, in_ = (
            ((after[0][i][way] - between[0][i][way]) - (between[0][i][way] - before[0][i][way])) / steps
            for way in (0, 1)
        )
        if role == "pserver":
            cpu = ((after[1][i] - between[1][i]) - (between[1][i] - before[1][i])) / steps
        else:
            cpu = (many[i - num_pservers]["cpu_seconds"] - few[i - num_pservers]["cpu_seconds"]) / steps
        nodes.append(Node(role, out, in_, cpu, formula(role, num_bytes, num_trainers, num_pservers)))
    seconds = statistics.median(many[0]["seconds"][FEW_STEPS:])
    return Cost(num_trainers, num_pservers, num_bytes, seconds, tuple(nodes))


@contextmanager
def cluster_of(
    num_trainers: int, num_pservers: int, bits: int
) -> Iterator[tuple[WiredCluster, list[Machine], list[Machine]]]:
    """Yield a cluster whose coordinator has its own machine, so that its few bytes are not counted."""
    with connected_machines(1 + num_pservers + num_trainers, bits) as machines:
        pservers, trainers = machines[1 : 1 + num_pservers], machines[1 + num_pservers :]
        with started(pservers, trainers, machines[0]) as cluster:
            yield cluster, pservers, trainers


def _train(cluster: WiredCluster, elements: int, steps: int) -> list[dict[str, Any]]:
    arguments = ["--elements", str(elements), "--layers", str(LAYERS), "--steps", str(steps)]
    return cluster.train(arguments, START_SECONDS + 60.0 * steps)


def _look(machines: Sequence[Machine], cluster: WiredCluster) -> tuple[list[tuple[int, int]], list[float]]:
    """Return the bytes of every machine and the processor seconds of every pserver until now."""
    cpu = [psutil.Process(pid).cpu_times() for pid in cluster.pserver_pids]
    return [machine.call(count_bytes) for machine in machines], [times.user + times.system for times in cpu]


def describe(cost: Cost) -> str:
    """Return a row of a Markdown table for each role."""
    rows = []
    for role in ("trainer", "pserver"):
        nodes = [node for node in cost.nodes if node.role == role]
        if not nodes:
            continue
        out, in_, cpu = (
            statistics.mean(getattr(node, name) for node in nodes) for name in ("out_bytes", "in_bytes", "cpu_seconds")
        )
        kind = f"ring of {cost.num_trainers}" if not cost.num_pservers else (
            f"{cost.num_trainers} trainers, {cost.num_pservers} pserver{'s' if cost.num_pservers > 1 else ''}"
        )  # fmt: skip
        rows.append(
            f"| {kind} | {role} | {nodes[0].formula_bytes / 1e6:.1f} | {out / 1e6:.1f} | {in_ / 1e6:.1f} | "
            f"{max(node.error for node in nodes):.1%} | {cpu:.2f} | {cost.seconds:.2f} |"
        )
    return "\n".join(rows)


HEAD = """| cluster | machine | formula, MB each way | MB out | MB in | off by at most | CPU s | s a step |
|---|---|--:|--:|--:|--:|--:|--:|"""


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--megabits", type=float, default=1000, help="a second, of each link")
    parser.add_argument("--elements", type=int, default=12_500_000, help="parameters")
    parser.add_argument("--steps", type=int, default=5, help="that are measured")
    options = parser.parse_args()
    prepare(parser)
    text = TEXT.format(elements=f"{options.elements:,}", megabits=options.megabits, steps=options.steps)
    # Before the measurement: its commit is what is measured.
    head = make_head("The cost of a step with pservers and in a ring", text, PACKAGES, where="in network namespaces")
    rows = []
    for num_trainers, num_pservers in SHAPES:
        bits = int(options.megabits * MEGABIT)
        rows.append(describe(measure(num_trainers, num_pservers, bits, options.elements, options.steps)))
        print(rows[-1], file=sys.stderr, flush=True)
    publish("\n".join([head, HEAD, *rows, ""]), options.report)


if __name__ == "__main__":
    main()
