"""Waits that end early: for several events, and with an error that another task sets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import TypeAlias

from ps_protocol.errors import GradpostError

EndWait: TypeAlias = Callable[[], None]


class EndableWait:
    """A block that may wait. Another task may call the function that it is entered with, which raises an error there.

    The block has a time-out without a deadline, which the function sets to now. A class takes half the time of a
    generator, and every request waits.
    """

    def __init__(self, make_error: Callable[[], GradpostError]) -> None:
        self._make_error = make_error
        self._timeout = asyncio.timeout(None)

    async def __aenter__(self) -> EndWait:
        await self._timeout.__aenter__()
        return self._end

    def _end(self) -> None:
        self._timeout.reschedule(asyncio.get_running_loop().time())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError:
            raise self._make_error() from None


async def wait_for_any(seconds: float, *events: asyncio.Event) -> None:
    """Wait until one of these is set, up to `seconds`."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
