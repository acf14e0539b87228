"""The random setup of a history, which its seed repeats."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ps_protocol.vocabulary import LossPolicy, Mode, NonfinitePolicy

LEASE_SECONDS = 2.0
ROUND_TIMEOUT_SECONDS = 4.0
PARAMETERS = ("a", "b", "c")
FREEZABLE = "d"  # like these, but an administrator may freeze it, so the model ignores its values
KEEP_CHECKPOINTS = 2
UNIT = 12  # of a gradient: 1, 2, 3 and 4 divide it


@dataclass(frozen=True)
class Setup:
    """The setup of the services and trainers of a history."""

    seed: int
    mode: Mode = "sync"
    max_delay: int = 0
    max_staleness: int | None = None
    on_trainer_loss: LossPolicy = "wait"
    nonfinite: NonfinitePolicy = "reject"
    checkpoint_rounds: int = 20
    max_log_bytes: int = 1 << 20
    num_pservers: int = 2
    num_trainers: int = 2
    http2: bool = True
    durability: Literal["log", "fsync"] = "log"
    clips: bool = False  # by a norm that is never reached, so that no value changes
    fakes_time: bool = False  # services run under libfaketime, whose clocks can jump
    seconds: float = 18.0  # of faults

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the services."""
        own = ("mode", "max_delay", "on_trainer_loss", "nonfinite", "http2", "durability", "checkpoint_rounds")
        staleness = {} if self.max_staleness is None else {"max_staleness": self.max_staleness}
        return {
            **{name: getattr(self, name) for name in (*own, "max_log_bytes")},
            "keep_checkpoints": KEEP_CHECKPOINTS,
            "lease_seconds": LEASE_SECONDS,
            "round_timeout_seconds": ROUND_TIMEOUT_SECONDS,
            "min_block_size": 2 * self.num_trainers,  # so that each parameter has a block on every pserver
            **staleness,
        }


def draw_setup(seed: int, *, may_fake_time: bool, mode: Mode | None = None) -> Setup:
    """Return the setup of this seed."""
    chance = random.Random(seed)
    modes: list[Mode] = ["sync", "sync", "async", "ssp"]
    drawn = chance.choice(modes)
    mode = mode or drawn
    max_delay = chance.choice((0, 0, 1))
    policy: LossPolicy = chance.choice(("wait", "continue"))
    if mode == "sync" and max_delay:
        policy = "wait"  # versions may be skipped then, which only rounds of all trainers allow to check
    return Setup(
        seed=seed,
        mode=mode,
        max_delay=max_delay,
        max_staleness=chance.choice((1, 3)) if mode == "ssp" else None,
        on_trainer_loss=policy,
        nonfinite=chance.choice(("reject", "skip_round")) if mode == "sync" else "reject",
        checkpoint_rounds=chance.choice((7, 20, 50)),
        num_pservers=chance.randint(1, 3),
        num_trainers=chance.randint(2, 3),
        fakes_time=may_fake_time and chance.random() < 0.3,
        durability=chance.choice(("log", "log", "fsync")),
        http2=chance.random() < 0.7,
        clips=chance.random() < 0.5 and mode == "sync",
        max_log_bytes=chance.choice((16, 1024)) * 1024,
    )


def write_whole(path: Path, text: str) -> None:
    """Replace the content of a file that other processes read."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)
