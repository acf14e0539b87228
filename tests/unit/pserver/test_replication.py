"""The updates in the log and the copy of a shard: a reader of both has the bits of the pserver, at any speed."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from ps_protocol.consistency import Consistency
from ps_protocol.errors import RunStopped, TrainerLost
from ps_protocol.membership import Controls, Membership
from ps_protocol.norms import AgreedNorm, ShardNorm
from ps_protocol.requests import BARRIER_HEADER, VERDICT_HEADER
from ps_protocol.routes import UPDATES
from ps_protocol.wire_types import WireTypes
from services.pserver.app import make_pserver_app
from services.pserver.durable.records import parse_records
from services.pserver.durable.update_log import LoggedUpdate, list_segments
from services.runtime.metrics import ServiceMetrics

from .oracle import make_options
from .support import Bench, bench, encode, until

Stop = Callable[[Bench], Any]


class Reader:
    """A request of the application, without a network. It takes parts of the answer while `takes` is set."""

    def __init__(self, b: Bench, path: str, **query: Any) -> None:
        self.status = 0
        self.body = bytearray()
        self.headers: dict[bytes, bytes] = {}
        self.takes, self.leaves, self.is_held = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.takes.set()
        self._has_sent = False
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "2", "method": "GET", "scheme": "http",
            "path": path, "raw_path": path.encode(), "query_string": urlencode(query).encode(), "root_path": "",
            "headers": [(b"host", b"x")], "server": ("x", 1), "client": ("x", 2),
        }  # fmt: skip
        app = make_pserver_app(b.pserver, ServiceMetrics("pserver")) if not hasattr(b, "app") else b.app
        b.app = app  # type: ignore[attr-defined]
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if not self._has_sent:
            self._has_sent = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if not self.takes.is_set():
            self.is_held.set()
        await self.takes.wait()
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], dict(message["headers"])
            return
        self.body += message.get("body", b"")

    @property
    def problem(self) -> dict[str, Any]:
        return dict(json.loads(self.body))

    async def leave(self) -> None:
        self.leaves.set()
        await asyncio.wait_for(self.task, 5)


@dataclass
class Updates:
    """The updates behind one round, which are requested until a wanted round is there."""

    b: Bench
    after: int = 0
    chain: str | None = None
    rounds: list[int] = field(default_factory=list)
    num_requests: int = 0

    async def read_until(self, round_: int) -> list[tuple[LoggedUpdate, memoryview]]:
        """The updates up to a round."""
        found = []
        async with asyncio.timeout(10):
            while self.after < round_:
                query = {"run": "run1", "attempt": 0, "after": self.after, "wait_seconds": 5}
                reader = Reader(self.b, UPDATES, **query, **({"digest": self.chain} if self.chain else {}))
                await reader.task
                assert reader.status == 200, reader.body
                self.num_requests += 1
                for record in parse_records(memoryview(reader.body), self.chain):
                    self.after, self.chain = self.after + 1, record.chain
                    found.append((LoggedUpdate.from_record(record), record.data))
                    self.rounds.append(found[-1][0].round)
        return found


@asynccontextmanager
async def logging(folder: Path, **options: Any) -> AsyncIterator[Bench]:
    async with bench(2, state_dir=folder, **{"durability": "log", "checkpoint_rounds": 0, **options}) as b:
        yield b


async def refusal(b: Bench, **query: object) -> tuple[int, str, dict[str, Any]]:
    reader = Reader(b, UPDATES, **{"run": "run1", "attempt": 0, "after": 0, **query})
    await asyncio.wait_for(reader.task, 10)
    return reader.status, reader.problem["code"], reader.problem


# ---------------------------------------------------------------------- the bits


async def play(b: Bench, first: int, last: int) -> None:
    """Rounds with different contributions, one without a block and one with NaN, clipped where the run clips."""
    for round_ in range(first, last + 1):
        for rank in (0, 1):
            blocks = b.contribution(rank, round_)
            if round_ % 3 == 0:
                del blocks["p1.block0"]
            if round_ == 5:
                blocks["p0.block0"] = blocks["p0.block0"] * math.nan
            metadata = b.completion(num_blocks=len(blocks))
            await b.call("push", b.fence(rank, round_), encode(blocks, metadata))
        for rank in (0, 1):
            headers = {BARRIER_HEADER: "batch", VERDICT_HEADER: "nonfinite" if round_ == 5 else "finite"}
            await b.call("barrier", b.fence(rank, round_), headers=headers)
        norm = None
        if b.install.max_grad_norm is not None:
            own = await b.norm(0, round_, with_barrier=False)
            norm = AgreedNorm(ShardNorm(own.contributions, own.sum_of_squares), own.sum_of_squares)
        for rank in (0, 1):
            await b.get(rank, round_, norm=norm)


async def play_and_write(b: Bench, first: int, last: int) -> None:
    """Rounds, each followed by the end of its snapshot, so that the next one is due at its round."""
    for round_ in range(first, last + 1):
        await b.run.writer.wait_for_writes()
        await b.play_round(round_)
        await b.run.writer.wait_for_writes()


CONTROLS = Controls(since=2, rates={0: 0.25}, frozen=("p2",))
KINDS: dict[str, dict[str, Any]] = {
    "sgd": {},
    "clipped": {"max_grad_norm": 0.5, "optimizer": "AdamW", "groups": [make_options("AdamW", amsgrad=True)]},
    "deltas": {"wire": WireTypes(pull="int8"), "optimizer": "Adam", "groups": [make_options("Adam", lr=0.01)]},
    "controls": {"membership": Membership({0: 1, 1: 1}, controls=(CONTROLS,))},
    "rmsprop": {"optimizer": "RMSprop", "groups": [make_options("RMSprop")]},
    "delayed": {"consistency": Consistency(max_delay=2)},
}  # fmt: skip


# ---------------------------------------------------------------------- updates


async def test_a_slow_reader_gets_its_records_while_files_are_reused(tmp_path: Path) -> None:
    async with logging(tmp_path, checkpoint_rounds=2, keep_checkpoints=1) as b:
        await play_and_write(b, 1, 3)
        reader = Reader(b, UPDATES, run="run1", attempt=0, after=2)
        reader.takes.clear()
        await asyncio.wait_for(reader.is_held.wait(), 10)
        await play_and_write(b, 4, 11)
        assert list_segments(tmp_path / "pserver-0" / "log")[0].base > 3  # the reader's file is gone
        reader.takes.set()
        await asyncio.wait_for(reader.task, 5)
        [record] = parse_records(memoryview(reader.body), None)
        assert LoggedUpdate.from_record(record).round == 3
        assert (await refusal(b, after=3))[:2] == (410, "updates_gone")
        assert len(await Updates(b, 10).read_until(11)) == 1


# ---------------------------------------------------------------------- refusals and ends


async def test_refusals(tmp_path: Path) -> None:
    async with logging(tmp_path, checkpoint_rounds=2, keep_checkpoints=1) as b:
        await play_and_write(b, 1, 5)
        assert (await refusal(b, after=1))[:2] == (410, "updates_gone")
        status, code, problem = await refusal(b, after=6)
        assert (status, code, problem["current"]) == (409, "future_round", 5)
        assert (await refusal(b, run="other"))[1] == "stale_run"
        assert (await refusal(b, attempt=1))[1] == "stale_run"
        assert (await refusal(b, after="x"))[1] == "invalid_message"
        assert (await refusal(b, after=5, digest="0" * 32))[1] == "diverged"


ENDS: dict[str, tuple[Stop, str]] = {
    "the pserver stops": (lambda b: b.pserver.stop(), "stopping"),
    "the run fails": (lambda b: b.run.end(TrainerLost("trainer 1 is lost"), is_failure=True), "trainer_lost"),
    "the run is stopped": (lambda b: b.run.end(RunStopped("stopped"), is_failure=True), "run_stopped"),
    "a rollback": (lambda b: b.install_next_run("run1", attempt=1, restore=2, number=2), "stale_run"),
    "another run": (lambda b: b.install_next_run(number=2), "stale_run"),
}


@pytest.mark.parametrize("how", ENDS)
async def test_a_reader_gets_the_last_update_and_then_the_reason_of_the_end(tmp_path: Path, how: str) -> None:
    stop, code = ENDS[how]
    async with logging(tmp_path) as b:
        await b.play_rounds(1, 3)
        reader = Reader(b, UPDATES, run="run1", attempt=0, after=3, wait_seconds=10)
        await until(lambda: b.run.storage.log.wakers)
        await asyncio.wait_for(stop(b), 5)
        await asyncio.wait_for(reader.task, 0.5)
        assert reader.problem["code"] == code
        if code != "stale_run":
            assert len(await Updates(b).read_until(3)) == 3
            assert (await refusal(b, after=3))[1] == code
