"""Durability `replicated`: a pserver acknowledges and shows an update once every required standby has confirmed it."""

from __future__ import annotations

import asyncio
import json
import math
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import structlog
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ps_protocol.errors import GradpostError, StaleRun, TrainerLost
from ps_protocol.membership import RequiredStandbys
from ps_protocol.messages import PserverHeartbeatReply
from ps_protocol.routes import BLOCK_STATISTICS, SHARD, UPDATES
from services.pserver.app import make_pserver_app
from services.pserver.durable.records import parse_records
from services.pserver.durable.update_log import LoggedUpdate
from services.pserver.inspection import make_heartbeat
from services.pserver.run import standbys, sync_run
from services.pserver.run.standbys import StandbyConfirmations
from services.pserver.shard import shard as shard_module
from services.runtime.metrics import ServiceMetrics

from ...soaking import examples
from .support import Bench, bench, decode, refused, until

NAME = "standby-a"
SOON = 0.05  # seconds, for a request that must not be answered


class Standby:
    """A standby that asks for updates, and so confirms rounds, when the test says so."""

    def __init__(self, b: Bench, name: str = NAME, *, after: int = 0) -> None:
        self.b, self.name, self.held = b, name, after

    def _query(self, round_: int, **changes: Any) -> dict[str, Any]:
        installed = self.b.run.installed
        return {"run": installed.run, "attempt": installed.attempt, "after": round_, "standby": self.name, **changes}

    async def confirm(self, round_: int, **changes: Any) -> httpx.Response:
        self.held = max(self.held, round_)
        async with client(self.b) as http:
            return await http.get(UPDATES, params=self._query(round_, **changes))

    async def receive(self, round_: int) -> None:
        """Wait for an update that is not confirmed yet."""
        async with client(self.b) as http:
            answer = await http.get(UPDATES, params=self._query(self.held, wait_seconds=10))
        records = parse_records(memoryview(bytearray(answer.content)), None)
        assert LoggedUpdate.from_record(records[-1]).round == round_


def client(b: Bench) -> httpx.AsyncClient:
    if not hasattr(b, "app"):
        b.app = make_pserver_app(b.pserver, ServiceMetrics("pserver"))  # type: ignore[attr-defined]
    return httpx.AsyncClient(transport=httpx.ASGITransport(b.app), base_url="http://x")  # type: ignore[attr-defined]


def require(b: Bench, number: int, *names: str) -> None:
    """Receive a set of required standbys in the answer to a heartbeat."""
    required = RequiredStandbys(number=number, instances=names)
    b.pserver.handle_heartbeat_reply(PserverHeartbeatReply(required=required), make_heartbeat(b.pserver))


@asynccontextmanager
async def replicated(
    folder: Path, *, requires: tuple[str, ...] = (NAME,), **options: Any
) -> AsyncIterator[tuple[Bench, Standby]]:
    """A pserver with a standby that has confirmed the initial values."""
    async with bench(2, state_dir=folder, durability="replicated", **{"checkpoint_rounds": 0, **options}) as b:
        first = b.run.round
        standby = Standby(b, after=first)
        require(b, 1, *requires)
        assert (await standby.confirm(first)).status_code == 200
        yield b, standby


async def contribute(b: Bench, round_: int) -> None:
    for rank in (0, 1):
        await b.push(rank, round_)
    for rank in (0, 1):
        await b.barrier(rank, round_)


async def is_waiting(request: asyncio.Future[Any]) -> bool:
    return not (await asyncio.wait([request], timeout=SOON))[0]


def begin(request: Awaitable[Any]) -> asyncio.Future[Any]:
    return asyncio.ensure_future(request)


@pytest.fixture(autouse=True)
def with_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the compute thread, as for a large shard."""
    monkeypatch.setattr(shard_module, "SMALL_ELEMENTS", 0)


# ---------------------------------------------------------------------- the gate


async def test_a_round_counts_once_the_standby_has_confirmed_it(tmp_path: Path) -> None:
    async with replicated(tmp_path) as (b, standby):
        await contribute(b, 1)
        await standby.receive(1)
        pending = await refused("round_pending", b.get(0, 1, wait_seconds=SOON))
        assert pending.text == "round 1 waits for a standby in sync with pserver 0"
        assert b.run.round == 0
        assert make_heartbeat(b.pserver).round == 0
        await standby.confirm(1)
        assert decode(await b.get(0, 1))[1]["round"] == "1"


async def test_a_change_of_members_is_answered_while_a_standby_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync_run, "FREEZE_SECONDS", SOON)
    async with replicated(tmp_path) as (b, standby):
        await contribute(b, 1)
        await standby.receive(1)
        for _ in range(2):
            pending = await refused("round_pending", asyncio.wait_for(b.freeze(2), 5))
            assert pending.text == "a change of members waits for a standby in sync with pserver 0"
        await standby.confirm(1)
        assert (await b.freeze(2)).applied == 1


def read(path: str, **query: Any) -> Callable[[Bench], Awaitable[Any]]:
    async def request(b: Bench) -> httpx.Response:
        async with client(b) as http:
            answer = await http.get(path, params={"name": "p2.block0", "wait_seconds": 5, **query})
            assert answer.status_code == 200, answer.text
            return answer

    return request


async def read_state(b: Bench) -> bytes:
    return await b.call("slots", b.fence(0, 1), json.dumps(["momentum_buffer/p2.block0"]).encode())


READS = {
    "blocks": read(SHARD, name="p2.block0"),
    "the shard": read(SHARD),
    "a capture": read(SHARD, round=1),
    "statistics": read(BLOCK_STATISTICS),
    "a part of a get": lambda b: b.get(0, 1, names=["p2.block0"]),
    "optimizer state": read_state,
    "freeze": lambda b: b.freeze(2),
}


@pytest.mark.parametrize("what", READS)
async def test_no_read_shows_an_update_before_it_is_held(tmp_path: Path, what: str) -> None:
    async with replicated(tmp_path) as (b, standby):
        early = begin(READS[what](b)) if what == "a capture" else None
        if early is not None:
            assert await is_waiting(early)
        await contribute(b, 1)
        update = begin(b.get(1, 1))
        await standby.receive(1)
        await until(lambda: b.run.storage.log.tail.round == 1)
        reading = early or begin(READS[what](b))
        assert await is_waiting(reading)
        await standby.confirm(1)
        await asyncio.wait_for(reading, 5)
        await update


async def test_a_snapshot_is_published_once_its_round_is_confirmed(tmp_path: Path) -> None:
    async with replicated(tmp_path, checkpoint_rounds=1) as (b, standby):
        storage = b.run.storage
        await b.run.want_checkpoint(1)
        await contribute(b, 1)
        await standby.receive(1)
        writes = begin(b.wait_until_published())
        assert await is_waiting(writes)
        assert (storage.rounds, b.run.writer.published.round) == ([1, 0], 0)
        await standby.confirm(1)
        await b.get(0, 1)
        await b.get(1, 1)
        await writes
        assert b.run.writer.published.round == 1
        await contribute(b, 2)
        await until(lambda: 2 in storage.rounds)
        assert b.run.round == 1
        await standby.confirm(2)
        await b.get(0, 2)


# ---------------------------------------------------------------------- restarts, rollbacks and ends


async def test_a_restored_version_is_read_once_the_standby_holds_it(tmp_path: Path) -> None:
    async with replicated(tmp_path) as (b, standby):
        await contribute(b, 1)
        await standby.receive(1)
        await b.run.close(StaleRun("the process ends"))
    required = RequiredStandbys(number=4, instances=(NAME,))
    async with bench(2, state_dir=tmp_path, incarnation=2, durability="replicated", required=required) as b:
        assert b.run.round == 1
        get = begin(b.get(0, 1))
        freeze = begin(b.freeze(2))
        assert await is_waiting(get)
        assert not freeze.done()
        seen = make_heartbeat(b.pserver).standbys
        assert (seen.number, seen.connected, seen.caught_up) == (4, (NAME,), ())
        standby = Standby(b)
        await standby.receive(1)
        assert (await standby.confirm(0)).status_code == 200
        assert make_heartbeat(b.pserver).standbys.caught_up == ()  # an earlier incarnation may have acknowledged it
        assert await is_waiting(get)
        await standby.confirm(1)
        assert decode(await get)[1]["round"] == "1"
        assert (await freeze).applied == 1
        assert make_heartbeat(b.pserver).standbys.caught_up == (NAME,)


ENDS: dict[str, tuple[Callable[[Bench], Awaitable[Any]], str]] = {
    "the pserver stops": (lambda b: b.pserver.stop(), "stopping"),
    "the run fails": (lambda b: b.run.end(TrainerLost("trainer 1 is lost"), is_failure=True), "trainer_lost"),
    "a rollback": (lambda b: b.install_next_run("run1", attempt=1, restore=0, number=2), "stale_run"),
    "another run": (lambda b: b.install_next_run(number=2), "stale_run"),
}


@pytest.mark.parametrize("how", ENDS)
async def test_every_wait_ends_with_the_run(tmp_path: Path, how: str) -> None:
    end, code = ENDS[how]
    async with replicated(tmp_path) as (b, _):
        await contribute(b, 1)
        waits = [begin(b.get(rank, 1)) for rank in (0, 1)]
        await until(lambda: b.run.storage.log.tail.round == 1)
        waits += [begin(b.freeze(2)), begin(b.run.read_after_round(9, dict, 60)), begin(b.run.read_now(dict))]
        assert await is_waiting(waits[-1])
        await asyncio.wait_for(end(b), 5)
        for wait in waits:
            await asyncio.wait_for(refused(code, wait), 5)


async def test_a_standby_that_confirms_nothing_for_the_round_time_out_fails_the_run(tmp_path: Path) -> None:
    async with replicated(tmp_path, patience_seconds=0.2) as (b, _):
        await b.get(0, 0)
        await contribute(b, 1)
        lost = await refused("standby_lost", b.get(0, 1))
        assert lost.text == "round 1 waited 0.2 s for a standby in sync with pserver 0"
        failure = make_heartbeat(b.pserver).failure
        assert failure is not None
        assert failure["code"] == "standby_lost"


# ---------------------------------------------------------------------- reports and refusals


async def test_a_standby_that_is_late_again_and_again_joins_later_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with replicated(tmp_path, requires=()) as (b, _):
        confirmations, now = b.run.standbys, [0.0]
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now[0])
        rounds = iter(range(1, 10_000))

        def join_and_be_late() -> float:
            """Return the seconds until the standby may join, after which it is late."""
            began = now[0]
            while "standby-b" not in confirmations.describe().connected:
                now[0] += 1.0
                confirmations.confirm("standby-b", next(rounds))
            require(b, confirmations.required.number + 1, "standby-b")
            joined = now[0] - began
            now[0] += 3.0
            confirmations.note_late(next(rounds), is_stuck=False)
            require(b, confirmations.required.number + 1)
            return joined

        with structlog.testing.capture_logs() as logs:
            seconds = [join_and_be_late() for _ in range(10)]
            now[0] += standbys.STEADY_SECONDS + standbys.MAX_BACKOFF_SECONDS
            seconds += [join_and_be_late() for _ in range(2)]
        assert seconds == [2, 1, 4, 8, 16, 32, 64, 128, 256, 300, 1, 1]
        assert [line["not_in_sync_seconds"] for line in logs] == [4, 8, 16, 32, 64, 128, 256, 300, 300, 4]
        assert {line["standby"] for line in logs} == {"standby-b"}


async def test_an_update_waits_for_a_standby_that_catches_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with replicated(tmp_path, requires=()) as (b, standby):
        monkeypatch.setattr(standbys, "CATCH_UP_SECONDS", 30.0)
        await contribute(b, 1)
        await b.get(0, 1)  # the standby has confirmed round 0
        await contribute(b, 2)
        get = begin(b.get(0, 2))
        assert await is_waiting(get)
        await standby.confirm(1)
        await get


# ---------------------------------------------------------------------- confirmations in any order


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
