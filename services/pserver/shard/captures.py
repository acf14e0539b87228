"""Reads of the whole shard right after a chosen round.

Nothing goes to a disk. A capture names a round that is not over on any pserver, so that all of them show the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future  # any thread may complete it
from typing import Any, TypeVar

from ps_protocol.errors import FutureRound, StaleRound, TryAgain
from ps_protocol.vocabulary import Round

T = TypeVar("T")

MAX_CAPTURES = 8  # each keeps a copy of a shard for its reader
MAX_ROUNDS_AHEAD = 10_000


class Captures:
    """Reads of the whole shard after given rounds, before its next write.

    A job of `ComputeExecutor` calls `capture_round`; other methods are called on the event loop.
    """

    def __init__(self) -> None:
        self._wanted: dict[Round, list[tuple[Callable[[], Any], Future[Any]]]] = {}

    async def wait_for_round(self, round_: Round, read: Callable[[], T], seconds: float, newest: Round) -> T:
        """Return what `read` returns after a round that is not over; `newest` is the newest applied round.

        Raises TimeoutError after `seconds`, StaleRound if the round was over too soon, FutureRound, TryAgain, and the
        errors of `read`.
        """
        if round_ > newest + MAX_ROUNDS_AHEAD:
            raise FutureRound(f"round {round_} must be at most {newest + MAX_ROUNDS_AHEAD} now", current=newest)
        if sum(map(len, self._wanted.values())) >= MAX_CAPTURES:
            raise TryAgain(f"the limit of {MAX_CAPTURES} waiting reads is reached; retry later", code="overloaded")
        waiter: Future[T] = Future()
        capture = read, waiter
        self._wanted.setdefault(round_, []).append(capture)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(waiter), seconds)
        finally:
            if capture in (remaining := self._wanted.get(round_, [])):
                remaining.remove(capture)

    def capture_round(self, version: Round) -> None:
        """Call the readers that wait for this round. A reader's error goes to its caller, not to the round."""
        for read, waiter in tuple(self._wanted.pop(version, ())):  # a reader that gives up removes itself
            if not waiter.set_running_or_notify_cancel():
                continue
            try:
                waiter.set_result(read())
            except Exception as error:
                waiter.set_exception(error)

    def expire_rounds(self, applied: Round) -> None:
        """Refuse captures that arrived too late for their rounds."""
        for round_ in list(self._wanted):
            if round_ <= applied:
                self._refuse(round_, StaleRound(f"round {round_} is over", current=applied))

    def end(self, reason: Exception) -> None:
        """Refuse all captures, since there are no more rounds."""
        for round_ in list(self._wanted):
            self._refuse(round_, reason)

    def _refuse(self, round_: Round, reason: Exception) -> None:
        for _, waiter in self._wanted.pop(round_, ()):
            if waiter.set_running_or_notify_cancel():
                waiter.set_exception(reason)
