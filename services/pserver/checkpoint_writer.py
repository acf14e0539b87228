"""When one pserver writes its shard, and where: for a checkpoint of the model, or for itself, beside serving.

The coordinator names the rounds after which all pservers write their shards to the place of checkpoints. A pserver that
was named none for an interval writes a checkpoint of its own, beside its log, so that the log stays short (ADR 22).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Literal, TypeAlias

from ps_protocol.errors import TryAgain
from ps_protocol.vocabulary import Round
from services.runtime.logs import get_logger

from .durable.storage import RunStorage
from .metrics import PserverMetrics

log = get_logger()

Destination: TypeAlias = Literal["place", "folder"]  # of all checkpoints; of this pserver's log
Write: TypeAlias = Callable[[], object]


class CheckpointWriter:
    """Writes one checkpoint at a time to each destination, so that a place that hangs does not let the log grow.

    Lives on the event loop; the compute thread calls `choose_destination`, too. Without storage nothing is ever due.
    """

    def __init__(self, storage: RunStorage | None, interval: int, metrics: PserverMetrics) -> None:
        self.complete: tuple[Round, ...] | None = None  # of the whole model, as the coordinator says; None: not known
        self.heartbeat_is_due = asyncio.Event()  # that the coordinator should hear of at once; a failure is, too
        self._reported: tuple[Round, ...] = ()  # the shards that the coordinator knew of when it said so
        self._storage = storage
        self._interval = interval
        self._metrics = metrics
        self._named: Round | None = None  # the newest round that the coordinator has named
        self._newest: Round = max(storage.rounds, default=0) if storage else 0  # of what is written, or being written
        self._writing: dict[Destination, Round] = {}
        self._tasks: dict[Destination, asyncio.Task[OSError | None]] = {}
        self._pruning: asyncio.Task[None] | None = None

    def request_round(self, round_: Round) -> None:
        """Write the shard after this round, which is not over, instead of the round that was named before.

        Raises TryAgain while another checkpoint is being written.
        """
        self.check_room()
        self._named = round_

    def check_room(self) -> None:
        """Raise TryAgain while a checkpoint is being written to the place."""
        if "place" in self._writing:
            raise TryAgain(f"the checkpoint of round {self._writing['place']} is being written")

    def is_writing(self, round_: Round) -> bool:
        """Return whether the shard after this round is on its way to the place."""
        return self._writing.get("place") == round_

    def choose_destination(self, round_: Round) -> Destination | None:
        """Return where the shard is to be written after this round, if it is; that one is being written from now on."""
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
        """Return the rounds of the checkpoints that this pserver has not written yet, but will; `newest` is its own."""
        coming = {self._writing.get("place")}
        if self._named is not None and self._named > newest:
            coming.add(self._named)
        return tuple(sorted(round_ for round_ in coming if round_ is not None))

    async def snapshot_and_write(self, round_: Round, destination: Destination, snapshot: Awaitable[Write]) -> None:
        """Copy the shard; the copy is written later. Raises TryAgain if the disk does not take even its beginning."""
        self._writing[destination] = round_
        try:
            write = await snapshot
        except OSError as error:
            self._failed(round_, destination, error)
            raise TryAgain(f"a checkpoint could not be begun: {error}") from error
        except BaseException:
            del self._writing[destination]
            raise
        self.begin_write(round_, destination, write)

    def begin_write(self, round_: Round, destination: Destination, write: Write) -> None:
        """Write a copy that has been made."""
        self._writing[destination] = round_
        self._newest = max(self._newest, round_)
        task = asyncio.create_task(self._write(round_, destination, write), name=f"checkpoint to the {destination}")
        self._tasks[destination] = task

    async def write_and_wait(self, round_: Round, write: Write) -> None:
        """Write to the place, and wait for it. Raises OSError."""
        self.begin_write(round_, "place", write)
        if (error := await asyncio.shield(self._tasks["place"])) is not None:
            raise error

    async def _write(self, round_: Round, destination: Destination, write: Write) -> OSError | None:
        try:
            with self._metrics.checkpoint_seconds.time():
                await asyncio.to_thread(write)
        except Exception as error:  # memory or threads may be short, too, and the next checkpoint has to be tried
            failure = error if isinstance(error, OSError) else OSError(repr(error))
            self._failed(round_, destination, failure)
            return failure
        self._ended(round_, destination)
        if destination == "folder":
            await self.prune_folder()  # not behind a place that hangs
        else:
            self._metrics.checkpoint_time.set_to_current_time()
            self._prune()
        return None

    def _failed(self, round_: Round, destination: Destination, error: OSError) -> None:
        # The log goes back to the checkpoint before, so that nothing is lost.
        assert self._storage is not None
        self._ended(round_, destination)
        if destination == "place":  # then one of its own is due; the folder is tried again after an interval
            self._newest = max(self._storage.rounds, default=0)
        self._metrics.checkpoint_failures.inc()
        log.error("a checkpoint could not be written; training goes on", round=round_, error=str(error))

    def _ended(self, round_: Round, destination: Destination) -> None:
        del self._writing[destination]
        if destination == "place" and self._named == round_:
            self._named = None
        self.heartbeat_is_due.set()

    # ------------------------------------------------------------------ what is not needed any more

    def update_complete(self, complete: tuple[Round, ...], reported: tuple[Round, ...]) -> None:
        """Take over which checkpoints are complete, from a coordinator that knew of the `reported` shards."""
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
        """Delete what is not needed any more beside the place; what cannot be deleted is logged."""
        assert self._storage is not None
        try:
            await asyncio.to_thread(self._storage.prune_folder, self.complete)
        except OSError as error:
            log.warning("old files of the log could not be deleted", error=str(error))

    # ------------------------------------------------------------------ the end

    async def wait_for_writes(self, *destinations: Destination) -> None:
        """Wait until the checkpoints that have been begun are written, or have failed; by default to both."""
        tasks = [task for destination, task in self._tasks.items() if not destinations or destination in destinations]
        if tasks:
            await asyncio.wait(tasks)
        if not destinations and self._pruning is not None:
            await asyncio.wait([self._pruning])
