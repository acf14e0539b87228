"""Campaigns: histories one after another, and their violations."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from .chaos_cluster import find_libfaketime
from .episode import Episode
from .faults import FAULTS
from .sabotaged import NEED_STANDBYS
from .setup import Setup, draw_setup

SHOWN_VIOLATIONS = 10


def make_small_setup(seed: int, kind: str) -> Setup:
    """Return a setup for a history with one fault, of this kind."""
    alone = Setup(seed, num_pservers=1, checkpoint_rounds=50, seconds=0.1)
    with_standby = replace(alone, num_standbys=1, durability="replicated")
    return with_standby if FAULTS[kind].fits(with_standby) else alone


class Campaign:
    """A series of histories with the seeds `seed`, `seed + 1`, …, each of which repeats its history."""

    def __init__(
        self,
        seed: int,
        *,
        kinds: Collection[str] = tuple(FAULTS),
        sabotage: str | None = None,
        num_standbys: int | None = None,
        folder: Path | None = None,
    ) -> None:
        self.seed = seed
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder  # of the histories; None: that of temporary files
        self.num_histories = 0
        self.num_violations = 0
        self.num_faults: Counter[str] = Counter()  # of each kind
        self._kinds = kinds
        self._sabotage = sabotage
        self._num_standbys = num_standbys

    def run(self, *, until: float = float("inf"), count: float = float("inf")) -> None:
        """Run so many histories, or until this monotonic time, or with sabotage until there is a violation."""
        if find_libfaketime() is None:
            print("libfaketime is not installed: no clock will jump", flush=True)
        while self.num_histories < count and time.monotonic() < until:
            self._run_history(self._draw_setup(self.seed + self.num_histories), self._kinds)
            if self._sabotage and self.num_violations:
                break

    def run_each(self) -> None:
        """Run a small history with one fault for each kind."""
        for kind in self._kinds:
            self._run_history(make_small_setup(self.seed, kind), [kind], how="--each")
            if not self.num_faults[kind]:
                print(f"  VIOLATION {kind!r} had no effect", flush=True)
                self.num_violations += 1

    def _draw_setup(self, seed: int) -> Setup:
        may_fake_time = find_libfaketime() is not None
        setup = draw_setup(seed, may_fake_time=may_fake_time, num_standbys=self._num_standbys)
        if self._sabotage:
            has_standbys = self._sabotage in NEED_STANDBYS
            setup = replace(
                setup,
                seconds=8.0,
                max_delay=0,
                on_trainer_loss="wait",
                checkpoint_rounds=7,
                num_pservers=max(2, setup.num_pservers),
                num_standbys=int(has_standbys),
                durability="replicated" if has_standbys else "log",
                replica_loss="continue",
            )
        return setup

    def _run_history(self, setup: Setup, kinds: Collection[str], how: str = "--count 1") -> None:
        folder = Path(tempfile.mkdtemp(prefix=f"gradpost-chaos-{setup.seed}-", dir=self._folder))
        episode = Episode(setup, folder, kinds=kinds, sabotage=self._sabotage)
        try:
            episode.run()
        except KeyboardInterrupt:
            shutil.rmtree(folder)
            raise
        violations = episode.violations
        if violations:
            (folder / "violations.txt").write_text("\n".join(violations))
        else:
            shutil.rmtree(folder)
        self.num_histories += 1
        self.num_violations += len(violations)
        self.num_faults.update(injection.kind for injection in episode.injections)
        print(
            f"history {self.num_histories} (seed {setup.seed}: {setup}): {episode.rounds} rounds, "
            f"{episode.num_restorable} checkpoints read, "
            f"{len(episode.injections)} faults, {len(violations)} violations",
            flush=True,
        )
        if violations:
            for text in violations[:SHOWN_VIOLATIONS]:
                print(f"  VIOLATION {text}")
            more = f" --sabotage {self._sabotage}" if self._sabotage else ""
            if len(kinds) < len(FAULTS) and not self._sabotage:
                more = "".join(f" --only {kind!r}" for kind in kinds)
            print(f"  kept in {folder}; again with: python -m tests.chaos --seed {setup.seed} {how}{more}", flush=True)

    def report(self) -> None:
        """Print the number of faults of each kind, and a summary."""
        for kind, number in self.num_faults.most_common():
            print(f"{number:5} {kind}")
        print(
            f"chaos: seed={self.seed} histories={self.num_histories} faults={self.num_faults.total()} "
            f"kinds={len(self.num_faults)} violations={self.num_violations}",
            flush=True,
        )
