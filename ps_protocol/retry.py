"""The repetition of requests by clients: pauses, limits and a loop; and the period of heartbeats.

Every request of the protocol may be repeated, because its identity lets the service count it once. A policy decides
which failures a request survives, how long it pauses after each of them, and when it gives up.
"""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from .errors import GradpostError, NotReady, RoundPending

T = TypeVar("T")

FIRST_BACKOFF_SECONDS = 0.05
MAX_BACKOFF_SECONDS = 2.0
MAX_HEARTBEAT_PERIOD_SECONDS = 1.0  # heartbeats carry progress and results, which people watch
MAX_PAUSE_SECONDS = 30.0  # a longer `Retry-After` is a mistake: the caller has its own deadlines

_random = random.SystemRandom()  # the seeds of a script must not depend on the number of repeated requests


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """The failures that a request survives, and what happens after each of them."""

    errors: tuple[type[Exception], ...]  # any other exception ends the request
    pause: Callable[[Any], Awaitable[None]]  # waits until the next attempt after this error; raises to give up


async def request_with_retry(attempt: Callable[[], Awaitable[T]], policy: RetryPolicy) -> T:
    """Call `attempt` until it returns, and return its result. Raises what the policy raises or does not survive."""
    while True:
        try:
            return await attempt()
        except policy.errors as error:
            await policy.pause(error)


class Patience:
    """A limit on the time for which failures of one kind go on, from the first one after a reset."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._now = now
        self._since: float | None = None

    def start(self) -> None:
        """Start to count the time, unless it is already being counted."""
        if self._since is None:
            self._since = self._now()

    def reset(self) -> None:
        """Forget the failures until now."""
        self._since = None

    def note_failure(self) -> bool:
        """Note a failure; return True if failures have gone on for the whole time."""
        self.start()
        assert self._since is not None
        return self._now() >= self._since + self._seconds


def read_retry_after(text: str | None) -> float | None:
    """Return the seconds of a `Retry-After` header; None for a date, which no service sends, or no number.

    >>> read_retry_after("2"), read_retry_after("86400"), read_retry_after("Fri, 31 Dec 2027 23:59:59 GMT")
    (2.0, 30.0, None)
    """
    if text is None or not (text.isascii() and text.isdigit()):
        return None
    return min(float(text[:9]), MAX_PAUSE_SECONDS)


def choose_pause(answer: GradpostError, least_seconds: float) -> float:
    """Return the seconds to pause after this answer: its `Retry-After`, and a random part of as much again.

    The random part spreads the clients. A client that waits for other processes polls every `least_seconds` instead,
    because the service is not overloaded then.
    """
    if answer.retry_after_seconds is None or isinstance(answer, NotReady | RoundPending):
        return least_seconds
    return max(least_seconds, answer.retry_after_seconds * _random.uniform(1.0, 2.0))


def choose_backoff(num_failures: int) -> float:
    """Return the random seconds to pause after so many attempts (from 1) without an answer. The limit doubles."""
    doublings = min(num_failures - 1, 10)  # a larger power might exceed a float
    return _random.uniform(0.0, min(MAX_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * 2**doublings))


def heartbeat_period(lease_seconds: float) -> float:
    """Return the seconds between heartbeats: a third of the lease, and at most one.

    >>> heartbeat_period(1.5), heartbeat_period(10.0)
    (0.5, 1.0)
    """
    return min(lease_seconds / 3, MAX_HEARTBEAT_PERIOD_SECONDS)
