"""A follower of a pserver over a socket, both in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

import httpx
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ps_http2.polled_client import PolledTransport
from ps_protocol.errors import StaleRun
from ps_protocol.membership import PserverRegistered
from ps_protocol.routes import UPDATES
from ps_protocol.standbys import FenceStandby, StandbyAnswer
from services.pserver.app import make_pserver_app
from services.pserver.endpoints import TensorEndpoints
from services.pserver.following.follower import Follower
from services.pserver.following.replica import Replica
from services.runtime.compute import ComputeExecutor
from services.runtime.metrics import ServiceMetrics

from ...runtime.support import running
from ..support import Bench, make_pserver, until
from ..test_replication import logging

Change = Callable[[Scope, Message], Message]


def open_updates() -> httpx.Client:
    return httpx.Client(transport=PolledTransport(), trust_env=False)


class Confirmation(NamedTuple):
    """A request for the updates behind a round."""

    round: int
    instance: str


class Standby:
    """A follower of a bench over a socket. `change` changes what the leader sends."""

    def __init__(self, b: Bench, address: str, http: httpx.AsyncClient, folder: Path) -> None:
        self.b = b
        self.address = address
        self.registry = CollectorRegistry()
        self.compute = ComputeExecutor()
        self.pserver = make_pserver(folder, self.compute, self.registry)
        self.pserver.address = "http://standby:1"
        self.follower = self.pserver.follower = Follower(
            0, self.pserver.instance, self.pserver.disk, http, open_updates,
            self.pserver.heartbeat_is_due.set,
            compute=self.compute, pool=self.pserver.pool, metrics=self.pserver.metrics,
        )  # fmt: skip
        self.task: asyncio.Task[Any] | None = None
        self.change: Change | None = None
        self.confirmed: list[Confirmation] = []
        self.failures: list[str] = []
        log_problem = self.follower._log_problem

        def note_problem(text: str) -> None:
            self.failures.append(text)
            log_problem(text)

        self.follower._log_problem = note_problem  # type: ignore[method-assign]

    def note_request(self, query: Mapping[str, str]) -> None:
        """Note a request for updates, which confirms those before them."""
        self.confirmed.append(Confirmation(int(query["after"]), query["standby"]))

    def has_failed(self, text: str) -> bool:
        return any(text in failure for failure in self.failures)

    def name_leader(self, **changes: Any) -> None:
        values = {"lease_seconds": 10, "leader": self.address, "incarnation": 1, "run": "run1"}
        self.follower.note_answer(StandbyAnswer(**{**values, **changes}))

    def start(self) -> None:
        self.task = asyncio.create_task(self.follower.follow())

    async def stop(self) -> None:
        if self.task is not None:
            self.task.cancel()
            await asyncio.wait({self.task})

    async def close(self) -> None:
        await self.stop()
        if self.follower.replica is not None:
            await self.follower.replica.writer.wait_for_writes()
        self.compute.close()
        self.pserver.disk.close()

    @property
    def replica(self) -> Replica:
        return self.follower.require_replica()

    def diverge(self) -> None:
        """Pretend that the newest update of the replica is one that its leader does not have."""
        positions = self.replica.storage.log.positions
        positions[-1] = positions[-1]._replace(chain="0" * 32)

    def count(self, what: str) -> int:
        return int(self.registry.get_sample_value(f"gradpost_replica_{what}_total") or 0)

    async def catch_up(self) -> None:
        def is_equal() -> bool:
            own, run = self.follower.replica, self.b.run
            identity = run.installed.attempt, run.shard.version
            is_idle = self.compute.num_jobs == 0  # an update counts before it has stepped
            return is_idle and own is not None and (own.installed.attempt, own.round) == identity

        await until(is_equal)
        shard = self.b.run.shard
        assert self.replica.shard.digest() == shard.digest()
        assert self.replica.schedule.history == self.b.run.schedule.copy_history()


@asynccontextmanager
async def promote(standby: Standby, incarnation: int = 2) -> AsyncIterator[Bench]:
    """Make a standby the pserver, without the knowledge of its leader, which may go on."""
    b, pserver = standby.b, standby.pserver
    fence = FenceStandby(run=b.install.run, attempt=0, incarnation=incarnation - 1)
    request = await pserver.fence(fence)
    assert request.held is not None
    await pserver.promote(PserverRegistered(index=0, incarnation=incarnation, lease_seconds=10))
    await standby.stop()
    changes = {"incarnation": incarnation, "restore": request.held.rounds.applied, "number": 3}
    install = b.install.model_copy(update=changes)
    other = Bench(
        pserver, standby.compute, TensorEndpoints(pserver), CollectorRegistry(), b.plan, install, b.groups
    )  # fmt: skip
    assert await other.freeze(2) == request.held.rounds
    await pserver.install_run(install)
    try:
        yield other
    finally:
        await other.run.close(StaleRun("the test is over"))


@asynccontextmanager
async def following_bench(folder: Path, **options: Any) -> AsyncIterator[tuple[Bench, Standby]]:
    """A pserver, and a standby with another folder in the same place."""
    async with logging(folder, **options) as b:
        app = make_pserver_app(b.pserver, ServiceMetrics("pserver"))
        changer = Changer(app.build_middleware_stack)
        app.build_middleware_stack = lambda: changer  # type: ignore[method-assign]
        async with running(app) as service, httpx.AsyncClient() as http:
            standby = Standby(b, service.address, http, folder)
            changer.standby = standby
            standby.name_leader()
            standby.start()
            try:
                yield b, standby
            finally:
                await standby.close()


class Changer:
    """The way into an application, whose messages a test may change."""

    standby: Standby

    def __init__(self, make_gate: Callable[[], ASGIApp]) -> None:
        self.make_gate = make_gate
        self.gate: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        query = dict(parse_qsl(scope["query_string"].decode()))
        if scope["path"] == UPDATES and "standby" in query:
            self.standby.note_request(query)

        async def changing_send(message: Message) -> None:
            change = self.standby.change
            await send(message if change is None else change(scope, message))

        self.gate = self.gate or self.make_gate()
        await self.gate(scope, receive, changing_send)
