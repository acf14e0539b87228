"""The result files of the study, and the figures of a run."""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from cells import SEEDS

RESULTS = Path(__file__).parents[1] / "results" / "consistency"
TARGETS = {"digits": 0.25, "characters": 2.4, "large": 0.0}  # held-out loss; the last is not trained to any


def result_file(name: str, seed: int) -> Path:
    return RESULTS / f"{name.replace(', ', '-').replace(' ', '_')}-{seed}.json"


def write_result(name: str, seed: int, result: dict[str, Any]) -> None:
    """Write the file atomically, as a resumed study relies on every file that exists."""
    file = result_file(name, seed)
    unfinished = file.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(result))
    unfinished.rename(file)


class Run:
    """The result of a cell with one seed."""

    def __init__(self, result: dict[str, Any]) -> None:
        self.name: str = result["cell"]["name"]
        self.seed: int = result["seed"]
        self.workload: str = result["cell"]["workload"]
        self.trainers: list[dict[str, Any]] = result["trainers"]
        begin = min(trainer["steps"][0][0] for trainer in self.trainers)
        first_end = min(trainer["steps"][-1][2] for trainer in self.trainers)
        # With a persistently slow trainer only the second half counts, when the others have reached the bound.
        self.begin = begin
        self.watched = ((begin + first_end) / 2 if result["cell"]["slow"] == "trainer 0" else begin, first_end)

    def _watched_steps(self, trainer: dict[str, Any]) -> list[list[float]]:
        low, high = self.watched
        return [step for step in trainer["steps"] if step[0] >= low and step[2] <= high]

    @property
    def contributions_a_second(self) -> float:
        """The contributions of all trainers, each at its own pace, while all of them are training."""
        paces = []
        for trainer in self.trainers:
            steps = self._watched_steps(trainer)
            paces.append(len(steps) / (steps[-1][2] - steps[0][0]))
        return sum(paces)

    @property
    def idle_share(self) -> float:
        """The share of the trainers' time that is not computation, but waiting for others and for the network."""
        shares = []
        for trainer in self.trainers:
            steps = self._watched_steps(trainer)
            shares.append(1 - sum(step[1] - step[0] for step in steps) / (steps[-1][2] - steps[0][0]))
        return statistics.mean(shares)

    @property
    def megabytes(self) -> float:
        """The bytes that a trainer pushes and pulls, initial values included."""
        return statistics.mean(trainer["pushed_bytes"] + trainer["pulled_bytes"] for trainer in self.trainers) / 1e6

    @property
    def kilobytes_a_step(self) -> float:
        """The bytes that a trainer pushes and pulls in a step."""
        return 1e3 * self.megabytes / len(self.trainers[0]["steps"])

    @property
    def final_loss(self) -> float:
        """The held-out loss after the last step, which is the end of a round of local steps."""
        return self.trainers[0]["held_out"][-1][2]

    @property
    def seconds_to_target(self) -> float:
        """The seconds until the held-out loss is below the workload's target, or infinity."""
        target = TARGETS[self.workload]
        return next((at - self.begin for _, at, loss in self.trainers[0]["held_out"] if loss < target), math.inf)

    @property
    def steps_to_target(self) -> float:
        """The steps of trainer 0 until the held-out loss is below the workload's target, or infinity."""
        target = TARGETS[self.workload]
        return next((step for step, _, loss in self.trainers[0]["held_out"] if loss < target), math.inf)

    def curve(self, over: str) -> tuple[list[float], list[float]]:
        """Return the held-out loss over `steps` of trainer 0 or over `seconds`."""
        points = self.trainers[0]["held_out"]
        return [s if over == "steps" else at - self.begin for s, at, _ in points], [loss for _, _, loss in points]


def read_runs() -> dict[str, list[Run]]:
    """Return all results, by the cell's name and in the order of seeds."""
    runs = defaultdict(list)
    for seed in SEEDS:
        for file in sorted(RESULTS.glob(f"*-{seed}.json")):
            run = Run(json.loads(file.read_text()))
            runs[run.name].append(run)
    return runs
