"""What a trainer does for clipping: it asks every pserver for its part of a round's norm, and brings back the whole."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from ps_protocol.errors import NormChanged
from ps_protocol.norms import AgreedNorm, ShardNorm, agree

T = TypeVar("T")

PAUSE_SECONDS = 0.05  # while pservers hear, one after the other, of a change of members
MAX_ASKED = 200  # in one pull: a change of members makes it twice or three times


class NormAgreement:
    """On one round's norm, in one pull. All methods run on the I/O loop."""

    def __init__(self, ask: Callable[[], Awaitable[Sequence[ShardNorm | None]]]) -> None:
        """`ask` asks every pserver, in order; None: the round was applied there without a norm."""
        self._ask = ask
        self._lock = asyncio.Lock()
        self._num_asked = 0
        self._agreed: Sequence[AgreedNorm | None] = ()

    @property
    def norm(self) -> float | None:
        """The 2-norm of the whole gradient before it was clipped; None if the round has none."""
        return self._agreed[0].norm if self._agreed and self._agreed[0] else None

    async def bring(self, index: int, get: Callable[[AgreedNorm | None], Awaitable[T]]) -> T:
        """Call `get` with the norm for this pserver, and again if the gradient is another one meanwhile.

        Raises NormChanged if that never ends.
        """
        known = 0
        while True:
            known = await self._agree_after(known)
            try:
                return await get(self._agreed[index])
            except NormChanged:
                continue

    async def _agree_after(self, known: int) -> int:
        """Ask, if nobody has since so many times."""
        async with self._lock:
            while self._num_asked <= known or not self._agreed:
                if self._num_asked == MAX_ASKED:
                    raise NormChanged("the pservers do not agree on whose gradients a round is made of")
                if self._num_asked > known:
                    await asyncio.sleep(PAUSE_SECONDS)
                norms = await self._ask()
                self._num_asked += 1
                told = [norm for norm in norms if norm is not None]
                self._agreed = (agree(told) or ()) if len(told) == len(norms) else () if told else [None] * len(norms)
            return self._num_asked
