"""The process of the coordinator."""

from __future__ import annotations

import asyncio

from services.runtime.failpoints import arm_failpoints
from services.runtime.logs import configure_logs, get_logger
from services.runtime.metrics import ServiceMetrics
from services.runtime.security import make_peer_client
from services.runtime.server import run_service, serve

from .app import make_coordinator_app
from .coordinator import Coordinator
from .metrics import measure_cluster
from .settings import CoordinatorSettings

log = get_logger()


def main(settings: CoordinatorSettings) -> int:
    """Serve until the process is stopped or, with exit_when_done, the run is over. Returns the exit code."""
    configure_logs("coordinator", settings.log_format, settings.log_level)
    log.info("starting")  # all imports are done
    arm_failpoints(settings.failpoints or "")
    return run_service(lambda stop: _serve(settings, stop))


async def _serve(settings: CoordinatorSettings, stop: asyncio.Event) -> int:
    async with make_peer_client(settings) as http, asyncio.TaskGroup() as tasks:
        coordinator = Coordinator(settings, http)
        await coordinator.restore()
        metrics = ServiceMetrics("coordinator")
        measure_cluster(coordinator.cluster, metrics.registry)
        app = make_coordinator_app(coordinator, metrics)
        tasks.create_task(coordinator.run(stop))
        await serve(app, settings, stop=stop)
    return coordinator.cluster.exit_code if settings.exit_when_done else 0
