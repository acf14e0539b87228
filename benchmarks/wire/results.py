"""The measurements on slow links, as a report and as JSON."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from ..report import PACKAGES, make_head
from .pairs import EIGHT_BITS, FLOAT32

MEGABIT, MEGABYTE = 1e6, 1e6
TARGET_MEGABITS, TARGET_RATIO = 100, 3.0

TEXT = """\
2 trainers and 2 pservers, each on a machine of its own: network namespaces on one bridge, every link
held to the rate in both directions by a token bucket (tc-tbf) on both of its ends. Synchronous mode, SGD, durability
`none`, {elements:g} M parameters in one tensor; computation is emulated, each trainer sleeps for {compute_ms:.0f} ms a
step. **Seconds a step** are those of trainer 0, that sleep included: {repetitions} × {steps} steps, each time after one
that is not counted; all types one after another. **Times as fast** compares with float32 of the same repetition. Bytes
are those of one trainer, counted by its interface, which sees packets before they are cut for the wire: headers of the
parts, up to 4 %, are not in them. **At least** is how long one link takes for them, one direction after the other, at
the rate of a plain transfer.

A trainer sends half of its gradients to each pserver, and each pserver receives from both trainers: with as many of one
as of the other every link carries the same, and all are the bottleneck at once. First the pushes fill the links from
trainers to pservers, then the pulls those back; the other direction is idle meanwhile. Rounding is real work, and the
machines share the processors of one: with more of these the seconds beyond "at least" would be fewer.

`topk` pushes 1 % of the elements. "Half frozen" is a model of two tensors, of which one gets no gradients.
"""


@dataclass(frozen=True)
class Run:
    """One run of trainer 0, step by step."""

    seconds: Sequence[float]
    sent_bytes: Sequence[float]
    received_bytes: Sequence[float]
    relative_error: float
    cpu_seconds: float


Runs: TypeAlias = Mapping[str, Sequence[Run]]  # by the name of a work, one a repetition


@dataclass(frozen=True)
class Rate:
    """The measurements at one rate."""

    megabits: int
    plain: Mapping[str, float]  # Mbit/s of a plain transfer, by direction
    runs: Runs

    def times_as_fast(self, name: str) -> float:
        """Return the speed-up over float32, the median of the repetitions."""
        pairs = zip(self.runs[str(FLOAT32)], self.runs[name], strict=True)
        return statistics.median(
            statistics.median(base.seconds) / statistics.median(run.seconds) for base, run in pairs
        )

    def least_seconds(self, name: str) -> float:
        """Return the time of the bytes on one link, one direction after the other."""
        moved = statistics.median(
            sent + received
            for run in self.runs[name]
            for sent, received in zip(run.sent_bytes, run.received_bytes, strict=True)
        )
        return 8 * moved / MEGABIT / min(self.plain.values())


def describe_plain(plain: Mapping[str, float]) -> str:
    return "A plain transfer over TCP reaches " + ", ".join(
        f"{megabits:.1f} Mbit/s from {direction}" for direction, megabits in plain.items()
    )


def make_table(rate: Rate) -> str:
    lines = [
        f"\n## {rate.megabits} Mbit/s\n",
        f"{describe_plain(rate.plain)}.\n",
        "| push / pull | seconds a step, median | range | at least | times as fast | MB sent | MB received |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for name, runs in rate.runs.items():
        seconds = [second for run in runs for second in run.seconds]
        sent = statistics.median(count for run in runs for count in run.sent_bytes)
        received = statistics.median(count for run in runs for count in run.received_bytes)
        cells = [
            name,
            f"{statistics.median(seconds):.3f}",
            f"{min(seconds):.3f} – {max(seconds):.3f}",
            f"{rate.least_seconds(name):.3f}",
            f"{rate.times_as_fast(name):.2f}",
            f"{sent / MEGABYTE:.2f}",
            f"{received / MEGABYTE:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def judge(rates: Sequence[Rate]) -> str:
    """Return the verdict on the target in one line, or nothing if it was not measured."""
    for rate in rates:
        if rate.megabits == TARGET_MEGABITS and str(EIGHT_BITS) in rate.runs:
            times = rate.times_as_fast(str(EIGHT_BITS))
            verdict = "met" if times >= TARGET_RATIO else "missed"
            return (
                f"\nTarget: at {TARGET_MEGABITS} Mbit/s 8 bits both ways are at least {TARGET_RATIO:g} times as fast "
                f"as float32: {times:.2f}, {verdict}.\n"
            )
    return ""


def make_report(rates: Sequence[Rate], options: argparse.Namespace) -> str:
    text = TEXT.format(
        elements=options.elements / 1e6,
        compute_ms=1000 * options.compute_seconds,
        steps=options.steps,
        repetitions=options.repetitions,
    )
    head = make_head("Fewer bytes on slow links", text.strip(), PACKAGES, where="in network namespaces")
    return head + judge(rates) + "".join(make_table(rate) for rate in rates)


def to_json(rates: Sequence[Rate]) -> list[dict[str, Any]]:
    return [{**asdict(rate), "times_as_fast": {name: rate.times_as_fast(name) for name in rate.runs}} for rate in rates]
