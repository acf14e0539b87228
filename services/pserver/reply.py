"""The frame of one version, which many trainers read at once; and what it is made of, if that is lent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from ps_protocol.errors import StaleRound
from ps_protocol.vocabulary import Round

from .versioned_blocks import VersionedBlocks

GRACE_SECONDS = 0.1  # for those who are about to end; whoever may still need these values has not let them be changed


@dataclass(slots=True)
class Reply:
    """Parts are bytes of its own, or views of the shard's values, which nobody writes before it is called back."""

    round: Round
    parts: Sequence[bytes | memoryview]
    blocks: VersionedBlocks | None = None
    _readers: set[asyncio.Timeout] = field(default_factory=set)
    _is_free: asyncio.Event = field(default_factory=asyncio.Event)
    _is_called_back: bool = False

    def parts_for(self, have: Round | None) -> Sequence[bytes | memoryview]:
        """All parts, or fewer for who has the values of a round."""
        return self.parts if have is None or self.blocks is None else self.blocks.parts(have)

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        """Its parts are read in the block. Raises StaleRound there if they are called back."""
        overwritten = StaleRound(f"round {self.round} is being overwritten")
        if self._is_called_back:
            raise overwritten
        reader = asyncio.timeout(None)
        try:
            async with reader:
                self._readers.add(reader)
                yield
        except TimeoutError:
            if not reader.expired():
                raise
            raise overwritten from None
        finally:
            self._readers.discard(reader)
            if not self._readers:
                self._is_free.set()

    async def call_back(self) -> None:
        """Wait until nobody reads it any more; those who go on for long are ended."""
        self._is_called_back = True
        loop = asyncio.get_running_loop()
        until = loop.time() + GRACE_SECONDS
        while self._readers:
            self._is_free.clear()
            try:
                async with asyncio.timeout_at(until):
                    await self._is_free.wait()
            except TimeoutError:
                for reader in self._readers:
                    reader.reschedule(loop.time())
                until = float("inf")
