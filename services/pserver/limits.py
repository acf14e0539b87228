"""How much a pserver takes in at once: bytes of bodies that are being received, and gets that wait."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from ps_protocol.errors import TryAgain
from ps_protocol.vocabulary import Rank

MAX_WAITING_GETS = 16  # of one trainer; one is all that it needs, or one for each step on its way


class InFlight:
    """Bytes of bodies from their headers until their request has ended, as announced.

    Every trainer has an equal share, so that none can keep the others out, and may send one body however large: so
    each of them always gets on, whatever the others do. What is staged counts no more. It is bounded by the protocol
    (a place for each trainer, round and block), and ends only with the round: if that counted, the push which
    completes a round could be refused for ever.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._of_rank: Counter[Rank] = Counter()

    def __repr__(self) -> str:
        return f"<InFlight [{self.num_bytes} of {self._max_bytes} bytes]>"

    @property
    def num_bytes(self) -> int:
        """Of all trainers together."""
        return self._of_rank.total()

    @contextmanager
    def reserve(self, rank: Rank, num_bytes: int, num_trainers: int) -> Iterator[None]:
        """Count a body while the block runs. Raises TryAgain at once if the trainer's share is used up."""
        share = self._max_bytes // max(1, num_trainers)
        mine = self._of_rank[rank]
        if mine and mine + num_bytes > share:
            raise TryAgain(
                f"bodies of trainer {rank} are in flight already", code="overloaded",
                expected=f"<= {share} bytes together", actual=mine + num_bytes,
            )  # fmt: skip
        self._of_rank[rank] += num_bytes
        try:
            yield
        finally:
            self._of_rank[rank] -= num_bytes
            if not self._of_rank[rank]:
                del self._of_rank[rank]


class WaitingGets:
    """The gets of each trainer that wait, or whose replies are being taken.

    One too many ends the oldest: its client has most likely gone.
    """

    def __init__(self, max_each: int = MAX_WAITING_GETS) -> None:
        self._max_each = max_each
        self._of_rank: defaultdict[Rank, deque[asyncio.Timeout]] = defaultdict(deque)

    def __repr__(self) -> str:
        return f"<WaitingGets [{ {rank: len(gets) for rank, gets in self._of_rank.items()} }]>"

    @asynccontextmanager
    async def place(self, rank: Rank) -> AsyncIterator[None]:
        """Wait within the block; TryAgain is raised there when newer gets need the place."""
        gets = self._of_rank[rank]
        if len(gets) >= self._max_each:
            gets.popleft().reschedule(asyncio.get_running_loop().time())
        try:
            async with asyncio.timeout(None) as place:
                gets.append(place)
                yield
        except TimeoutError:
            raise TryAgain(f"trainer {rank} has asked {self._max_each} times since", code="overloaded") from None
        finally:
            if place in gets:
                gets.remove(place)
            if not gets:
                self._of_rank.pop(rank, None)


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
