"""The share of pushes and pulls that overlaps with computation, on links as slow as the computation is long.

    python -m benchmarks.wire.overlap [--model ResNet-50] [--backward 0.1 0.8 …] [--report FILE.md] [--plot FILE.png]

Needs Linux, root, `ip` and `tc` (iproute2). The machine's own network is not changed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..placement import MODELS, model_parameters
from ..report import PACKAGES, make_head, make_parser, publish
from .cluster import WiredCluster, started
from .machines import connected_machines, prepare
from .overlapped import WAYS
from .results import MEGABIT

PSERVERS, TRAINERS = 2, 2
WARM_UP_STEPS = 2
START_SECONDS = 120.0  # until the first step at most
MAX_ERROR = 1e-3
LABELS = {"none": "nothing overlaps", "pushes": "`overlap`", "both": "`overlap` and `overlap_pulls`"}

TEXT = """\
2 trainers and 2 pservers, each on a machine of its own: network namespaces on one bridge, every link held to
{megabits} Mbit/s in both directions by a token bucket. Synchronous mode, SGD, durability `none`, float32, the {tensors}
tensors of {model} ({millions:.1f} M parameters). Computation is a sleep, as on a GPU: of the same length in each layer
with a matrix, {forward:g} s in a forward pass. Seconds a step are medians of {repetitions} × {steps} steps of
trainer 0; the ways take turns. The time that **can be hidden** is min(push, backward) + min(pull, forward) of the
steps without overlap; the **hidden** time is the reduction of a step. It may exceed 100 %, as pushes and pulls go in
opposite directions and overlap with each other, too.
"""


@dataclass(frozen=True)
class Point:
    """Median seconds with one duration of backward, by way, and the network's seconds without overlap."""

    forward: float
    backward: float
    steps: Mapping[str, float]
    push: float
    pull: float

    @property
    def hideable(self) -> float:
        return min(self.push, self.backward) + min(self.pull, self.forward)

    def hidden(self, way: str) -> float:
        """Return the hidden time as a share of the time that can be hidden."""
        return (self.steps["none"] - self.steps[way]) / self.hideable


def measure(cluster: WiredCluster, backward: float, options: argparse.Namespace) -> Point:
    """Measure all ways. Raises RuntimeError if a process fails, takes too long, or has a wrong result."""
    found: dict[str, list[Mapping[str, Sequence[float]]]] = defaultdict(list)
    num_bytes = sum(4 * spec.num_elements for spec in model_parameters(options.model))
    step_seconds = options.forward + backward + 16 * num_bytes / MEGABIT / options.megabits
    limit = START_SECONDS + 3 * step_seconds * (options.steps + WARM_UP_STEPS)
    for repetition in range(options.repetitions):
        for way in WAYS:
            arguments = ["--model", options.model, "--way", way, "--forward-seconds", str(options.forward)]
            arguments += ["--backward-seconds", str(backward), "--warm-up", str(WARM_UP_STEPS)]
            arguments += ["--steps", str(options.steps)]
            if options.bucket_bytes is not None and way != "none":
                arguments += ["--bucket-bytes", str(options.bucket_bytes)]
            measured, *_ = cluster.train(arguments, limit, "benchmarks.wire.overlapped")
            if not measured["error"] < MAX_ERROR:
                raise RuntimeError(f"{way} has a wrong result: its error is {measured['error']}")
            found[way].append(measured)
            seconds = statistics.median(measured["seconds"])
            print(
                f"backward {backward:g} s, {repetition + 1}/{options.repetitions}, {way}: {seconds:.3f} s", flush=True
            )

    def median(way: str, what: str) -> float:
        return statistics.median(value for one in found[way] for value in one[what])

    return Point(
        options.forward,
        backward,
        {way: median(way, "seconds") for way in WAYS},
        median("none", "push_seconds"),
        median("none", "pull_seconds"),
    )


def make_table(points: Sequence[Point]) -> str:
    lines = [
        "\n| backward | push | pull | can be hidden | "
        + " | ".join(f"{LABELS[way]}: a step" for way in WAYS)
        + " | `overlap` hides | both hide |",
        "|--:" * (6 + len(WAYS)) + "|",
    ]
    for point in points:
        numbers = [point.backward, point.push, point.pull, point.hideable, *(point.steps[way] for way in WAYS)]
        shares = [f"{point.hidden(way):.0%}" for way in WAYS[1:]]
        lines.append("| " + " | ".join([*(f"{number:.3f}" for number in numbers), *shares]) + " |")
    return "\n".join(lines) + "\n"


def make_report(points: Sequence[Point], options: argparse.Namespace) -> str:
    parameters = model_parameters(options.model)
    text = TEXT.format(
        megabits=options.megabits,
        tensors=len(parameters),
        model=options.model,
        millions=sum(spec.num_elements for spec in parameters) / 1e6,
        forward=options.forward,
        repetitions=options.repetitions,
        steps=options.steps,
    )
    title = f"Overlap of communication and computation, {options.model}"
    head = make_head(title, text.strip(), PACKAGES, where="in network namespaces")
    worst = min(points, key=lambda point: point.hidden("both"))
    verdict = (
        f"\n`overlap` with `overlap_pulls` hides at least {worst.hidden('both'):.0%} of the time that can be hidden, "
        f"with a backward pass of {worst.backward:g} s.\n"
    )
    return head + verdict + make_table(points)


def plot(points: Sequence[Point], path: Path, title: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    backwards = [point.backward for point in points]
    for way, marker in zip(WAYS, "o^s", strict=True):
        axes.plot(backwards, [point.steps[way] for point in points], marker=marker, label=LABELS[way].replace("`", ""))
    ideal = [point.steps["none"] - point.hideable for point in points]
    axes.plot(backwards, ideal, color="gray", linestyle="--", label="all hidden that can be")
    axes.plot(
        backwards, [p.forward + p.backward for p in points], color="gray", linestyle=":", label="computation alone"
    )
    axes.set(xlabel="backward pass, s", ylabel="step, s", ylim=(0, None), title=title)
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", choices=MODELS, default="ResNet-50")
    parser.add_argument("--megabits", type=int, default=1000, help="a second, of each link")
    parser.add_argument("--forward", type=float, default=0.4, help="seconds of a forward pass")
    parser.add_argument(
        "--backward", type=float, nargs="+", default=[0.1, 0.2, 0.4, 0.8, 1.6], help="of a backward pass"
    )
    parser.add_argument("--bucket-bytes", type=int, help="where something overlaps")
    parser.add_argument("--steps", type=int, default=5, help="that are measured in one run")
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--target", type=float, default=0.8, help="share to be hidden, or the exit status is 1")
    parser.add_argument("--plot", type=Path, help="draw the steps' durations there")
    options = parser.parse_args()
    prepare(parser)
    with (
        connected_machines(PSERVERS + TRAINERS, int(options.megabits * MEGABIT)) as machines,
        started(machines[:PSERVERS], machines[PSERVERS:]) as cluster,
    ):
        points = [measure(cluster, backward, options) for backward in options.backward]
    publish(make_report(points, options), options.report)
    if options.plot is not None:
        plot(points, options.plot, f"{options.model} over {options.megabits} Mbit/s, forward {options.forward:g} s")
    missed = [point for point in points if point.hidden("both") < options.target]
    for point in missed:
        print(f"with backward {point.backward:g} s less than {options.target:.0%} is hidden", file=sys.stderr)
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
