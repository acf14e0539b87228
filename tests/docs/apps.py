"""The applications of both services without a cluster, and plain HTTP requests to running ones."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
from fastapi import FastAPI

from ps_protocol.frames import DEFAULT_LIMITS
from services.coordinator.coordinator import Coordinator
from services.coordinator.process import make_coordinator_app
from services.coordinator.settings import CoordinatorSettings
from services.pserver.app import make_pserver_app
from services.pserver.durable.disk import Disk
from services.pserver.metrics import PserverMetrics
from services.pserver.pserver import Pserver
from services.pserver.shard.bodies import InFlight
from services.runtime.compute import ComputeExecutor
from services.runtime.metrics import ServiceMetrics


@asynccontextmanager
async def run_pserver() -> AsyncIterator[tuple[Pserver, FastAPI]]:
    """Yield a pserver that is not registered yet, and its application."""
    compute = ComputeExecutor()
    metrics = ServiceMetrics("pserver")
    in_flight = InFlight(DEFAULT_LIMITS.max_body_bytes)
    with TemporaryDirectory() as folder:
        disk = Disk(Path(folder))
        pserver = Pserver(compute, PserverMetrics(metrics.registry, compute), DEFAULT_LIMITS, in_flight, disk)
        try:
            yield pserver, make_pserver_app(pserver, metrics)
        finally:
            compute.close()
            disk.close()


@asynccontextmanager
async def run_coordinator() -> AsyncIterator[FastAPI]:
    """Yield the application of a coordinator whose background task does not run."""
    async with httpx.AsyncClient() as http:
        yield make_coordinator_app(Coordinator(CoordinatorSettings(), http), ServiceMetrics("coordinator"))


@asynccontextmanager
async def call(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client of an application, without a network."""
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://service") as http:
        yield http


def read_bytes(url: str) -> bytes:
    return httpx.get(url, trust_env=False, timeout=30).raise_for_status().content


def read_json(url: str) -> Any:
    return httpx.get(url, trust_env=False, timeout=30).raise_for_status().json()
