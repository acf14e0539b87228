"""The choice of the rounds after which one pserver writes its shard, and of the destination; writes run beside serving.

The coordinator names the rounds after which all pservers write their shards to the place of checkpoints. A pserver for
which no round was named during an interval writes a checkpoint of its own, beside its log, to keep the log short
(ADR 22).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Literal, TypeAlias

from ps_protocol.errors import TryAgain
from ps_protocol.vocabulary import Round
from services.runtime.compute import ComputeExecutor
from services.runtime.logs import get_logger

from ..metrics import PserverMetrics
from ..shard.history import History
from ..shard.shard import Shard
from .storage import RunStorage

log = get_logger()

Destination: TypeAlias = Literal["place", "folder"]  # of complete checkpoints; of this pserver's log
Write: TypeAlias = Callable[[], object]


class CheckpointWriter:
    """The writer of checkpoints, one at a time to each destination, so that the log does not grow while a place hangs.

    Lives on the event loop; the compute thread calls `choose_destination`, too. Without storage no checkpoint is ever
    due.
    """

    def __init__(self, storage: RunStorage | None, interval: int, metrics: PserverMetrics) -> None:
        self.complete: tuple[Round, ...] | None = None  # of the whole model; None: not reported yet
        self.heartbeat_is_due = asyncio.Event()  # the next heartbeat has to be sent at once
        self._reported: tuple[Round, ...] = ()  # the shards that the coordinator knew of then
        self._storage = storage
        self._interval = interval
        self._metrics = metrics
        self._named: Round | None = None  # the newest round that the coordinator has named
        self._newest: Round = max(storage.rounds, default=0) if storage else 0  # that is written, or being written
        self._writing: dict[Destination, Round] = {}
        self._tasks: dict[Destination, asyncio.Task[OSError | None]] = {}
        self._pruning: asyncio.Task[None] | None = None

    def request_round(self, round_: Round) -> None:
        """Write the shard after this round, which is not over, instead of the round that was requested before.

        Raises TryAgain while another checkpoint is being written.
        """
        self.check_room()
        self._named = round_

    def check_room(self) -> None:
        """Raise TryAgain while a checkpoint is being written to the place."""
        if "place" in self._writing:
            raise TryAgain(f"the checkpoint of round {self._writing['place']} is being written")

    def is_writing(self, round_: Round) -> bool:
        """Return whether the shard after this round is being written to the place."""
        return self._writing.get("place") == round_

    def choose_destination(self, round_: Round) -> Destination | None:
        """Return the destination of the shard after this round, or None. It counts as busy from now on."""
        destination: Destination | None = None
        if self._storage is None:
            return None
        if round_ == self._named and "place" not in self._writing:
            destination = "place"
        elif self._interval and round_ >= self._newest + self._interval and "folder" not in self._writing:
            destination = "folder"
        if destination is not None:
            self._writing[destination] = round_
        return destination

    def find_pending(self, newest: Round) -> tuple[Round, ...]:
        """Return the rounds of the checkpoints that will be written to the place; `newest` is the newest round here."""
        coming = {self._writing.get("place")}
        if self._named is not None and self._named > newest:
            coming.add(self._named)
        return tuple(sorted(round_ for round_ in coming if round_ is not None))

    async def copy_and_write(
        self,
        shard: Shard,
        history: History,
        destination: Destination,
        compute: ComputeExecutor,
        wait_until_held: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Copy the shard, and begin to write the copy. Raises TryAgain if not even the copy can be made.

        To the place it is written after `wait_until_held`: other pservers may restore it.
        """
        if self._storage is None:
            return
        self._writing[destination] = round_ = shard.version
        try:
            write = await compute.run(partial(self._storage.snapshot, shard, history, is_own=destination == "folder"))
        except OSError as error:
            self._failed(round_, destination, error)
            raise TryAgain(f"a checkpoint could not be copied: {error}") from error
        except BaseException:
            del self._writing[destination]
            raise
        self.begin_write(round_, destination, write, None if destination == "folder" else wait_until_held)

    def begin_write(
        self,
        round_: Round,
        destination: Destination,
        write: Write,
        wait_until_held: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Begin to write a copy, after `wait_until_held`."""
        self._writing[destination] = round_
        self._newest = max(self._newest, round_)
        task = asyncio.create_task(
            self._write(round_, destination, write, wait_until_held), name=f"checkpoint to the {destination}"
        )
        self._tasks[destination] = task

    async def write_and_wait(self, round_: Round, write: Write) -> None:
        """Write a copy to the place, and wait for it. Raises OSError."""
        self.begin_write(round_, "place", write)
        if (error := await asyncio.shield(self._tasks["place"])) is not None:
            raise error

    async def _write(
        self,
        round_: Round,
        destination: Destination,
        write: Write,
        wait_until_held: Callable[[], Awaitable[None]] | None,
    ) -> OSError | None:
        try:
            if wait_until_held is not None:
                await wait_until_held()
            with self._metrics.checkpoint_seconds.time():
                await asyncio.to_thread(write)
        except Exception as error:  # such as a lack of memory or threads: the next checkpoint is tried
            failure = error if isinstance(error, OSError) else OSError(repr(error))
            self._failed(round_, destination, failure)
            return failure
        self._ended(round_, destination)
        if destination == "folder":
            await self.prune_folder()  # without waiting for a place that hangs
        else:
            self._metrics.checkpoint_time.set_to_current_time()
            self._prune()
        return None

    def _failed(self, round_: Round, destination: Destination, error: OSError) -> None:
        # The log reaches back to the checkpoint before, so nothing is lost.
        assert self._storage is not None
        self._ended(round_, destination)
        if destination == "place":  # then an own checkpoint is due; the folder is tried again after an interval
            self._newest = max(self._storage.rounds, default=0)
        self._metrics.checkpoint_failures.inc()
        log.error("a checkpoint could not be written; training continues", round=round_, error=str(error))

    def _ended(self, round_: Round, destination: Destination) -> None:
        del self._writing[destination]
        if destination == "place" and self._named == round_:
            self._named = None
        self.heartbeat_is_due.set()

    def update_complete(self, complete: tuple[Round, ...], reported: tuple[Round, ...]) -> None:
        """Note which checkpoints are complete, according to a coordinator that knew of the `reported` shards."""
        if (complete, reported) != (self.complete, self._reported):
            self.complete, self._reported = complete, reported
            self._prune()

    def _prune(self) -> None:
        if self._storage is not None and (self._pruning is None or self._pruning.done()):
            self._pruning = asyncio.create_task(self._prune_both(self._storage), name="prune checkpoints")

    async def _prune_both(self, storage: RunStorage) -> None:
        done: object = ()
        while done != (known := (self.complete, self._reported)):
            done = known
            await self.prune_folder()
            try:
                await asyncio.to_thread(storage.prune_place, *known)
            except OSError as error:
                log.warning("an old checkpoint could not be deleted", error=str(error))

    async def prune_folder(self) -> None:
        """Delete the files beside the place that are not needed any more. Errors are logged."""
        assert self._storage is not None
        try:
            await asyncio.to_thread(self._storage.prune_folder, self.complete)
        except OSError as error:
            log.warning("old files of the log could not be deleted", error=str(error))

    async def wait_for_writes(self, *destinations: Destination) -> None:
        """Wait until the checkpoints to these destinations, by default to both, are written or have failed."""
        tasks = [task for destination, task in self._tasks.items() if not destinations or destination in destinations]
        if tasks:
            await asyncio.wait(tasks)
        if not destinations and self._pruning is not None:
            await asyncio.wait([self._pruning])
