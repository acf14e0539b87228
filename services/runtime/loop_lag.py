"""How late the event loop is: the time that every request on it waits while something blocks it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

INTERVAL_SECONDS = 0.25


async def watch_loop_lag(observe: Callable[[float], object], *, interval_seconds: float = INTERVAL_SECONDS) -> None:
    """Measure forever by how many seconds a sleep of `interval_seconds` is late; run it as a task and cancel it."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + interval_seconds
        await asyncio.sleep(interval_seconds)
        observe(max(0.0, loop.time() - due))
