"""When a run's checkpoints are due on one pserver, and how they are written beside serving: one after another."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from ps_protocol.errors import FutureRound, TryAgain
from ps_protocol.vocabulary import Round
from services.runtime.logs import get_logger

from .durable.storage import RunStorage
from .metrics import PserverMetrics

log = get_logger()

MAX_OPEN = 2  # copies of the shard: one that is written, and one that waits for that
MAX_ROUNDS_AHEAD = 10_000  # that one may be wanted for

Write: TypeAlias = Callable[[], object]


class CheckpointWriter:
    """Lives on the event loop; `is_due` is asked on the compute thread, too. Without storage nothing is ever due."""

    def __init__(self, storage: RunStorage | None, interval: int, metrics: PserverMetrics) -> None:
        self.complete: tuple[Round, ...] = ()  # of the whole model, as the coordinator says
        self.has_news = asyncio.Event()  # that the coordinator should hear of at once; a failure is, too
        self._storage = storage
        self._interval = interval
        self._metrics = metrics
        self._wanted: set[Round] = set()
        self._num_open = 0
        self._newest: asyncio.Task[None] | None = None

    def want(self, round_: Round, newest: Round) -> None:
        """One is due after this round, which is not over. Raises FutureRound if it is far ahead, TryAgain."""
        if round_ > newest + MAX_ROUNDS_AHEAD:
            raise FutureRound(f"round {round_} is far ahead", current=newest)
        self._wanted = {wanted for wanted in self._wanted if wanted > newest}
        if round_ not in self._wanted:
            self.check_room(len(self._wanted))
            self._wanted.add(round_)

    def is_due(self, round_: Round) -> bool:
        """Whether one is to be made after this round. A disk that is slower than the rounds gets fewer of them."""
        if self._storage is None:
            return False
        if round_ in self._wanted:
            self._wanted.discard(round_)
            return True  # it has been promised, and the room for it looked at
        return bool(self._interval and round_ % self._interval == 0) and self._num_open == 0

    def check_room(self, num_coming: int = 0) -> None:
        """Raise TryAgain if as many are on their way, or will be, as may be."""
        if self._num_open + num_coming >= MAX_OPEN:
            raise TryAgain("checkpoints are being written")

    async def make(self, snapshot: Awaitable[Write]) -> None:
        """Copy the shard; the copy is written later. Raises TryAgain if the disk does not take even its beginning."""
        self._num_open += 1
        try:
            write = await snapshot
        except OSError as error:
            self._num_open -= 1
            self._say(error)
            raise TryAgain(f"a checkpoint could not be begun: {error}") from error
        except BaseException:
            self._num_open -= 1
            raise
        self._begin(write)

    def begin(self, write: Write) -> None:
        """Write a copy that has been made."""
        self._num_open += 1
        self._begin(write)

    def _begin(self, write: Write) -> None:
        self._newest = asyncio.create_task(self._write(write, self._newest), name="checkpoint")

    async def _write(self, write: Write, before: asyncio.Task[None] | None) -> None:
        assert self._storage is not None
        try:
            if before is not None:
                await asyncio.wait([before])
            with self._metrics.checkpoint_seconds.time():
                await asyncio.to_thread(write)
            self._metrics.checkpoint_time.set_to_current_time()
            await asyncio.to_thread(self._storage.prune, self.complete)
            self.has_news.set()
        except OSError as error:
            self._say(error)
        finally:
            self._num_open -= 1

    def _say(self, error: OSError) -> None:
        # The log goes back to the checkpoint before, so that nothing is lost.
        self._metrics.checkpoint_failures.inc()
        log.error("a checkpoint could not be written; training goes on", error=str(error))

    async def finish(self) -> None:
        """Wait until those that have been begun are written, or have failed."""
        if self._newest is not None:
            await asyncio.wait([self._newest])
