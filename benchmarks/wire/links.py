"""Step times and bytes of every wire type where links are slow: on machines of their own, as network namespaces are.

    python -m benchmarks.wire.links [--megabits 1000 100] [--elements 25000000] [--report FILE.md] [--json FILE]

Linux, root, `ip` and `tc` (iproute2). Nothing of the machine's own network is touched, and nothing is left behind. With
the defaults it takes some 15 minutes, most of them at 100 Mbit/s.
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

from ..report import add_report_option, publish
from .cluster import WiredCluster, started
from .ending import clean_up_when_told_to_end
from .machines import check_requirements, connected_machines
from .pairs import FLOAT32, PAIRS, Pair, parse_pair
from .results import MEGABIT, Rate, Run, describe_plain, make_report, to_json
from .transfer import measure_bits_per_second

PSERVERS, TRAINERS = 2, 2
WARM_UP_STEPS = 1
START_SECONDS = 120.0  # until the first step at most
MIN_SHARE = 0.9  # of its nominal rate that a link must carry
MAX_ERROR = 0.05  # of what comes out; `topk` has most of it still to push


@dataclass(frozen=True)
class Work:
    """What is on the wire, and of how much of the model."""

    pair: Pair
    is_half_frozen: bool = False

    @property
    def name(self) -> str:
        return f"{self.pair}{', half frozen' if self.is_half_frozen else ''}"


def measure(megabits: int, works: Sequence[Work], options: argparse.Namespace) -> Rate:
    """Raises OSError if there can be no machines, RuntimeError if a process fails or takes far too long."""
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
    """One run. Raises RuntimeError if what comes out is wrong, too."""
    arguments = ["--elements", str(options.elements), "--push", work.pair.push, "--pull", work.pair.pull]
    arguments += ["--compute-seconds", str(options.compute_seconds)]
    arguments += ["--warm-up", str(WARM_UP_STEPS), "--steps", str(options.steps)]
    arguments += ["--half-frozen"] if work.is_half_frozen else []
    step_seconds = options.compute_seconds + 2 * 32 * options.elements / MEGABIT / megabits
    measured, *_ = cluster.train(arguments, START_SECONDS + 3 * step_seconds * (options.steps + WARM_UP_STEPS + 1))
    run = Run(**measured)
    if work.pair.push != "topk" and not run.relative_error < MAX_ERROR:
        raise RuntimeError(f"{work.name} went elsewhere: {run.relative_error:.3f} of the way")
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabits", type=int, nargs="+", default=[1000, 100], help="a second, of each link")
    parser.add_argument("--elements", type=int, default=25_000_000, help="parameters")
    parser.add_argument("--compute-seconds", type=float, default=0.1, help="of emulated computation a step")
    parser.add_argument("--steps", type=int, default=5, help="that are measured in one run")
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument("--pairs", nargs="+", type=parse_pair, default=PAIRS, help="such as int8/bfloat16")
    parser.add_argument("--json", type=Path, help="write every step there")
    add_report_option(parser)
    options = parser.parse_args()
    try:
        check_requirements()
    except OSError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    clean_up_when_told_to_end()
    pairs = [FLOAT32, *(pair for pair in options.pairs if pair != FLOAT32)]
    works = [*(Work(pair) for pair in pairs), Work(FLOAT32, is_half_frozen=True)]
    rates = [measure(megabits, works, options) for megabits in options.megabits]
    publish(make_report(rates, options), options.report)
    if options.json is not None:
        options.json.write_text(json.dumps(to_json(rates), indent=2) + "\n")


if __name__ == "__main__":
    main()
