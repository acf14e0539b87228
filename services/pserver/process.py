"""The pserver as a process."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from functools import partial

import httpx
import torch

from ps_config.control_client import BearerAuth
from ps_config.tokens import TokenPair
from ps_http2.local_sockets import bind_locally, local_name
from ps_http2.polled_client import PolledTransport
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
from .following.follower import Follower
from .metrics import PserverMetrics
from .pserver import Pserver
from .registration import Registration
from .settings import PserverSettings
from .shard.bodies import InFlight

log = get_logger()


def main(settings: PserverSettings) -> int:
    """Serve until stopped or until the run is over. Returns the exit code."""
    configure_logs("pserver" if settings.follow is None else "standby", settings.log_format, settings.log_level)
    log.info("starting")  # everything is imported
    arm_failpoints(settings.failpoints or "")
    torch.set_num_threads(settings.threads)
    return run_service(lambda stop: _serve(settings, stop))


async def _serve(settings: PserverSettings, stop: asyncio.Event) -> int:
    """Serve until `stop` is set, or the run is over. Returns the exit code."""
    compute = ComputeExecutor()
    metrics = ServiceMetrics("pserver" if settings.follow is None else "standby")
    disk = Disk(settings.state_dir, settings.checkpoints)
    in_flight = InFlight(settings.max_inflight_bytes or usable_memory_bytes() // 4)
    pserver = Pserver(compute, PserverMetrics(metrics.registry, compute), settings.frame_limits, in_flight, disk)
    pserver.http2 = settings.http2
    app = make_pserver_app(pserver, metrics)
    local = bind_locally() if settings.listens_locally else None
    with local or nullcontext():
        pserver.local = None if local is None else local_name(local)
        async with make_peer_client(settings) as http, asyncio.TaskGroup() as tasks:

            def make_follower(index: PserverIndex) -> Follower:
                return Follower(
                    index, pserver.instance, disk, http, partial(_open_updates, settings),
                    pserver.heartbeat_is_due.set, compute=compute, pool=pserver.pool, metrics=pserver.metrics,
                )  # fmt: skip

            registration = Registration(pserver, settings, http, make_follower)

            def stay_registered(address: str) -> None:
                pserver.address = address
                tasks.create_task(registration.run(stop))

            await serve(app, settings, stop=stop, on_started=stay_registered, local=local)
    return registration.exit_code


def _open_updates(settings: PserverSettings) -> httpx.Client:
    """Return a client for the updates of a leader, which receives large bodies without a copy."""
    auth = None if settings.sent_token is None else BearerAuth(TokenPair(settings.sent_token, log.warning))
    return httpx.Client(transport=PolledTransport(settings.client_tls), auth=auth, trust_env=False)
