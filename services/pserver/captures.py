"""Looking at a whole shard right after a named round, before its next write, so that all pservers show the same one.

As with checkpoints, but nothing goes to a disk: whoever asks names a round that is not over, on every pserver.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from ps_protocol.errors import FutureRound, StaleRound, TryAgain
from ps_protocol.vocabulary import Round

T = TypeVar("T")

MAX_WANTED = 8  # each holds a copy of a shard for its reader
MAX_ROUNDS_AHEAD = 10_000


class Captures:
    """`want` and `miss` are called on the event loop, `take` on the compute thread."""

    def __init__(self) -> None:
        self._wanted: dict[Round, list[_Capture]] = {}

    async def wait(self, round_: Round, look: Callable[[], T], seconds: float, newest: Round) -> T:
        """What `look` finds after a round that is not over, `newest` being the one before the open one.

        Raises TimeoutError after so many seconds, StaleRound if the round was over too soon, FutureRound, TryAgain.
        """
        if round_ > newest + MAX_ROUNDS_AHEAD:
            raise FutureRound(f"round {round_} is far ahead", current=newest)
        if sum(map(len, self._wanted.values())) >= MAX_WANTED:
            raise TryAgain("too many wait for rounds to look at", code="overloaded")
        capture = _Capture(look)
        self._wanted.setdefault(round_, []).append(capture)
        try:
            return await asyncio.wait_for(capture.result, seconds)
        finally:
            if capture in (left := self._wanted.get(round_, [])):
                left.remove(capture)

    def take(self, version: Round) -> None:
        """The shard is now what it is after this round."""
        for capture in tuple(self._wanted.pop(version, ())):  # who gives up meanwhile takes itself out
            capture.take()

    def miss(self, applied: Round) -> None:
        """Those whose round is over have come too late."""
        for round_ in [round_ for round_ in self._wanted if round_ <= applied]:
            for capture in self._wanted.pop(round_):
                capture.tell(None, StaleRound(f"round {round_} is over", current=applied))

    def end(self, reason: Exception) -> None:
        """There are no more rounds."""
        while self._wanted:
            for capture in self._wanted.popitem()[1]:
                capture.tell(None, reason)


class _Capture:
    def __init__(self, look: Callable[[], Any]) -> None:
        self.result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._look = look

    def take(self) -> None:
        """On the compute thread. What goes wrong is the reader's, not the round's."""
        found, error = None, None
        try:
            found = self._look()
        except Exception as problem:
            error = problem
        self.result.get_loop().call_soon_threadsafe(self.tell, found, error)

    def tell(self, found: Any, error: Exception | None) -> None:
        if self.result.done():
            return
        if error is None:
            self.result.set_result(found)
        else:
            self.result.set_exception(error)
