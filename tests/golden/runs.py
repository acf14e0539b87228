"""The golden runs, grouped by the cluster that trains them one after the other. They cover each feature once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

STEPS = 8
OVERFLOW_STEP = 4  # of a run with a GradScaler
FAULT_STEP = 4  # the fault or the first change comes before it
CHANGE_STEP = 6  # the second change comes before it
CHANGES = ("set a rate and roll back", "evict a trainer and let it join")  # while all trainers wait


@dataclass(frozen=True)
class Run:
    """One run of a cluster."""

    optimizer: str = "AdamW"  # a name in `tests.cluster.training.OPTIMIZERS`
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the trainers
    outer: str = ""  # the optimizer on the pservers of a run with local steps
    outer_sgd: Mapping[str, Any] = field(default_factory=dict)  # or the arguments of SGD there
    parameter_dtype: str = "float32"
    has_scaler: bool = False  # torch's, and an overflow in trainer 1
    has_batch_norm: bool = False
    has_table: bool = False  # a sparse parameter
    num_passes: int = 1  # backward passes of a step
    steps: Sequence[int] = ()  # of each trainer; empty: STEPS
    # All but the first two are for the last run of a cluster.
    fault: Literal[
        "",
        "kill a pserver",
        "kill a trainer between two pservers",
        "stop and resume",
        "lose the disks and resume",
        "set a rate and roll back",
        "evict a trainer and let it join",
    ] = ""

    def waits(self, rank: int, step: int) -> bool:
        """Return whether this trainer waits for its turn before this step."""
        if self.fault in CHANGES:
            return step in (FAULT_STEP, CHANGE_STEP)
        return bool(self.fault) and (rank, step) == (0, FAULT_STEP)


@dataclass(frozen=True)
class Setup:
    """A cluster and its runs. `settings` are those of the services."""

    runs: Mapping[str, Run]
    pservers: int = 2
    trainers: int = 2
    are_hosts: bool = False  # each trainer is a host with two processes, as torchrun starts them
    settings: Mapping[str, Any] = field(default_factory=dict)
    has_exact_roots: bool = False  # see `tests.golden.sabotaged.take_exact_roots`
    takes_turns: bool = False  # trainers step in a fixed order, two steps each, and trainer 0 comes last

    @property
    def max_delay(self) -> int:
        """The number of steps that may be in flight."""
        return int(self.settings.get("max_delay", 0))


def _wire(push_type: str, pull_type: str) -> Run:
    return Run("SGD-momentum", {"push_type": push_type, "pull_type": pull_type})


_SYNC = {
    **{name: Run(name) for name in ("SGD-momentum", "Adam-amsgrad", "AdamW", "Adagrad", "RMSprop", "Adadelta")},
    **{name: Run(name) for name in ("Adamax", "NAdam", "RAdam")},
    "push and pull bfloat16": _wire("bfloat16", "bfloat16"),
    "push and pull float16": _wire("float16", "float16"),
    "push and pull int8": _wire("int8", "int8"),
    "push topk": _wire("topk", "float32"),
    "bfloat16 parameters": Run(parameter_dtype="bfloat16"),
    "clipping": Run(settings={"max_grad_norm": 1.0}),
    "batch norm": Run(has_batch_norm=True),
    "GradScaler": Run(settings={"nonfinite": "skip_round"}, has_scaler=True),
    "overlap": Run(settings={"overlap": True, "bucket_bytes": 2000}),
    "overlap_pulls": Run(settings={"overlap": True, "overlap_pulls": True, "bucket_bytes": 2000}),
    "accumulate_steps": Run(settings={"overlap": True, "bucket_bytes": 2000}, num_passes=2),
    "local_steps": Run(settings={"local_steps": 2}, outer_sgd={"lr": 0.7, "momentum": 0.9, "nesterov": True}),
    "local_steps with the mean": Run(settings={"local_steps": 2}),
    "local_steps with an outer optimizer": Run(settings={"local_steps": 2}, outer="Adam-amsgrad"),
    **{name: Run(name) for name in ("SGD", "SGD-nesterov", "Adam")},
    "table": Run("SGD", {"bucket_bytes": 2000}, has_table=True),
    "table in bfloat16": Run("SGD", {"push_type": "bfloat16", "pull_type": "bfloat16"}, has_table=True),
    "table with overlap_pulls": Run("SGD", {"overlap": True, "overlap_pulls": True}, has_table=True),
}

# Either one trainer takes all steps of an asynchronous run, or the trainers take turns, so that their order is fixed.
SETUPS: dict[str, Setup] = {
    "sync": Setup(_SYNC, trainers=3),
    "sync with whole parameters": Setup(
        {"clipping": Run(settings={"max_grad_norm": 1.0, "bucket_bytes": 2000})},
        trainers=3,
        settings={"placement": "hash", "slice_parameters": False},
    ),
    "sync with exact roots": Setup(
        {
            "table of SparseAdam beside Adam": Run("SparseAdam", has_table=True),
            "table of Adagrad, stopped and resumed": Run("Adagrad", has_table=True, fault="stop and resume"),
        },
        trainers=3,
        has_exact_roots=True,
    ),
    "sync with max_delay": Setup(
        {
            "AdamW": Run(),
            "push int8": _wire("int8", "float32"),
            "clipping and overlap": Run(settings={"max_grad_norm": 1.0, "overlap": True}),
            "table": Run("SGD", has_table=True),
        },
        pservers=3,
        settings={"max_delay": 2},
    ),
    "sync over HTTP/1.1 with threads": Setup(
        {"AdamW": Run(), "push and pull int8": _wire("int8", "int8")},
        pservers=3,
        settings={"http2": False, "local_transport": False, "threads": 2, "placement": "round_robin"},
    ),
    "async": Setup(
        {
            "AdamW": Run(),
            "push int8, pull bfloat16": _wire("int8", "bfloat16"),
            "local_steps": Run(settings={"local_steps": 2}),
            "push topk": _wire("topk", "float16"),
            "overlap_pulls": Run(settings={"overlap": True, "overlap_pulls": True}),
            "table": Run("SGD", has_table=True),
        },
        trainers=1,
        settings={"mode": "async"},
    ),
    "async with max_delay": Setup({"AdamW": Run()}, pservers=1, trainers=1, settings={"mode": "async", "max_delay": 2}),
    "async in turns": Setup({"SGD-momentum": Run("SGD-momentum")}, settings={"mode": "async"}, takes_turns=True),
    "async with divided rates in turns": Setup(
        {"AdamW": Run()},
        settings={"mode": "async", "compensation": "divide", "read_consistency": "shard"},
        takes_turns=True,
    ),
    "ssp in turns": Setup(
        {"SGD-momentum": Run("SGD-momentum")},
        settings={"mode": "ssp", "max_staleness": 2, "compensation": "dc"},
        takes_turns=True,
    ),
    "ring": Setup(
        {
            "AdamW": Run(),
            "overlap and clipping": Run(settings={"overlap": True, "max_grad_norm": 1.0}),
            "bfloat16 parameters": Run(parameter_dtype="bfloat16"),
            "batch norm": Run(has_batch_norm=True),
            "GradScaler": Run(settings={"nonfinite": "skip_round"}, has_scaler=True),
            "uneven inputs": Run(steps=(8, 6, 4)),
        },
        pservers=0,
        trainers=3,
        settings={"strategy": "ring"},
    ),
    "hosts": Setup(
        {
            "AdamW": Run(),
            "overlap": Run(settings={"overlap": True}),
            "clipping": Run(settings={"max_grad_norm": 1.0}),
            "GradScaler": Run(settings={"nonfinite": "skip_round"}, has_scaler=True),
            "local_steps": Run(settings={"local_steps": 2}, outer_sgd={"lr": 0.7}),
            "table": Run("SGD", has_table=True),
        },
        are_hosts=True,
    ),
    "sync with faults": Setup(
        {"a pserver is killed": Run(fault="kill a pserver"), "stopped and resumed": Run(fault="stop and resume")}
    ),
    "sync with a trainer that dies between two pservers": Setup(
        {"its step is repeated": Run(fault="kill a trainer between two pservers")}, settings={"lease_seconds": 3}
    ),
    "sync with fsync and faults between checkpoints": Setup(
        {"a pserver is killed": Run(fault="kill a pserver"), "stopped and resumed": Run(fault="stop and resume")},
        settings={"durability": "fsync", "checkpoint_rounds": 3},
    ),
    "sync without disks": Setup(
        {"resumed from shared storage": Run(fault="lose the disks and resume")},
        settings={"checkpoint_rounds": FAULT_STEP},
    ),
    "sync with uneven inputs and a rollback": Setup(
        {
            "uneven inputs": Run(steps=(8, 6, 4)),
            "uneven inputs, clipping and overlap": Run(
                steps=(4, 8, 6), settings={"max_grad_norm": 1.0, "overlap": True}
            ),
            "rolled back": Run(fault="set a rate and roll back"),
        },
        trainers=3,
    ),
    "sync with a change of members": Setup(
        {"a trainer leaves and joins": Run(fault="evict a trainer and let it join")}, trainers=3
    ),
}
