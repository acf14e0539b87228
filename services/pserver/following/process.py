"""The standby as a process."""

from __future__ import annotations

import asyncio

from ps_protocol.errors import GradpostError, TryAgain
from services.runtime.compute import ComputeExecutor
from services.runtime.metrics import ServiceMetrics
from services.runtime.security import make_peer_client
from services.runtime.server import serve

from ..settings import PserverSettings
from .app import make_follower_app
from .follower import Follower
from .metrics import StandbyMetrics
from .reports import Reports


async def serve_follower(settings: PserverSettings, stop: asyncio.Event) -> int:
    """Follow and serve until `stop` is set. Returns the exit code."""
    assert settings.follow is not None
    compute, metrics = ComputeExecutor(), ServiceMetrics("standby")
    async with make_peer_client(settings) as http, asyncio.TaskGroup() as tasks:
        follower = Follower(settings.follow, http, compute, StandbyMetrics(metrics.registry))
        reports = Reports(follower, settings, http)

        def begin(address: str) -> None:
            tasks.create_task(reports.run(address, stop))
            tasks.create_task(_follow_until(stop, follower, reports))

        await serve(make_follower_app(follower, metrics), settings, stop=stop, on_started=begin)
    compute.close()
    return reports.exit_code


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
