"""The grid of the consistency study. Each cell is one way to train, and is run once with each seed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

TRAINERS = 4
PSERVERS = 2
SEEDS = (0, 1, 2)
SLOW_STEPS = 8  # of a slow trainer, before the next one is slow
SLOW_FACTOR = 3.0


@dataclass(frozen=True)
class Cell:
    """Settings of one run. `rate` is a factor of the workload's own learning rate."""

    name: str
    workload: Literal["digits", "characters", "large"] = "digits"
    cluster: dict[str, Any] = field(default_factory=dict)  # settings of the services
    local: dict[str, Any] = field(default_factory=dict)  # arguments of RemoteOptimizer
    rate: float = 1.0
    steps: int = 200
    compute_seconds: float = 0.1  # of one step; the trainer sleeps for the rest of it
    slow: Literal["none", "in turn", "trainer 0"] = "none"

    def slowness(self, rank: int, step: int) -> float:
        """Return the factor of a trainer's step time; steps count from 0.

        `in turn` makes one trainer after the other slow, for SLOW_STEPS of its own steps.
        """
        is_slow = {
            "none": False,
            "in turn": (step // SLOW_STEPS) % TRAINERS == rank,
            "trainer 0": rank == 0,
        }[self.slow]
        return SLOW_FACTOR if is_slow else 1.0


# The asynchronous modes do not average: with N trainers a step of rate / N moves the model as far as one contribution
# to a synchronous round.
ALONE = 1 / TRAINERS
DILOCO = {"outer_lr": 0.7, "outer_momentum": 0.9, "outer_nesterov": True}

# Name, settings of the services, arguments of RemoteOptimizer, rate.
Mode = tuple[str, dict[str, Any], dict[str, Any], float]
SYNC: Mode = ("sync", {}, {}, 1.0)
ASYNC: Mode = ("async", {"mode": "async"}, {}, ALONE)
STALE: list[Mode] = [(f"ssp {s}", {"mode": "ssp", "max_staleness": s}, {}, ALONE) for s in (0, 1, 2, 4, 8, 16)]
DELAYED: list[Mode] = [(f"delay {k}", {"max_delay": k}, {}, 1.0) for k in range(1, 5)]  # delay 0 is sync
LOCAL: list[Mode] = [(f"diloco {h}", {}, {"local_steps": h, **DILOCO}, 1.0) for h in (1, 10, 50)]
AVERAGED: Mode = ("local sgd 50", {}, {"local_steps": 50}, 1.0)
MODES = [SYNC, ASYNC, *STALE, *DELAYED, *LOCAL, AVERAGED]

QUESTIONS: list[Mode] = [
    (f"async, {name}", {"mode": "async", **cluster}, {}, ALONE)
    for name, cluster in [
        ("wait_for_apply=false", {"wait_for_apply": False}),
        ("read_consistency=none", {"read_consistency": "none"}),
        ("read_consistency=shard", {"read_consistency": "shard"}),
        ("slice_parameters=false", {"slice_parameters": False}),
    ]
]
SLOWED = [SYNC, ASYNC, *STALE]
FOR_EVER = [SYNC, ASYNC, *STALE[::2], STALE[-1]]  # the bound matters little there
LONG = [SYNC, *LOCAL[1:]]  # on the second workload, long enough for the fewer but larger steps to tell
SHORT = [ASYNC, STALE[4], DELAYED[1]]


def all_cells() -> Iterator[Cell]:
    """Yield each cell once."""
    for name, cluster, local, rate in [*MODES, *QUESTIONS]:
        yield Cell(name, cluster=cluster, local=local, rate=rate)
    for modes, steps in ((LONG, 1000), (SHORT, 400)):
        for name, cluster, local, rate in modes:
            yield Cell(f"characters, {name}", "characters", cluster, local, rate, steps, compute_seconds=0.12)
    for name, cluster, local, rate in [ASYNC, *QUESTIONS]:
        yield Cell(f"large, {name}", "large", cluster, local, rate, 30, compute_seconds=0.0)
    for name, cluster, local, rate in SLOWED:
        yield Cell(f"{name}, transient", "digits", cluster, local, rate, 208, compute_seconds=0.4, slow="in turn")
    for name, cluster, local, rate in FOR_EVER:
        yield Cell(f"{name}, persistent", "digits", cluster, local, rate, 48, compute_seconds=0.2, slow="trainer 0")
