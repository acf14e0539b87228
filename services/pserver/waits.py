"""Waits for several events."""

from __future__ import annotations

import asyncio


async def wait_for_any(seconds: float, *events: asyncio.Event) -> None:
    """Wait until one of these is set, up to `seconds`."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
