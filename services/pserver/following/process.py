"""The standby as a process, which may become the pserver: the same server answers with the application of a pserver."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import httpx
from fastapi import FastAPI
from starlette.types import Scope

from ps_http2.local_sockets import local_name
from ps_protocol.errors import GradpostError, TryAgain
from ps_protocol.membership import PserverRegistered
from ps_protocol.routes import FENCE_STANDBY, PROMOTE_STANDBY
from services.runtime.compute import ComputeExecutor
from services.runtime.metrics import ServiceMetrics
from services.runtime.server import SwitchedApp, serve

from ..pserver import Pserver
from ..registration import Registration
from ..settings import PserverSettings
from .app import make_follower_app
from .follower import Follower
from .metrics import StandbyMetrics
from .promotion import Promotion
from .reports import Reports


async def serve_follower(
    settings: PserverSettings,
    stop: asyncio.Event,
    *,
    pserver: Pserver,
    app: FastAPI,
    registration: Registration,
    http: httpx.AsyncClient,
    open_updates: Callable[[], httpx.AsyncClient],
    compute: ComputeExecutor,
    local: socket.socket | None = None,
) -> int:
    """Follow and serve until `stop` is set. Returns the exit code.

    Once it is promoted, this process is `pserver`, with its application and its registration.
    """
    assert settings.follow is not None
    metrics = ServiceMetrics("standby")
    async with asyncio.TaskGroup() as tasks:
        follower = Follower(settings.follow, pserver, http, open_updates, compute, StandbyMetrics(metrics.registry))
        reports = Reports(follower, settings, http)

        def begin_heartbeats(answer: PserverRegistered) -> None:
            tasks.create_task(registration.run(promotion.address, stop, answer))

        promotion = Promotion(
            follower,
            pserver,
            http2=settings.http2,
            local=None if local is None else local_name(local),
            on_promoted=begin_heartbeats,
        )
        own = make_follower_app(follower, promotion, metrics)

        def choose(scope: Scope) -> FastAPI:
            is_own = promotion.registered is None or scope.get("path") in (FENCE_STANDBY, PROMOTE_STANDBY)
            return own if is_own else app

        def begin(address: str) -> None:
            promotion.address = address
            tasks.create_task(reports.run(address, stop))
            tasks.create_task(_follow_until(stop, follower, reports))

        await serve(SwitchedApp([own, app], choose), settings, stop=stop, on_started=begin, local=local)
    if reports.leads_again:
        registration.next_role = {"follow": None, "pserver_index": settings.follow}
    return reports.exit_code or registration.exit_code


async def _follow_until(stop: asyncio.Event, follower: Follower, reports: Reports) -> None:
    following, stopping = asyncio.create_task(follower.follow()), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({following, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if following.done():
            await following
    except GradpostError as error:
        reports.fail(error, stop)
    finally:
        following.cancel()
        stopping.cancel()
        if follower.replica is not None:
            follower.replica.end(TryAgain("the standby stops"))
