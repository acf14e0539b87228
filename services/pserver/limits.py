"""Limits of the memory of a pserver: bytes of bodies in flight, and waiting pulls."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ps_protocol.errors import TryAgain
from ps_protocol.vocabulary import Rank
from services.runtime.gate import current_request, end_request

MAX_WAITING_PULLS = 16  # for one trainer, which needs one pull for each step in flight


class InFlight:
    """Announced bytes of bodies, from their headers until their requests have ended.

    Every trainer has an equal share, and may always send one body of any size, so that no trainer can block another.
    Staged contributions do not count. The protocol bounds them (one for each trainer, round and block), and they end
    with the round only: if they counted, the push that completes a round could be refused for ever.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._by_rank: Counter[Rank] = Counter()

    def __repr__(self) -> str:
        return f"<InFlight [{self.num_bytes} of {self._max_bytes} bytes]>"

    @property
    def num_bytes(self) -> int:
        """The announced bytes of all trainers."""
        return self._by_rank.total()

    @contextmanager
    def reserve(self, rank: Rank, num_bytes: int, num_trainers: int) -> Iterator[None]:
        """Count a body while the block runs. Raises TryAgain without waiting if the trainer's share is used up."""
        share = self._max_bytes // max(1, num_trainers)
        total = self._by_rank[rank] + num_bytes
        if self._by_rank[rank] and total > share:
            raise TryAgain(
                f"trainer {rank} exceeds its share of request bodies in flight; retry when its earlier requests "
                "have ended",
                code="overloaded", expected=f"<= {share} bytes", actual=total,
            )  # fmt: skip
        self._by_rank[rank] += num_bytes
        try:
            yield
        finally:
            self._by_rank[rank] -= num_bytes
            if not self._by_rank[rank]:
                del self._by_rank[rank]


class WaitingPulls:
    """The pulls of each trainer that wait, or whose replies are being sent.

    A pull beyond the limit ends the oldest pull, whose client has most likely disconnected.
    """

    def __init__(self, max_each: int = MAX_WAITING_PULLS) -> None:
        self._max_each = max_each
        self._by_rank: defaultdict[Rank, deque[asyncio.Task[Any]]] = defaultdict(deque)

    def __repr__(self) -> str:
        return f"<WaitingPulls [{ {rank: len(pulls) for rank, pulls in self._by_rank.items()} }]>"

    @contextmanager
    def place(self, rank: Rank) -> Iterator[None]:
        """Count a pull while the block runs. It is ended when a newer pull needs the place."""
        pulls, request = self._by_rank[rank], current_request()
        if len(pulls) >= self._max_each:
            text = f"trainer {rank} sent {self._max_each} newer requests, so this one was ended"
            end_request(pulls.popleft(), TryAgain(text, code="overloaded"))
        pulls.append(request)
        try:
            yield
        finally:
            if request in pulls:
                pulls.remove(request)
            if not pulls:
                self._by_rank.pop(rank, None)
