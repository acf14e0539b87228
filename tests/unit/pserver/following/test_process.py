"""The process of a standby, with a coordinator that a test writes: it reports, is promoted, and follows again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI

from ps_protocol import routes
from ps_protocol.errors import Conflict, error_from_problem
from ps_protocol.membership import Freeze, FrozenRounds, PserverRegistered, RegisterPserver
from ps_protocol.messages import PserverHeartbeat, PserverHeartbeatReply, PserverState
from ps_protocol.standbys import FenceStandby, ReportStandby, StandbyAnswer
from services.pserver.app import make_pserver_app
from services.pserver.process import _serve
from services.pserver.settings import PserverSettings
from services.runtime.app import make_app
from services.runtime.metrics import ServiceMetrics

from ...runtime.support import Running, running
from ..support import Bench, until
from ..test_replication import logging


class World:
    """The messages that a coordinator has received, and its answers."""

    def __init__(self) -> None:
        self.leader = StandbyAnswer(lease_seconds=1)
        self.registrations: list[RegisterPserver] = []
        self.heartbeats: list[PserverHeartbeat] = []
        self.reports: list[ReportStandby] = []
        self.is_over = False

    def make_app(self) -> FastAPI:
        app = make_app(title="C", role="coordinator", metrics=ServiceMetrics("coordinator"), is_ready=lambda: None)

        @app.post(routes.REGISTER_PSERVER)
        async def register(message: RegisterPserver) -> PserverRegistered:
            self.registrations.append(message)
            raise Conflict("a standby has replaced pserver 0", code="superseded", current=2)

        @app.post(routes.PSERVER_HEARTBEAT)
        async def heartbeat(index: int, message: PserverHeartbeat) -> PserverHeartbeatReply:
            self.heartbeats.append(message)
            return PserverHeartbeatReply(complete=None)

        @app.post(routes.REPORT_STANDBY)
        async def report(message: ReportStandby) -> StandbyAnswer:
            self.reports.append(message)
            return self.leader

        return app

    def name(self, service: Running, incarnation: int) -> None:
        values = {"leader": service.address, "incarnation": incarnation, "run": "run1"}
        self.leader = StandbyAnswer(lease_seconds=1, **values)


@asynccontextmanager
async def process_of(folder: Path, world: World, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A process of a pserver or of a standby, which must end without an error."""
    async with running(world.make_app()) as coordinator, httpx.AsyncClient(timeout=10) as http:
        stop = asyncio.Event()
        process = asyncio.create_task(
            _serve(PserverSettings(state_dir=folder, coordinator=coordinator.address, port=0, **settings), stop)
        )
        try:
            yield http
        finally:
            stop.set()
            assert await asyncio.wait_for(process, 20) == 0


async def put(http: httpx.AsyncClient, url: str, message: Any) -> httpx.Response:
    answer = await http.put(url, content=message.model_dump_json(), headers={"content-type": "application/json"})
    if answer.is_error:
        raise error_from_problem(answer.json())
    return answer


@asynccontextmanager
async def serving(folder: Path, **options: Any) -> AsyncIterator[tuple[Bench, Running]]:
    async with logging(folder, **options) as b:
        app = make_pserver_app(b.pserver, ServiceMetrics("pserver"))
        async with running(app) as service:
            yield b, service


async def test_a_superseded_pserver_follows_its_successor_and_may_be_promoted_again(tmp_path: Path) -> None:
    world = World()
    async with serving(tmp_path / "leader", incarnation=2) as (b, service):
        await b.play_rounds(1, 3)
        async with process_of(tmp_path / "other", world, pserver_index=0) as http:
            await until(lambda: world.reports)
            [registration] = world.registrations
            assert (registration.index, world.reports[0].follows) == (0, 0)
            assert registration.instance != world.reports[0].instance
            world.name(service, 2)
            await until(lambda: world.reports[-1].round == 3)
            address = world.reports[-1].address
            answer = await put(http, address + routes.FENCE_STANDBY, FenceStandby(run="run1", attempt=0, incarnation=2))
            request = RegisterPserver.from_answer(answer.content)
            assert (request.instance, request.address) == (world.reports[-1].instance, address)
            assert request.local is not None
            assert request.held is not None
            promoted = PserverRegistered(index=0, incarnation=3, lease_seconds=1)
            await put(http, address + routes.PROMOTE_STANDBY, promoted)
            frozen = await put(http, address + routes.FREEZE, Freeze(run="run1", attempt=0, number=2))
            assert FrozenRounds.from_answer(frozen.content) == request.held.rounds
            changes = {"incarnation": 3, "restore": 3, "number": 3}
            await put(http, address + routes.RUN, b.install.model_copy(update=changes))
            await put(http, address + routes.PROMOTE_STANDBY, promoted)
            state = PserverState.from_answer((await http.get(address + routes.STATE + "?digest=true")).content)
            assert (state.index, state.incarnation, state.round) == (0, 3, 3)
            assert state.digest == await b.digest()
            await until(lambda: world.heartbeats and world.heartbeats[-1].run == "run1")
            assert {message.incarnation for message in world.heartbeats} == {3}
            assert world.reports[-1].is_stopping
            num_reports = len(world.reports)
        assert len(world.reports) == num_reports
        assert world.heartbeats[-1].is_stopping


async def test_a_lost_leader_is_reported_at_once_until_another_one_is_followed(tmp_path: Path) -> None:
    world = World()
    world.leader = world.leader.model_copy(update={"lease_seconds": 3600})  # a report would be due after a second
    async with serving(tmp_path / "leader") as (b, service), process_of(tmp_path / "other", world, follow=0):
        await b.play_round(1)
        world.name(service, 1)
        await until(lambda: world.reports and world.reports[-1].round == 1)
        assert world.reports[-1].lost == 0
        service.stop.set()
        await service.task
        await until(lambda: world.reports[-1].lost == 1)
        app = make_pserver_app(b.pserver, ServiceMetrics("pserver"))
        async with running(app) as other:
            b.run.installed = b.run.installed.model_copy(update={"incarnation": 2})
            await b.pserver.run.waits.notify()
            world.name(other, 2)
            await until(lambda: world.reports[-1].lost == 0)
            assert world.reports[-1].round == 1
