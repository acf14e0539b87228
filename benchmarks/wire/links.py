"""Step times and bytes of every wire type on slow links, with network namespaces as machines.

    python -m benchmarks.wire.links [--megabits 1000 100] [--elements 25000000] [--report FILE.md] [--json FILE]

Needs Linux, root, `ip` and `tc` (iproute2). The machine's own network is not changed. With the defaults it takes 15
minutes, most of them at 100 Mbit/s.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..report import make_parser, publish
from .cluster import WiredCluster, started
from .machines import connected_machines, measure_bits_per_second, prepare
from .pairs import FLOAT32, PAIRS, Pair, parse_pair
from .results import MEGABIT, Rate, Run, describe_plain, make_report, to_json

PSERVERS, TRAINERS = 2, 2
WARM_UP_STEPS = 1
START_SECONDS = 120.0  # until the first step at most
MIN_SHARE = 0.9  # of its nominal rate that a link must carry
MAX_ERROR = 0.05  # of the result, except for `topk`, which has yet to push most of it


@dataclass(frozen=True)
class Work:
    """The wire types of a run, and whether half of the model is frozen."""

    pair: Pair
    is_half_frozen: bool = False

    @property
    def name(self) -> str:
        return f"{self.pair}{', half frozen' if self.is_half_frozen else ''}"


def measure(megabits: int, works: Sequence[Work], options: argparse.Namespace) -> Rate:
    """Measure at one rate. Raises OSError without machines, RuntimeError if a process fails or takes too long."""
    bits = int(megabits * MEGABIT)
    runs: dict[str, list[Run]] = defaultdict(list)
    with connected_machines(PSERVERS + TRAINERS, bits) as machines:
        pservers, trainers = machines[:PSERVERS], machines[PSERVERS:]
        plain = {
            "trainer to pserver": measure_bits_per_second(trainers[0], pservers[0], bits) / MEGABIT,
            "pserver to trainer": measure_bits_per_second(pservers[-1], trainers[-1], bits) / MEGABIT,
        }
        print(f"{megabits} Mbit/s: {describe_plain(plain)}", flush=True)
        if min(plain.values()) < MIN_SHARE * megabits:
            print(f"warning: less than {MIN_SHARE:.0%} of the rate: is the machine busy?", file=sys.stderr)
        with started(pservers, trainers) as cluster:
            for repetition in range(options.repetitions):
                for work in works:
                    run = take(cluster, work, megabits, options)
                    runs[work.name].append(run)
                    print(
                        f"{megabits} Mbit/s, {repetition + 1}/{options.repetitions}, {work.name}: "
                        f"{statistics.median(run.seconds):.2f} s a step",
                        flush=True,
                    )
    return Rate(megabits, plain, dict(runs))


def take(cluster: WiredCluster, work: Work, megabits: int, options: argparse.Namespace) -> Run:
    """Measure one run. Raises RuntimeError if its result is wrong or a process fails."""
    arguments = ["--elements", str(options.elements), "--push", work.pair.push, "--pull", work.pair.pull]
    arguments += ["--compute-seconds", str(options.compute_seconds)]
    arguments += ["--warm-up", str(WARM_UP_STEPS), "--steps", str(options.steps)]
    arguments += ["--half-frozen"] if work.is_half_frozen else []
    step_seconds = options.compute_seconds + 2 * 32 * options.elements / MEGABIT / megabits
    measured, *_ = cluster.train(arguments, START_SECONDS + 3 * step_seconds * (options.steps + WARM_UP_STEPS + 1))
    run = Run(**measured)
    if work.pair.push != "topk" and not run.relative_error < MAX_ERROR:
        raise RuntimeError(f"{work.name} has a wrong result: its relative error is {run.relative_error:.3f}")
    return run


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--megabits", type=int, nargs="+", default=[1000, 100], help="a second, of each link")
    parser.add_argument("--elements", type=int, default=25_000_000, help="parameters")
    parser.add_argument("--compute-seconds", type=float, default=0.1, help="of emulated computation a step")
    parser.add_argument("--steps", type=int, default=5, help="that are measured in one run")
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument("--pairs", nargs="+", type=parse_pair, default=PAIRS, help="such as int8/bfloat16")
    parser.add_argument("--json", type=Path, help="write every step there")
    options = parser.parse_args()
    prepare(parser)
    pairs = [FLOAT32, *(pair for pair in options.pairs if pair != FLOAT32)]
    works = [*(Work(pair) for pair in pairs), Work(FLOAT32, is_half_frozen=True)]
    rates = [measure(megabits, works, options) for megabits in options.megabits]
    publish(make_report(rates, options), options.report)
    if options.json is not None:
        options.json.write_text(json.dumps(to_json(rates), indent=2) + "\n")


if __name__ == "__main__":
    main()
