"""The accuracy of smaller wire types: handwritten digits, 5-fold cross-validation, 3 seeds, on real clusters.

    python -m benchmarks.wire.accuracy [--optimizers SGD AdamW] [--pairs int8/int8 …] [--report FILE.md] [--json FILE]

Takes ten minutes on two idle cores. The accuracies depend on neither load nor number of cores: in the synchronous mode
the same seeds give the same bits.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TypeAlias

os.environ["OMP_NUM_THREADS"] = "1"  # for all processes; two cores are easily overloaded

from trainer_client.testing import LocalCluster

from ..report import PACKAGES, exit_on_signals, make_head, make_parser, publish
from .digits import BATCH_SIZE, EPOCHS, FOLDS, OPTIMIZERS, TRAINERS, OptimizerName, Training, train
from .pairs import EIGHT_BITS, FLOAT32, PAIRS, Difference, parse_pair

PSERVERS = 2
SEEDS = 3
LIMIT_POINTS = 0.5
CHANCE = "float32 / float32, other seeds"
PATIENCE_SECONDS = 300  # for one training

Accuracies: TypeAlias = dict[str, list[float]]  # percent, by wire types; fold by fold, seed by seed

TEXT = """\
scikit-learn's handwritten digits, 1,797 images, of which each fold holds a fifth out; stratified, the same folds for
all. A perceptron 64-256-128-10 (50,826 parameters, cut into 8 blocks), {epochs} epochs of 2 × {batch_size} images a
step, OneCycleLR, 2 trainers, 2 pservers, synchronous mode; clusters of processes on loopback. Rates were chosen for
float32, once, and are the same for every type; `topk` pushes 1 % of each block. A **pair** is one fold and one
seed: initial values and the order of images are the same for all types. The accuracy is that of the model as a trainer
has it after its last pull.

**Difference** is the mean over {num_pairs} pairs, in percentage points, with its 95 % interval, for which pairs are
resampled (bootstrap); one image is {image_points:.2f} points of a fold. `{chance}` is the difference of two
trainings in float32 with different seeds.
"""


def measure(options: argparse.Namespace, clusters: Sequence[LocalCluster]) -> dict[OptimizerName, Accuracies]:
    """Train for every fold and pair of types; optimizers and seeds at the same time, each with its own cluster.

    Errors of a training are raised.
    """
    measured: dict[OptimizerName, Accuracies] = {name: defaultdict(list) for name in options.optimizers}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.wire.digits"])
    ways = [(str(pair), pair, 0) for pair in options.pairs] + [(CHANCE, FLOAT32, options.seeds)]
    with ProcessPoolExecutor(len(clusters) * TRAINERS, context) as processes:
        for fold in range(options.folds):
            begin = time.monotonic()
            for name, pair, offset in ways:
                trainings = [
                    Training(optimizer, fold, seed + offset, pair)
                    for optimizer in options.optimizers
                    for seed in range(options.seeds)
                ]
                started = [
                    [
                        processes.submit(train, training, cluster.address, rank, options.epochs)
                        for rank in range(TRAINERS)
                    ]
                    for training, cluster in zip(trainings, clusters, strict=True)
                ]
                for training, futures in zip(trainings, started, strict=True):
                    first, *others = [future.result(PATIENCE_SECONDS) for future in futures]
                    if any(other != first for other in others):
                        raise RuntimeError(f"trainers have different models after {training}")
                    measured[training.optimizer][name].append(100 * first)
            print(f"fold {fold + 1} of {options.folds}: {time.monotonic() - begin:.0f} s", flush=True)
    return measured


def make_table(accuracies: Mapping[str, Sequence[float]]) -> str:
    lines = [
        "| push / pull | accuracy, mean % | range | difference in points | pairs worse, equal, better |",
        "|---|--:|--:|--:|--:|",
    ]
    for name, values in accuracies.items():
        difference = Difference.between(values, accuracies[str(FLOAT32)])
        compared = [str(difference), f"{difference.num_worse}, {difference.num_equal}, {difference.num_better}"]
        cells = [name, f"{statistics.mean(values):.2f}", f"{min(values):.2f} – {max(values):.2f}"]
        lines.append(f"| {' | '.join([*cells, *(compared if name != str(FLOAT32) else ['', ''])])} |")
    return "\n".join(lines) + "\n"


def judge(accuracies: Mapping[str, Sequence[float]]) -> str:
    """Return the verdict on the target in one line, or nothing if its types were not measured."""
    if str(EIGHT_BITS) not in accuracies:
        return ""
    difference = Difference.between(accuracies[str(EIGHT_BITS)], accuracies[str(FLOAT32)])
    verdict = "met" if difference.mean >= -LIMIT_POINTS else "missed"
    return f"\nTarget: 8 bits both ways lose at most {LIMIT_POINTS} points: {difference}, {verdict}.\n"


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--optimizers", nargs="+", choices=list(OPTIMIZERS), default=list(OPTIMIZERS))
    parser.add_argument("--pairs", nargs="+", type=parse_pair, default=PAIRS, help="such as int8/bfloat16")
    parser.add_argument("--folds", type=int, choices=range(1, FOLDS + 1), default=FOLDS, help="so many of the five")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--json", type=Path, help="write all accuracies there")
    options = parser.parse_args()
    options.pairs = [FLOAT32, *(pair for pair in options.pairs if pair != FLOAT32)]
    exit_on_signals()
    settings = {"durability": "none", "on_trainer_loss": "fail"}
    with ExitStack() as stack:
        clusters = [
            stack.enter_context(LocalCluster(pservers=PSERVERS, trainers=TRAINERS, **settings))
            for _ in range(len(options.optimizers) * options.seeds)
        ]
        measured = measure(options, clusters)
    text = TEXT.format(
        epochs=options.epochs,
        batch_size=BATCH_SIZE,
        num_pairs=options.folds * options.seeds,
        image_points=100 / (1797 / FOLDS),
        chance=CHANCE,
    )
    report = make_head("The accuracy of fewer bytes", text.strip(), [*PACKAGES, "scikit-learn"])
    for optimizer, accuracies in measured.items():
        _, rate, flags = OPTIMIZERS[optimizer]
        flags = ", ".join(f"{name} {value}" for name, value in flags.items())
        report += f"\n## {optimizer}, rate {rate} at most, {flags}\n\n" + make_table(accuracies) + judge(accuracies)
    publish(report, options.report)
    if options.json is not None:
        options.json.write_text(json.dumps(measured, indent=2) + "\n")


if __name__ == "__main__":
    main()
