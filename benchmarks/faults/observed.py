"""A real cluster whose completed rounds and log entries are recorded with their times."""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from trainer_client.testing import Child, LocalCluster

TRAINER = Path(__file__).with_name("trainer.py")
PATIENCE_SECONDS = 120.0  # for each wait


@dataclass(frozen=True)
class Step:
    """One completed `step()` of one trainer. Times are `time.time()`."""

    rank: int
    round: int
    at: float


@dataclass(frozen=True)
class Entry:
    """One line of a service's log."""

    service: str
    event: str
    at: float
    facts: dict[str, Any]


class ObservedCluster:
    """A `LocalCluster` whose trainers run `trainer.py` with these arguments."""

    def __init__(self, arguments: Sequence[str], *, pservers: int, trainers: int, **settings: Any) -> None:
        self.steps: list[Step] = []
        self.entries: list[Entry] = []
        self._command = [sys.executable, str(TRAINER), *arguments]
        self._heard = threading.Condition()
        # Over TCP, as between machines.
        self.cluster = LocalCluster(
            pservers=pservers, trainers=trainers, on_line=self._line, **{"local_transport": False, **settings}
        )

    def __enter__(self) -> ObservedCluster:
        self.cluster.start()
        for rank in range(self.cluster.num_trainers):
            self.start_trainer(rank)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.cluster.stop()
        if error is not None:
            error.add_note("\n".join([*self.cluster.output][-60:]))

    def start_trainer(self, rank: int) -> Child:
        """Start the trainer of this rank, again if it has ended."""
        return self.cluster.start_trainer(rank, self._command)

    def _line(self, name: str, line: str) -> None:
        with self._heard:
            if name.startswith("trainer"):
                if found := re.fullmatch(r"round (\d+) ([\d.]+)", line):
                    self.steps.append(Step(int(name.split()[1]), int(found[1]), float(found[2])))
            elif line.startswith("{"):
                facts = json.loads(line)
                at = datetime.fromisoformat(facts.pop("timestamp")).timestamp()
                self.entries.append(Entry(name, facts.pop("event"), at, facts))
            self._heard.notify_all()

    def num_steps(self, rank: int) -> int:
        """Return the number of completed steps of this rank, in all its incarnations."""
        with self._heard:
            return sum(step.rank == rank for step in self.steps)

    # ------------------------------------------------------------------ waiting

    def wait_for_steps(self, ranks: Sequence[int], *, number: int = 1, after: float = 0.0) -> None:
        """Wait until each of these trainers has completed so many steps after this time."""

        def found() -> bool:
            steps = [step.rank for step in self.steps if step.at > after]
            return all(steps.count(rank) >= number for rank in ranks)

        self._wait(found, f"{number} steps of trainers {list(ranks)}")

    def wait_for_round(self, ranks: Sequence[int], round_: int) -> float:
        """Wait until these trainers have completed this round or a later one, and return the time of the last."""

        def first(rank: int) -> float | None:
            return next((step.at for step in self.steps if step.rank == rank and step.round >= round_), None)

        self._wait(lambda: all(first(rank) is not None for rank in ranks), f"round {round_} of trainers {list(ranks)}")
        with self._heard:
            return max(at for rank in ranks if (at := first(rank)) is not None)

    def wait_for_entry(self, service: str, event: str, *, after: float) -> Entry:
        """Wait for the first entry of a service's log after this time that begins with these words, and return it."""

        def found() -> list[Entry]:
            return [e for e in self.entries if e.service == service and e.at > after and e.event.startswith(event)]

        self._wait(lambda: bool(found()), f"{event!r} of the {service}")
        with self._heard:
            return found()[0]

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        with self._heard:
            if not self._heard.wait_for(condition, PATIENCE_SECONDS):
                raise TimeoutError(f"no {what} within {PATIENCE_SECONDS:g} s")

    # ------------------------------------------------------------------ faults

    def end(self, child: Child, signal: Any) -> float:
        """Signal a process, wait for its end, and return the time of the signal."""
        at = time.time()
        child.signal(signal)
        child.wait(PATIENCE_SECONDS)
        return at
