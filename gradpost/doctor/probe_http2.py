"""Send a large body to a short-lived local server, as trainers do; the doctor runs this as a process."""

from __future__ import annotations

import asyncio
import json
import os
import time
from typing import Any

import httpx

from ps_protocol.environment import PREFIX
from ps_protocol.routes import SPEED
from services.runtime.app import make_app
from services.runtime.logs import configure_logs
from services.runtime.metrics import ServiceMetrics
from services.runtime.server import serve
from services.runtime.settings import ServiceSettings
from services.runtime.speed import add_speed_routes
from trainer_client.transport.extensions import BODY_EXTENSION
from trainer_client.transport.http2 import Http2Transport

BODY_BYTES = 4_000_000
NUM_REQUESTS = 8
TIMEOUT_SECONDS = 20.0


async def _measure(address: str) -> dict[str, object]:
    body = memoryview(bytes(BODY_BYTES))
    async with httpx.AsyncClient(transport=Http2Transport(), timeout=None, trust_env=False) as client:
        await client.get(address + "/healthz")
        started = time.monotonic()
        for _ in range(NUM_REQUESTS):
            response = await client.post(address + SPEED, extensions={BODY_EXTENSION: (body,)})
            counted = response.json()
            if counted["num_bytes"] != BODY_BYTES:
                raise RuntimeError(f"{counted['num_bytes']} bytes arrived of {BODY_BYTES}")
        seconds = time.monotonic() - started
    megabytes = NUM_REQUESTS * BODY_BYTES // 1_000_000
    return {
        "version": f"HTTP/{counted['http_version']}",
        "megabytes": megabytes,
        "megabytes_per_second": round(megabytes / seconds),
    }


async def _probe() -> dict[str, object]:
    app = make_app(title="Probe", role="probe", metrics=ServiceMetrics("probe"), is_ready=lambda: None)
    add_speed_routes(app)
    stop = asyncio.Event()
    started: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(serve(app, ServiceSettings(), stop=stop, on_started=started.set_result))
    either: set[asyncio.Future[Any]] = {serving, started}
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    try:
        return await _measure(await started) if started.done() else {}
    finally:
        stop.set()
        await serving  # raises what kept it from starting


if __name__ == "__main__":
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        del os.environ[name]  # these are checked elsewhere
    configure_logs("probe", level="error")
    print(json.dumps(asyncio.run(asyncio.wait_for(_probe(), TIMEOUT_SECONDS))))
