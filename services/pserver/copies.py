"""Memory for copies of blocks that somebody looks at: as many at once as fit into a budget."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ps_protocol.errors import TryAgain

MAX_BYTES = 256 * 1024 * 1024
PATIENCE_SECONDS = 10.0  # of who waits for room


class Copies:
    """Many small blocks may be looked at together, of large ones few; one always, however large."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._freed = asyncio.Event()

    @asynccontextmanager
    async def reserve(self, num_bytes: int) -> AsyncIterator[None]:
        """Wait for room and hold it for the block. Raises TryAgain if there is none for long."""
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while self._num_bytes and self._num_bytes + num_bytes > self._max_bytes:
                    self._freed.clear()
                    await self._freed.wait()
        except TimeoutError:
            raise TryAgain("too many are looking at large blocks", code="overloaded") from None
        self._num_bytes += num_bytes
        try:
            yield
        finally:
            self._num_bytes -= num_bytes
            self._freed.set()
