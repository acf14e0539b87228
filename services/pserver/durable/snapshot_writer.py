"""The choice of the rounds after which one pserver writes a snapshot of its shard; writes run beside serving.

The coordinator names the rounds after which all pservers write a snapshot and publish it, as a checkpoint of the model.
A pserver for which no round was named during an interval, or until its log reached its limit in bytes, also writes a
snapshot, to keep its log short (ADR 22).

due ──copy, compute thread──► file in the pserver's folder, one at a time ──if named──► shared storage
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from ps_protocol.errors import StaleRound, TryAgain
from ps_protocol.messages import ShardFile
from ps_protocol.vocabulary import Round
from services.runtime.compute import ComputeExecutor
from services.runtime.failpoints import reach_failpoint
from services.runtime.logs import get_logger
from services.runtime.storage import CheckpointStorage

from ..metrics import PserverMetrics
from ..shard.shard import Shard
from ..shard.shard_state import History
from .storage import RunStorage

log = get_logger()


class Publisher:
    """Copies one file at a time, for all runs of the process, on a thread that may hang as long as the storage does.

    `find_place` returns the shared storage, or None if the coordinator cannot reach this pserver's files. Then a
    snapshot is published as soon as it is in the pserver's folder.
    """

    def __init__(self, find_place: Callable[[], CheckpointStorage | None]) -> None:
        self._find_place = find_place
        self._copying: asyncio.Task[None] | None = None

    @property
    def is_busy(self) -> bool:
        """True while a file is copied, also if its run has ended."""
        return self._copying is not None and not self._copying.done()

    async def publish(self, path: Path, name: str) -> None:
        """Copy a file to the shared storage, under this name. Raises TryAgain if another copy hangs, and OSError."""
        if self.is_busy:
            raise TryAgain("an earlier snapshot is still being copied to the shared storage")
        self._copying = asyncio.create_task(asyncio.to_thread(self._copy, path, name), name="publish a snapshot")
        # The caller may be cancelled, and the error of the copy would not be retrieved.
        self._copying.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(self._copying)

    def _copy(self, path: Path, name: str) -> None:
        reach_failpoint("checkpoint.shard")
        if (place := self._find_place()) is not None:
            place.copy_file(path, name)


class SnapshotWriter:
    """The writer of one run's snapshots. Lives on the event loop."""

    def __init__(
        self,
        storage: RunStorage,
        interval: int,
        metrics: PserverMetrics,
        publisher: Publisher,
        report: Callable[[], None],
    ) -> None:
        """`report` is called when the next heartbeat has to be sent at once."""
        self.published: ShardFile | None = None  # the newest one
        self.is_over = False  # the run is finished, and needs its last checkpoint only
        self._storage = storage
        self._interval = interval
        self._metrics = metrics
        self._publisher = publisher
        self._report = report
        self._named: Round | None = None  # the newest round that the coordinator has named
        self._under_way: Round | None = None  # the named round whose snapshot is copied, written or published
        self._newest: Round = max(storage.rounds, default=0)  # that is written, or being written
        self._turn = asyncio.Lock()  # to use the folder
        self._writes: set[asyncio.Task[OSError | None]] = set()
        self._publishing: asyncio.Task[None] | None = None

    # ------------------------------------------------------------------ which rounds

    def request_round(self, round_: Round, newest: Round, *, is_over: bool) -> bool:
        """Publish the shard after this round, instead of the round that was requested before.

        Returns whether the snapshot has to begin now, since this is the newest round; it counts as under way then.
        Raises StaleRound if the round is over, TryAgain while another snapshot is being published.
        """
        if round_ < newest:
            raise StaleRound(f"round {round_} is over", current=newest)
        self.is_over |= is_over
        if round_ == self._under_way or (self.published is not None and self.published.round == round_):
            return False
        if self._under_way is not None:
            raise TryAgain(f"the checkpoint of round {self._under_way} is being written")
        if self._is_blocked:
            raise TryAgain("a checkpoint of an earlier attempt or run is being written")
        self._named = round_
        if round_ == newest:
            self.begin_named(round_)
        return round_ == newest

    @property
    def _is_blocked(self) -> bool:
        """True while the shared storage hangs in a copy for an earlier attempt or run."""
        return self._under_way is None and self._publisher.is_busy

    def begin_if_due(self, round_: Round) -> bool:
        """Return whether a snapshot is due after this round. A named one counts as under way from now on."""
        if round_ == self._named:
            self.begin_named(round_)
            return True
        is_due = round_ >= self._newest + self._interval or self._storage.has_long_log()
        return bool(self._interval) and is_due and not self._writes

    def begin_named(self, round_: Round) -> None:
        """Count the snapshot after this round, which is to be published, as under way."""
        self._named, self._under_way = None, round_

    def end_named(self, round_: Round) -> None:
        """Count a snapshot as published, or failed."""
        if self._under_way == round_:
            self._under_way = None
            self._report()

    def find_pending(self, newest: Round) -> tuple[Round, ...]:
        """Return the named rounds that are not published yet; `newest` is the newest round here.

        While the shared storage hangs in an earlier copy that is `newest`, so that the coordinator names no round.
        """
        pending = {self._named, self._under_way, newest if self._is_blocked else None}
        return tuple(sorted(round_ for round_ in pending if round_ is not None))

    # ------------------------------------------------------------------ writing

    async def write(
        self,
        shard: Shard,
        history: History,
        compute: ComputeExecutor,
        wait_until_held: Callable[[], Awaitable[None]] | None = None,
    ) -> asyncio.Task[OSError | None]:
        """Copy the shard, and return the task that writes the copy and returns the error of the disk.

        Raises TryAgain if not even the copy can be made.

        A snapshot under way is then published, after `wait_until_held`, since other pservers may restore the round.
        """
        round_ = shard.version
        is_named = round_ == self._under_way
        self._newest = max(self._newest, round_)
        try:
            write = await compute.run(partial(self._storage.snapshot, shard, history))
        except OSError as error:
            self._note_failure(round_, error, is_named=is_named)
            raise TryAgain(f"a snapshot could not be copied: {error}") from error
        except BaseException:
            self.end_named(round_)
            raise
        work = self._write(round_, write, wait_until_held, is_named=is_named)
        task = asyncio.create_task(work, name=f"write the snapshot of round {round_}")
        self._writes.add(task)
        task.add_done_callback(self._writes.discard)
        return task

    async def _write(
        self,
        round_: Round,
        write: Callable[[], tuple[ShardFile, Path]],
        wait_until_held: Callable[[], Awaitable[None]] | None,
        *,
        is_named: bool,
    ) -> OSError | None:
        try:
            async with self._turn:
                with self._metrics.checkpoint_seconds.time():
                    file, path = await asyncio.to_thread(write)
        except Exception as error:  # such as a lack of memory or threads: the next snapshot is tried
            self._note_failure(round_, error, is_named=is_named)
            return error if isinstance(error, OSError) else OSError(repr(error))
        if is_named:
            publishing = self._publish(file, path, wait_until_held)
            self._publishing = asyncio.create_task(publishing, name=f"publish the snapshot of round {round_}")
        return None

    async def _publish(
        self, file: ShardFile, path: Path, wait_until_held: Callable[[], Awaitable[None]] | None
    ) -> None:
        try:
            if wait_until_held is not None:
                await wait_until_held()
            await self._publisher.publish(path, self._storage.name_shared(file))
        except Exception as error:
            self._note_failure(file.round, error, is_named=True)
            return
        self.published = file
        self._metrics.checkpoint_time.set_to_current_time()
        self.end_named(file.round)

    def _note_failure(self, round_: Round, error: Exception, *, is_named: bool) -> None:
        # The log reaches back to the snapshot before, so nothing is lost.
        self._metrics.checkpoint_failures.inc()
        log.error("a checkpoint could not be written; training continues", round=round_, error=str(error))
        if is_named:
            self.end_named(round_)

    # ------------------------------------------------------------------ the end

    @property
    def is_saved(self) -> bool:
        """True once the last checkpoint of a finished run is complete, so that its log is not needed any more."""
        return self.is_over and self.published is not None and self.published.round in self._storage.complete

    async def wait_for_writes(self) -> None:
        """Wait until nothing is being written to the folder."""
        while self._writes:
            await asyncio.wait(self._writes)

    async def close(self) -> None:
        """Wait until nothing is being written to the folder. A publication fails, but its copy may go on."""
        await self.wait_for_writes()
        if self._publishing is not None:
            self._publishing.cancel()
            await asyncio.wait([self._publishing])
