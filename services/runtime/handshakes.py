"""Limits for TLS handshakes that are not complete: uvicorn does not count them, and asyncio gives each a minute."""

from __future__ import annotations

import asyncio
from typing import Any

from ps_config.certificates import close_handshake


class Handshakes:
    """Closes a connection whose handshake takes over `seconds`, and the oldest ones when there are too many.

    Too many are more than `max_connections`, with the connections whose handshake is complete.
    """

    def __init__(self, *, seconds: float, max_connections: int) -> None:
        self._seconds = seconds
        self._max_connections = max_connections
        # asyncio accepts each connection in a task, which ends with the handshake. The oldest is the first.
        self._timers: dict[asyncio.Task[Any], asyncio.TimerHandle] = {}

    def watch(self, num_complete: int) -> None:
        """Watch the connection that the current task accepts, beside `num_complete` others."""
        accepting = asyncio.current_task()
        assert accepting is not None  # asyncio makes the protocol there
        close_handshake.set(accepting.cancel)  # the callbacks of its connection run in copies of this context
        self._timers[accepting] = accepting.get_loop().call_later(self._seconds, accepting.cancel)
        accepting.add_done_callback(self._forget)
        # The newest one may go on: when its handshake is complete, it is refused with an answer.
        while len(self._timers) > 1 and num_complete + len(self._timers) > self._max_connections:
            oldest = next(iter(self._timers))
            self._forget(oldest)
            oldest.cancel()  # asyncio closes the connection

    def _forget(self, accepting: asyncio.Task[Any]) -> None:
        if (timer := self._timers.pop(accepting, None)) is not None:
            timer.cancel()
