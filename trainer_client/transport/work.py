"""Work on the network as generators, without an event loop.

A piece of work yields the time, by `time.monotonic`, at which it has to be resumed at the latest. It is resumed after
every event, and looks whether the condition holds that it waits for, as after `threading.Condition.wait`:

    while not call.is_done:
        yield math.inf

To close a piece of work is to give it up: its `finally` clauses end its requests. What other work waits for may only
change before an end, or before `yield 0.0`, because nothing else lets the other work look again.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Generator, Iterable
from contextlib import suppress
from typing import Generic, TypeAlias, TypeVar

T = TypeVar("T")

Work: TypeAlias = Generator[float, None, T]


CHECK_SECONDS = 5.0  # between looks whether the thread that would set a signal is still there


class Signal:
    """A flag that one thread waits for, and any thread sets.

    An interrupt within `Condition` or `Event` may leave their lock held for ever; no interrupt can come within this
    one's methods.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """Let the next `wait`, or that of now, return True."""
        with suppress(RuntimeError):  # it is set already
            self._lock.release()

    def wait(self, seconds: float) -> bool:
        """Wait until it is set, and clear it; return False after some seconds."""
        return self._lock.acquire(timeout=seconds)


class Batch(Generic[T]):
    """Pieces of work that go on concurrently."""

    def __init__(self, pieces: Iterable[Work[T]] = ()) -> None:
        """Begin with these pieces, in the order of their results."""
        self._results: list[T | None] = []
        self._running: dict[int, Work[T]] = {}
        for piece in pieces:
            self.add(piece)

    def __len__(self) -> int:
        return len(self._running)

    def add(self, piece: Work[T]) -> None:
        """Add a piece, which begins with the next `advance`."""
        self._running[len(self._results)] = piece
        self._results.append(None)

    def advance(self) -> float:
        """Resume all pieces, and return when to resume them again at the latest. Raises the first error of a piece."""
        while True:
            due, num_running = math.inf, len(self._running)
            for index, piece in [*self._running.items()]:
                try:
                    due = min(due, next(piece))
                except StopIteration as end:
                    self._results[index] = end.value
                    del self._running[index]
                except BaseException:
                    del self._running[index]
                    raise
            if len(self._running) == num_running or not self._running:
                return due

    def finish(self) -> Work[list[T]]:
        """Go on until all pieces have ended, and return their results. The first error gives up the others."""
        try:
            due = self.advance()
            while self._running:
                yield due
                due = self.advance()
        finally:
            self.close()
        return self._results  # type: ignore[return-value]  # all have ended

    def close(self) -> None:
        """Give up all pieces."""
        for piece in self._running.values():
            piece.close()
        self._running.clear()


def together(pieces: Iterable[Work[T]]) -> Work[list[T]]:
    """Do pieces of work concurrently, and return their results in order. The first error gives up the others."""
    return Batch(pieces).finish()


def pause(seconds: float) -> Work[None]:
    """Wait for some seconds."""
    due = time.monotonic() + seconds
    while time.monotonic() < due:
        yield due
