"""The pserver as a process."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial

import httpx
import torch

from ps_http2.client import Http2Transport
from ps_http2.local_sockets import bind_locally, local_name
from ps_http2.stream import MIN_WINDOW_BYTES
from ps_protocol.vocabulary import PserverIndex
from services.runtime.compute import ComputeExecutor
from services.runtime.failpoints import arm_failpoints
from services.runtime.logs import configure_logs, get_logger
from services.runtime.metrics import ServiceMetrics
from services.runtime.process import usable_memory_bytes
from services.runtime.security import make_peer_client
from services.runtime.server import run_service, serve

from .app import make_pserver_app
from .durable.disk import Disk
from .following.process import serve_follower
from .limits import InFlight
from .metrics import PserverMetrics
from .pserver import Pserver
from .registration import Registration
from .settings import PserverSettings

log = get_logger()


def main(settings: PserverSettings) -> int:
    """Serve until stopped or until the run is over. Returns the exit code."""
    configure_logs("pserver" if settings.follow is None else "standby", settings.log_format, settings.log_level)
    log.info("starting")  # everything is imported
    arm_failpoints(settings.failpoints or "")
    torch.set_num_threads(settings.threads)
    return run_service(lambda stop: _serve(settings, stop))


async def _serve(settings: PserverSettings, stop: asyncio.Event) -> int:
    """Serve until `stop` is set, or the run is over, in one role after another: see `Registration` and `Reports`."""
    while True:
        ended = asyncio.Event()
        stopping = asyncio.create_task(stop.wait())
        stopping.add_done_callback(lambda _, ended=ended: ended.set())  # type: ignore[misc]
        try:
            exit_code, next_role = await _serve_once(settings, ended)
        finally:
            stopping.cancel()
        if not next_role or stop.is_set():
            return exit_code
        settings = settings.model_copy(update={**next_role, "listen_fd": None})


async def _serve_once(settings: PserverSettings, stop: asyncio.Event) -> tuple[int, Mapping[str, PserverIndex | None]]:
    """Serve in one role. Returns the exit code, and the settings of the next role, if there is one."""
    compute = ComputeExecutor()
    metrics = ServiceMetrics("pserver")
    disk = Disk(settings.state_dir, settings.checkpoints)
    in_flight = InFlight(settings.max_inflight_bytes or usable_memory_bytes() // 4)
    pserver = Pserver(compute, PserverMetrics(metrics.registry, compute), settings.frame_limits, in_flight, disk)
    app = make_pserver_app(pserver, metrics)
    local = bind_locally() if settings.listens_locally else None
    with local or nullcontext():
        async with make_peer_client(settings) as http, asyncio.TaskGroup() as tasks:
            name = None if local is None else local_name(local)
            registration = Registration(pserver, settings, http, local=name)

            def stay_registered(address: str) -> None:
                tasks.create_task(registration.run(address, stop))

            if settings.follow is None:
                await serve(app, settings, stop=stop, on_started=stay_registered, local=local)
                exit_code = registration.exit_code
            else:
                exit_code = await serve_follower(
                    settings, stop, pserver=pserver, app=app, registration=registration, http=http,
                    open_updates=partial(_open_updates, settings), compute=compute, local=local,
                )  # fmt: skip
    compute.close()
    if registration.next_role:
        disk.close()
    return exit_code, registration.next_role


def _open_updates(settings: PserverSettings) -> httpx.AsyncClient:
    """Return a client for the updates of a leader.

    Its small window makes the pserver wait, and not this process keep what it cannot apply yet.
    """
    transport = Http2Transport(settings.client_tls, window=MIN_WINDOW_BYTES) if settings.http2 else None
    return make_peer_client(settings, transport)
