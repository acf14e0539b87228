"""Waits that end early: for several events, and with an error that another task sets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeAlias

from ps_protocol.errors import GradpostError

EndWait: TypeAlias = Callable[[], None]


@asynccontextmanager
async def endable_wait(make_error: Callable[[], GradpostError]) -> AsyncIterator[EndWait]:
    """Run a block that may wait. Another task may call the yielded function, which raises an error in the block.

    The block has a time-out without a deadline, which the function sets to now.
    """
    timeout = asyncio.timeout(None)
    try:
        async with timeout:
            yield lambda: timeout.reschedule(asyncio.get_running_loop().time())
    except TimeoutError:
        if not timeout.expired():
            raise
        raise make_error() from None


async def wait_for_any(seconds: float, *events: asyncio.Event) -> None:
    """Wait until one of these is set, up to `seconds`."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
