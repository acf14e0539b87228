"""Campaigns: histories one after another, and their violations, stalls and recovery times."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from ps_protocol.vocabulary import Mode

from .chaos_cluster import find_libfaketime
from .episode import Episode
from .faults import FAULTS
from .measures import describe, measure
from .setup import draw_setup

# The faults that reveal each sabotage soon.
SABOTAGES = {
    "dedupe": ("duplicate requests", "late requests"),
    "order": ("trainer hangs while its heartbeats live",),
    "log": ("pserver killed",),
    "places": ("place of one pserver hanging",),
    "pauses": ("administrative changes under load",),
    "pages": ("proxy answers pages",),
}
MODES: dict[str, Mode] = {"pauses": "async"}  # else `sync`
SHOWN_VIOLATIONS = 10


class Campaign:
    """A series of histories with the seeds `seed`, `seed + 1`, …, each of which repeats its history."""

    def __init__(
        self,
        seed: int,
        *,
        kinds: Collection[str] = tuple(FAULTS),
        sabotage: str | None = None,
        mode: Mode | None = None,
        folder: Path | None = None,
    ) -> None:
        self.seed = seed
        self._folder = folder  # of the histories; None: that of temporary files
        self.num_histories = 0
        self.num_violations = 0
        self._kinds = kinds
        self._sabotage = sabotage
        self._mode = mode or MODES.get(sabotage or "", "sync")
        self._measured: dict[str, list[tuple[float, float] | None]] = defaultdict(list)

    @property
    def num_faults(self) -> int:
        """The number of injected faults."""
        return sum(map(len, self._measured.values()))

    @property
    def kinds(self) -> set[str]:
        """The kinds of injected faults."""
        return set(self._measured)

    def run(self, *, until: float = float("inf"), count: float = float("inf")) -> None:
        """Run so many histories, or until this monotonic time, or with sabotage until there is a violation."""
        if find_libfaketime() is None:
            print("libfaketime is not installed: no clock will jump", flush=True)
        while self.num_histories < count and time.monotonic() < until:
            self._run_history(self.seed + self.num_histories)
            if self._sabotage and self.num_violations:
                break

    def _run_history(self, seed: int) -> None:
        setup = draw_setup(
            seed, may_fake_time=find_libfaketime() is not None, mode=self._mode if self._sabotage else None
        )
        if self._sabotage:
            setup = replace(
                setup,
                seconds=8.0,
                max_delay=0,
                on_trainer_loss="wait",
                checkpoint_rounds=7,
                num_pservers=max(2, setup.num_pservers),
            )
        folder = Path(tempfile.mkdtemp(prefix=f"gradpost-chaos-{seed}-", dir=self._folder))
        episode = Episode(setup, folder, kinds=self._kinds, sabotage=self._sabotage)
        kept = True
        try:
            episode.run()
            kept = bool(episode.violations)
        except KeyboardInterrupt:
            kept = False
            raise
        finally:
            if kept:
                (folder / "violations.txt").write_text("\n".join(episode.violations))
            else:
                shutil.rmtree(folder)
        self.num_histories += 1
        self.num_violations += len(episode.violations)
        for injection in episode.injections:
            ranks = range(setup.num_trainers)
            self._measured[injection.kind].append(measure(injection, episode.reader.records, ranks))
        print(
            f"history {self.num_histories} (seed {seed}: {setup}): {episode.rounds} rounds, "
            f"{episode.num_restorable} checkpoints read, "
            f"{len(episode.injections)} faults, {len(episode.violations)} violations",
            flush=True,
        )
        if episode.violations:
            for text in episode.violations[:SHOWN_VIOLATIONS]:
                print(f"  VIOLATION {text}")
            more = f" --sabotage {self._sabotage}" if self._sabotage else ""
            if len(self._kinds) < len(FAULTS) and not self._sabotage:
                more = "".join(f" --only {kind!r}" for kind in self._kinds)
            print(f"  kept in {folder}; again with: python -m tests.chaos --seed {seed} --count 1{more}", flush=True)

    def report(self) -> None:
        """Print the cost of each kind of fault, and a summary."""
        for kind, measured in sorted(self._measured.items(), key=lambda item: -len(item[1])):
            print(f"{len(measured):5} {kind:45} stall {_describe(measured, 0):30} recovery {_describe(measured, 1)}")
        everything = [one for measured in self._measured.values() for one in measured]
        print(
            f"{len(everything):5} {'total':45} stall {_describe(everything, 0):30} recovery {_describe(everything, 1)}"
        )
        print(
            f"chaos: seed={self.seed} histories={self.num_histories} faults={self.num_faults} "
            f"kinds={len(self.kinds)} violations={self.num_violations}",
            flush=True,
        )


def _describe(measured: Collection[tuple[float, float] | None], which: int) -> str:
    return describe([one[which] for one in measured if one is not None])
