"""Work that a test drives itself."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from ps_config.certificates import TlsFiles
from trainer_client.transport.exchange import Exchange
from trainer_client.transport.work import Work

T = TypeVar("T")

STEP_SECONDS = 0.01  # between looks at what is done by other threads


THREADS = ("caller", "own thread")


@contextmanager
def exchange_on(thread: str) -> Iterator[Exchange]:
    """Yield an exchange whose work goes on while the caller waits, or on a thread of its own."""
    exchange = Exchange(TlsFiles(), None)
    if thread != "caller":
        exchange.use_thread()
    yield exchange
    exchange.close()


def drive(work: Work[T], seconds: float = 5.0) -> T:
    """Resume work until it ends, and return its result. Raises TimeoutError after some seconds."""
    deadline = time.monotonic() + seconds
    try:
        while time.monotonic() < deadline:
            time.sleep(max(0.0, min(next(work) - time.monotonic(), STEP_SECONDS)))
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        work.close()
    raise TimeoutError
