"""A pserver with durability `replicated`, and a standby that confirms what a test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from ps_protocol.membership import RequiredStandbys
from ps_protocol.messages import PserverHeartbeatReply
from ps_protocol.routes import UPDATES
from services.pserver.app import make_pserver_app
from services.pserver.durable.records import parse_records
from services.pserver.durable.update_log import LoggedUpdate
from services.runtime.metrics import ServiceMetrics

from .support import Bench, bench, until
from .test_replication import Reader

NAME = "standby-a"
SOON = 0.05  # seconds, for a request that must not be answered


class Standby:
    """A standby that asks for updates, and so confirms rounds, when the test says so."""

    def __init__(self, b: Bench, name: str = NAME, *, after: int = 0) -> None:
        self.b, self.name, self.held = b, name, after
        self.updates: list[tuple[LoggedUpdate, memoryview]] = []

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
        self.updates = [(LoggedUpdate.from_record(record), record.data) for record in records]
        assert self.updates[-1][0].round == round_

    async def leave(self) -> None:
        """Disconnect while a request waits."""
        reader = Reader(self.b, UPDATES, **self._query(self.held, wait_seconds=10))
        await until(lambda: self.b.run.storage.log._wakers)
        await asyncio.sleep(SOON)
        await reader.leave()


def client(b: Bench) -> httpx.AsyncClient:
    if not hasattr(b, "app"):
        b.app = make_pserver_app(b.pserver, ServiceMetrics("pserver"))  # type: ignore[attr-defined]
    return httpx.AsyncClient(transport=httpx.ASGITransport(b.app), base_url="http://x")  # type: ignore[attr-defined]


def require(b: Bench, number: int, *names: str) -> None:
    """Receive a set of required standbys in the answer to a heartbeat."""
    required = RequiredStandbys(number=number, instances=names)
    b.pserver.handle_heartbeat_reply(PserverHeartbeatReply(required=required), b.pserver.make_heartbeat())


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
