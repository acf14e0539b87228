"""How long a client waits before it sends a request again that was answered with "try again"."""

from __future__ import annotations

import random

from ps_protocol.errors import GradpostError, NotReady, RoundPending

FIRST_BACKOFF_SECONDS = 0.05
MAX_BACKOFF_SECONDS = 2.0
MAX_PAUSE_SECONDS = 30.0  # a longer `Retry-After` is somebody's mistake: the deadlines of the caller are its own

_random = random.SystemRandom()  # a script's own random numbers must not depend on how many requests were repeated


def read_retry_after(text: str | None) -> float | None:
    """Seconds from a `Retry-After` header; None for a date, which no service of ours sends, or no number.

    >>> read_retry_after("2"), read_retry_after("86400"), read_retry_after("Fri, 31 Dec 2027 23:59:59 GMT")
    (2.0, 30.0, None)
    """
    if text is None or not (text.isascii() and text.isdigit()):
        return None
    return min(float(text[:9]), MAX_PAUSE_SECONDS)


def choose_pause(answer: GradpostError, least_seconds: float) -> float:
    """Seconds to wait after this answer: what it says, and up to as much again, so that many do not come together.

    Who merely waits for others asks again after `least_seconds`: it is polling, and the service is not short of
    anything.
    """
    if answer.retry_after_seconds is None or isinstance(answer, NotReady | RoundPending):
        return least_seconds
    return max(least_seconds, answer.retry_after_seconds * _random.uniform(1.0, 2.0))


def choose_backoff(attempt: int) -> float:
    """Return the random seconds to wait after this attempt of a request (from 1) got no answer; the limit doubles."""
    doublings = min(attempt - 1, 10)  # a larger power might exceed a float
    return _random.uniform(0.0, min(MAX_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * 2**doublings))
