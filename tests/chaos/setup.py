"""The random setup of a history, which its seed repeats."""

from __future__ import annotations

import random
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ps_protocol.vocabulary import LossPolicy, NonfinitePolicy, ReplicaLoss

LEASE_SECONDS = 2.0
REJOIN_TIMEOUT_SECONDS = 100.0  # half of it is less than the campaign waits for at the end of a history
ROUND_TIMEOUT_SECONDS = 4.0
STANDBY_TIMEOUT_SECONDS = 30.0  # of a round that waits until a lost standby is replaced
PARAMETERS = ("a", "b", "c")
FREEZABLE = "d"  # like these, but an administrator may freeze it, so the model ignores its values
KEEP_CHECKPOINTS = 2
SPARSE = "c"  # whose gradients are sparse in some histories
NUM_ROWS = 32  # of each of its blocks, the first of which are used
UNIT = 12  # of a gradient: 1, 2, 3 and 4 divide it


@dataclass(frozen=True)
class Setup:
    """The setup of the services and trainers of a history."""

    seed: int
    max_delay: int = 0
    on_trainer_loss: LossPolicy = "wait"
    nonfinite: NonfinitePolicy = "reject"
    checkpoint_rounds: int = 20
    max_log_bytes: int = 1 << 20
    num_pservers: int = 2
    num_trainers: int = 2
    http2: bool = True
    durability: Literal["log", "fsync", "replicated"] = "log"
    num_standbys: int = 0  # of each pserver
    replica_loss: ReplicaLoss = "continue"
    clips: bool = False  # by a norm that is never reached, so that no value changes
    is_sparse: bool = False  # the gradients of one parameter
    fakes_time: bool = False  # services run under libfaketime, whose clocks can jump
    seconds: float = 18.0  # of faults

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the services."""
        waits_for_standbys = self.durability == "replicated" and self.replica_loss == "wait"
        own = (
            "max_delay",
            "on_trainer_loss",
            "nonfinite",
            "http2",
            "durability",
            "checkpoint_rounds",
            "replica_loss",
        )
        return {
            **{name: getattr(self, name) for name in (*own, "max_log_bytes")},
            "keep_checkpoints": KEEP_CHECKPOINTS,
            "lease_seconds": LEASE_SECONDS,
            "rejoin_timeout_seconds": REJOIN_TIMEOUT_SECONDS,
            "round_timeout_seconds": STANDBY_TIMEOUT_SECONDS if waits_for_standbys else ROUND_TIMEOUT_SECONDS,
            "min_block_size": 2 * self.num_trainers,  # so that each parameter has a block on every pserver
        }


def draw_setup(seed: int, *, may_fake_time: bool, num_standbys: int | None = None) -> Setup:
    """Return the setup of this seed, with this number of standbys, if it is given."""
    chance = random.Random(seed)
    max_delay = chance.choice((0, 0, 1))
    policy: LossPolicy = chance.choice(("wait", "continue"))
    if max_delay:
        policy = "wait"  # versions may be skipped then, which only rounds of all trainers allow to check
    setup = Setup(
        seed=seed,
        max_delay=max_delay,
        on_trainer_loss=policy,
        nonfinite=chance.choice(("reject", "skip_round")),
        checkpoint_rounds=chance.choice((7, 20, 50)),
        num_pservers=chance.randint(1, 3),
        num_trainers=chance.randint(2, 3),
        fakes_time=may_fake_time and chance.random() < 0.3,
        durability=chance.choice(("log", "log", "fsync")),
        http2=chance.random() < 0.7,
        clips=chance.random() < 0.5,
        max_log_bytes=chance.choice((16, 1024)) * 1024,
        is_sparse=seed % 2 == 1,
    )
    drawn = chance.choice((0, 1))
    if not (drawn if num_standbys is None else num_standbys):
        return setup
    return replace(
        setup,
        num_standbys=1,
        num_pservers=min(2, setup.num_pservers),
        seconds=40.0,
        durability="replicated",
        replica_loss=chance.choice(("continue", "continue", "wait")),
    )


def write_whole(path: Path, text: str) -> None:
    """Replace the content of a file that other processes read, and other threads may write."""
    new = path.with_suffix(f".{threading.get_ident()}")
    new.write_text(text)
    new.replace(path)


@contextmanager
def ordered(files: Collection[Path], order: str) -> Iterator[None]:
    """Let files order what services do within the block: see `service.py`."""
    for file in files:
        write_whole(file, order)
    yield
    for file in files:
        write_whole(file, "")
