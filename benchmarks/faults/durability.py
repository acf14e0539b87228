"""The cost of each durability level and of TLS: seconds a round, as ratios to a run without both.

    python -m benchmarks.faults.durability [--megabytes 1 25] [--repetitions 5] [--report FILE.md]

2 trainers, 2 pservers, Adam. Variants are measured in turn, so that a change of the machine's speed affects all.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..certificates import make_certificates
from ..report import PACKAGES, describe_disk, make_head, make_parser, publish
from .observed import ObservedCluster

PLAIN = "none, plain"
VARIANTS = ("log", "fsync", "TLS", "mutual TLS")
WARM_UP_ROUNDS = 20  # in which the files of the log are created; later they are overwritten

TEXT = """\
2 trainers, 2 pservers, mode `sync`, Adam, everything on loopback. A figure is the median of {rounds} rounds of one run
after {warm_up} others; the tables show median and range of {repetitions} runs. A **ratio** is that of a run to the run
with durability `none` and without TLS of the same repetition. Nothing is computed, which is the worst case; the last
column is the share of a round that the variant would cost with {compute_ms:.0f} ms of computation in each, calculated
from the medians. Checkpoints are written as often as by default, concurrently with the rounds.
"""


@contextmanager
def make_variants() -> Iterator[dict[str, dict[str, Any]]]:
    """Yield the settings of each variant."""
    with tempfile.TemporaryDirectory() as folder:
        tls, shown = make_certificates(Path(folder))
        yield {
            PLAIN: {"durability": "none"},
            "log": {"durability": "log"},
            "fsync": {"durability": "fsync"},
            "TLS": {"durability": "none", **tls},
            "mutual TLS": {"durability": "none", **tls, **shown},
        }


def measure(megabytes: float, rounds: int, settings: Mapping[str, Any]) -> float:
    """Return the median seconds of a round of trainer 0."""
    arguments = ["--elements", str(int(megabytes * 250_000)), "--rounds", str(WARM_UP_ROUNDS + rounds)]
    with ObservedCluster(arguments, pservers=2, trainers=2, lease_seconds=30, **settings) as observed:
        codes = [trainer.wait(300) for trainer in observed.cluster.trainers]
        if any(codes):
            raise RuntimeError(f"trainers ended with {codes}")
        times = [step.at for step in observed.steps if step.rank == 0][WARM_UP_ROUNDS - 1 :]
    return statistics.median(later - earlier for earlier, later in itertools.pairwise(times))


def make_table(figures: Mapping[str, list[float]], compute_seconds: float) -> str:
    computed = f"with {1000 * compute_seconds:.0f} ms computed"
    lines = [
        f"| variant | ms a round, median | range | ratio, median | range | {computed} |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    base = statistics.median(figures[PLAIN])
    for name, seconds in figures.items():
        ratios = [one / plain for one, plain in zip(seconds, figures[PLAIN], strict=True)]
        median = statistics.median(seconds)
        lines.append(
            f"| {name} | {1000 * median:.1f} | {1000 * min(seconds):.1f} – {1000 * max(seconds):.1f} "
            f"| {statistics.median(ratios):.2f} | {min(ratios):.2f} – {max(ratios):.2f} "
            f"| {(median - base) / (base + compute_seconds):+.1%} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--variants", nargs="+", default=VARIANTS, choices=VARIANTS, help="beside the plain one")
    parser.add_argument("--megabytes", type=float, nargs="+", default=[1.0, 25.0], help="of the models' parameters")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=60, help="that are measured in one run")
    parser.add_argument("--compute-seconds", type=float, default=0.1, help="for the last column")
    options = parser.parse_args()
    text = TEXT.format(
        rounds=options.rounds,
        warm_up=WARM_UP_ROUNDS,
        repetitions=options.repetitions,
        compute_ms=1000 * options.compute_seconds,
    )
    report = make_head("The cost of durability and of TLS", text, PACKAGES, describe_disk())
    with make_variants() as variants:
        for megabytes in options.megabytes:
            figures: dict[str, list[float]] = defaultdict(list)
            for repetition in range(options.repetitions):
                for name in (PLAIN, *options.variants):
                    figures[name].append(measure(megabytes, options.rounds, variants[name]))
                    print(
                        f"{megabytes:g} MB, {repetition + 1}/{options.repetitions}, {name}: "
                        f"{1000 * figures[name][-1]:.1f} ms a round",
                        flush=True,
                    )
            report += f"\n## {megabytes:g} MB of parameters\n\n" + make_table(figures, options.compute_seconds)
    publish(report, options.report)


if __name__ == "__main__":
    main()
