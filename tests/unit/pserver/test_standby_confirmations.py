"""Arbitrary interleavings of confirmations, required sets, disconnects and waits, on a real run."""

from __future__ import annotations

import asyncio
import math
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ps_protocol.errors import GradpostError, StaleRun
from ps_protocol.membership import RequiredStandbys
from services.pserver.run.standbys import StandbyConfirmations

from ...soaking import examples
from .support import bench

NAMES = ("standby-a", "standby-b", "standby-c")
ROUNDS = st.integers(0, 6)
STANDBYS = st.sampled_from(NAMES)


@dataclass
class Waiting:
    """A task that waits for a round, and the standbys that were missing when it was last looked at."""

    round: int
    task: asyncio.Task[None]


class Confirmations(RuleBasedStateMachine):
    """The standbys of one run against a model: the newest set, and what each connected standby has confirmed."""

    @initialize(first=ROUNDS, names=st.sets(STANDBYS))
    def begin(self, first: int, names: set[str]) -> None:
        self.runner = asyncio.Runner()
        self.folder = tempfile.TemporaryDirectory()
        self.bench = bench(2, state_dir=Path(self.folder.name), durability="replicated")
        self.b = self.runner.run(self.bench.__aenter__())
        self.num_reports = self.num_seen = 0
        required = RequiredStandbys(number=1, instances=tuple(sorted(names)))
        installed = self.b.run.installed.model_copy(update={"required": required})
        log: Any = SimpleNamespace(tail=SimpleNamespace(round=20))
        self.b.run.standbys = self.standbys = StandbyConfirmations(installed, 0, first, log, self.count_report)
        self.first, self.required = first, required
        self.held: dict[str, int] = {}
        self.requests: dict[str, int] = {}
        self.awaited = names
        self.acknowledged = 0
        self.waiting: list[Waiting] = []
        self.described = self.standbys.describe()
        self.failure: GradpostError | None = None

    def teardown(self) -> None:
        if hasattr(self, "runner"):
            self.end()
            self.runner.run(self.bench.__aexit__(None, None, None))
            self.runner.close()
            self.folder.cleanup()

    def count_report(self) -> None:
        self.num_reports += 1

    async def _call(self, function: Any, *arguments: Any) -> Any:
        result = function(*arguments)
        for _ in range(5):  # the waiting tasks check again
            await asyncio.sleep(0)
        return result

    def call(self, function: Any, *arguments: Any) -> Any:
        return self.runner.run(self._call(function, *arguments))

    def holds(self, name: str, round_: int) -> bool:
        return self.held.get(name, -1) >= round_

    # ------------------------------------------------------------ events

    @rule(name=STANDBYS, round_=ROUNDS)
    def confirm(self, name: str, round_: int) -> None:
        self.requests[name] = self.call(self.standbys.confirm, name, round_)
        self.held[name] = max(self.held.get(name, -1), round_)

    @rule(name=STANDBYS, is_newest=st.booleans())
    def remove(self, name: str, is_newest: bool) -> None:
        """Note a disconnect, perhaps of an earlier request."""
        self.call(self.standbys.remove, name, self.requests.get(name, 0) - (not is_newest))
        if is_newest and self.held.pop(name, None) is not None:
            self.awaited.discard(name)
            assert name not in self.standbys.describe().connected

    @rule(number=st.integers(1, 12), names=st.sets(STANDBYS))
    def require(self, number: int, names: set[str]) -> None:
        """Receive a set, perhaps a late one."""
        required = RequiredStandbys(number=number, instances=tuple(sorted(names)))
        self.call(self.standbys.require, required)
        if number > self.required.number:
            self.required = required
            self.awaited &= names

    @rule(round_=ROUNDS)
    def wait(self, round_: int) -> None:
        async def begin() -> asyncio.Task[None]:
            return asyncio.create_task(self.b.run.wait_until_held(round_, math.inf))

        self.waiting.append(Waiting(round_, self.runner.run(begin())))
        self.call(lambda: None)

    @rule(round_=ROUNDS, is_stuck=st.booleans())
    def note_late(self, round_: int, is_stuck: bool) -> None:
        late = {name for name in self.required.instances if not self.holds(name, round_)}
        self.call(partial(self.standbys.note_late, is_stuck=is_stuck), round_)
        self.awaited -= late
        assert late.isdisjoint(self.standbys.describe().connected)

    @precondition(lambda self: self.failure is None)
    @rule()
    def end(self) -> None:
        if self.failure is None:
            self.failure = StaleRun("the run has ended")
            self.runner.run(self.b.run.end(self.failure))
            self.call(lambda: None)
            assert all(waiting.task.done() for waiting in self.waiting)
            self.look_at_waits()

    # ------------------------------------------------------------ what holds after each event

    @invariant()
    def look_at_waits(self) -> None:
        """No wait ends before every required standby of the newest set has confirmed its round, and each does then."""
        if not hasattr(self, "runner"):
            return
        for waiting in tuple(self.waiting):
            may_end = waiting.round <= self.acknowledged or all(
                self.holds(name, waiting.round) for name in self.required.instances
            )
            assert waiting.task.done() == (may_end or self.failure is not None)
            if waiting.task.done():
                self.waiting.remove(waiting)
                if (error := waiting.task.exception()) is None:
                    assert may_end
                    self.acknowledged = max(self.acknowledged, waiting.round)
                else:
                    assert self.failure is not None
                    assert str(error) == str(self.failure)

    @invariant()
    def look_at_reports(self) -> None:
        """Each change is reported, and no standby is reported as caught up that lacks an acknowledged update."""
        if not hasattr(self, "runner"):
            return
        described = self.standbys.describe()
        assert described.number == self.required.number
        newest = max(self.acknowledged, self.first)
        for name in described.caught_up:
            assert name in self.required.instances
            assert self.holds(name, newest)
        for name in described.connected:
            assert name in self.awaited or self.holds(name, 0)
        assert self.awaited <= {*described.connected}
        if described != self.described:
            assert self.num_reports > self.num_seen
        self.num_seen, self.described = self.num_reports, described


Confirmations.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)
test_confirmations = Confirmations.TestCase
