from __future__ import annotations

import asyncio
import time

import pytest

from services.runtime.metrics import watch_loop_lag


@pytest.mark.asyncio
async def test_a_blocked_loop_shows_and_an_idle_one_does_not() -> None:
    seen: list[float] = []
    watch = asyncio.create_task(watch_loop_lag(seen.append, interval_seconds=0.02))
    await asyncio.sleep(0.15)
    idle = min(seen)
    seen.clear()
    time.sleep(0.1)  # noqa: ASYNC251 (that is the fault)
    await asyncio.sleep(0.05)
    watch.cancel()
    assert idle < 0.02
    assert 0.08 < max(seen) < 5
