"""A run of a script on a cluster to which things happen at certain rounds."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import Any

import httpx

from trainer_client.testing import Child, LocalCluster

from .training import expected_result
from .up_support import wait_until

SCRIPT = Path(__file__).with_name("training_script.py")
ROOT = SCRIPT.parents[2]


class FaultyRun:
    """A run whose script prints how far each trainer is."""

    def __init__(
        self,
        rounds: int = 120,
        *,
        trainers: int = 2,
        pservers: int = 2,
        trouble: str = "",
        kind: str = "regression",
        script: Path = SCRIPT,
        environment: Mapping[str, str] | None = None,
        round_seconds: float = 0.02,
        cluster_type: type[LocalCluster] = LocalCluster,
        num_standbys: int = 0,
        **settings: Any,
    ) -> None:
        """`environment` is that of the trainers, which pause for `round_seconds` in each round.

        `num_standbys` of each pserver are started before the trainers.
        """
        self.rounds = rounds
        self.script = script
        self.round_seconds = round_seconds
        self.num_standbys = num_standbys
        self.trouble = trouble
        self.kind = kind
        self.environment = environment or {}
        self.prefix: dict[int, list[str]] = {}  # of the command of a rank
        self.lines: list[str] = []
        self._progress = threading.Condition()
        self._round = [0] * trainers
        self.cluster = cluster_type(
            pservers=pservers, trainers=trainers, on_line=self._line, **{"lease_seconds": 2, **settings}
        )

    def _line(self, name: str, line: str) -> None:
        with self._progress:
            self.lines.append(f"[{name}] {line}")
            if name.startswith("trainer") and (found := re.fullmatch(r"(round|begin) (\d+)", line)):
                self._round[int(name.split()[1])] = int(found[2])
            self._progress.notify_all()

    def __enter__(self) -> FaultyRun:
        self.cluster.start()
        for index in range(self.cluster.num_pservers):
            for _ in range(self.num_standbys):
                self.cluster.start_standby(index)
        for rank in range(self.cluster.num_trainers):
            self.start_trainer(rank)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.cluster.stop()
        if error is not None:
            error.add_note("\n".join(self.lines[-60:]))

    def start_trainer(self, rank: int) -> Child:
        arguments = [str(self.script), str(self.rounds), str(self.round_seconds), self.trouble, self.kind]
        command = [*self.prefix.get(rank, []), sys.executable, *arguments]
        return self.cluster.start_trainer(rank, command, {"PYTHONPATH": str(ROOT), **self.environment})

    def round_of(self, rank: int) -> int:
        with self._progress:
            return self._round[rank]

    # ------------------------------------------------------------ waiting

    def _wait_for(self, condition: Callable[[], bool], what: str, seconds: float = 90) -> None:
        """Wait until a condition holds that depends on the printed lines alone."""
        with self._progress:
            assert self._progress.wait_for(condition, seconds), f"waited in vain for {what}"

    def wait_for_round(self, round_: int, rank: int = 0) -> None:
        self._wait_for(lambda: self._round[rank] >= round_, f"round {round_} of trainer {rank}: {self._round}")

    def wait_for_line(self, text: str, number: int = 1, *, of: str = "", seconds: float = 90) -> str:
        """Return the line of this number with the text, among those of one process (`trainer 0`) or of all."""

        def found() -> list[str]:
            return [line for line in self.lines if text in line and line.startswith(f"[{of}")]

        self._wait_for(lambda: len(found()) >= number, text, seconds)
        return found()[number - 1]

    def wait_for_sync(self) -> None:
        """Wait until all pservers have a standby in sync."""
        wanted = set(range(self.cluster.num_pservers))

        def are_in_sync() -> bool:
            return wanted <= {s.follows for s in self.cluster.status().standbys if s.role == "in_sync"}

        assert wait_until(are_in_sync, 60), self.cluster.status()

    def wait_for_incarnation(self, incarnation: int) -> None:
        """Wait until pserver 0 has this incarnation or a later one."""

        def is_there() -> bool:
            found = [p.heartbeat.incarnation for p in self.cluster.status().pservers if p.index == 0]
            return bool(found) and found[0] >= incarnation

        assert wait_until(is_there, 60), self.cluster.status()

    # ------------------------------------------------------------ what an administrator does

    def make_checkpoint(self) -> int:
        """Return its round. Rounds may go by while pservers agree on one: the answer may allow another request."""
        for _ in range(20):
            answer = httpx.post(f"{self.cluster.address}/v1/checkpoints", timeout=30).json()
            if "round" in answer:
                return int(answer["round"])
            assert answer.get("may_be_retried"), answer
        raise AssertionError(answer)

    # ------------------------------------------------------------ faults

    def kill(self, child: Child) -> None:
        child.signal(SIGKILL)
        child.wait(10)

    def restart_pserver(self, index: int, **environment: str) -> None:
        self.kill(self.cluster.pservers[index])
        self.cluster.start_pserver(index, **environment)

    def restart_trainer(self, rank: int) -> None:
        self.kill(self.cluster.trainers[rank])
        self.start_trainer(rank)

    def restart_coordinator(self, **environment: str) -> None:
        self.kill(self.cluster.coordinator)
        self.cluster.restart_coordinator(**environment)

    def restart_gracefully(self, pserver: int) -> None:
        """Send SIGTERM, which the pserver obeys with exit code 0, and start it again."""
        child = self.cluster.pservers[pserver]
        child.signal(SIGTERM)
        assert child.wait(20) == 0
        self.cluster.start_pserver(pserver)

    def results(self, seconds: float = 60) -> list[str]:
        """Return the result of each trainer: `DIGEST ROUND`."""
        for child in self.cluster.trainers:
            assert child.wait(seconds) == 0, f"{child.name} failed"
        found = {}
        for line in self.lines:
            if match := re.fullmatch(r"\[trainer (\d+)\] result (.*)", line):
                found[int(match[1])] = match[2]
        return [found[rank] for rank in range(self.cluster.num_trainers)]

    def check_results(self, *, skipped: Collection[int] = ()) -> None:
        """Check that each contribution was applied once, by the bits of the parameters or the numbers of `counting`."""
        results = self.results(90)
        if self.kind == "counting":
            seen, steps = zip(*(result.split() for result in results), strict=True)
            assert min(map(int, steps)) >= self.rounds
            assert ",".join(steps) in seen  # the last trainer has seen all steps, the first a part of the others'
            for rank, counts in enumerate(seen):
                assert counts.split(",")[rank] == steps[rank]
        else:
            assert results == [expected_result(self.rounds, len(results), skipped=skipped)] * len(results)
