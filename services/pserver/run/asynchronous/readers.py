"""Pulls from a shard that is being updated: one reader for each `read_consistency`."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from ps_protocol.consistency import ReadConsistency
from ps_protocol.errors import GradpostError
from services.runtime.compute import ComputeExecutor

from ...shard.bodies import BufferPool
from ...shard.reply import FrameCopy
from ...shard.shard import Shard
from .queues import BlockQueue, Snapshot
from .staleness import PulledState


@dataclass(frozen=True, slots=True)
class Reading:
    """A frame of some blocks, and the state of the whole shard that it shows."""

    frame: FrameCopy
    pull: PulledState


class DirectReader:
    """The reader for `none` and `block`, on one thread; for `block` the compute thread, which then runs no update.

    A thread of its own reads while updates are written, so that even one block may be half old and half new.
    """

    def __init__(
        self, shard: Shard, compute: ComputeExecutor, pool: BufferPool, *, keep_values: bool, owns_thread: bool
    ) -> None:
        """With `keep_values` each reading holds a copy of the shard's values."""
        self._shard = shard
        self._compute = compute
        self._pool = pool
        self._keep_values = keep_values
        self._owns_thread = owns_thread

    async def read(self, names: Collection[str] | None, metadata: Mapping[str, str]) -> Reading:
        """Return a frame of these blocks, or of all, after the earlier jobs of the thread."""
        frame = FrameCopy(self._shard.layout.find_places(names), metadata, self._pool)
        return await (self._compute.run_at_once if self._shard.is_small else self._compute.run)(self._read, frame)

    def _read(self, frame: FrameCopy) -> Reading:
        # Versions first: the values may be newer than they say, never older.
        versions = dict(self._shard.versions)
        values = self._shard.values.clone() if self._keep_values else None
        frame.fill(self._shard.values)
        return Reading(frame, PulledState(versions, values))

    def close(self, reason: GradpostError) -> None:
        """Close the thread."""
        if self._owns_thread:
            self._compute.close()


class SnapshotReader:
    """The reader for `shard`, which puts a snapshot into all queues; each block is copied when its worker gets to it.

    Contributions and snapshots enter all their queues together, so a snapshot has all blocks of a contribution or none.
    One snapshot is made at a time; the reads that arrive meanwhile share the next one.
    """

    def __init__(
        self, shard: Shard, compute: ComputeExecutor, pool: BufferPool, queues: Mapping[str, BlockQueue], *,
        keep_values: bool,
    ) -> None:  # fmt: skip
        self._shard = shard
        self._compute = compute
        self._pool = pool
        self._keep_values = keep_values
        self._queues = queues
        self._one_at_a_time = asyncio.Lock()
        self._next: asyncio.Task[Snapshot] | None = None
        self._current: Snapshot | None = None
        self._closed: GradpostError | None = None

    async def read(self, names: Collection[str] | None, metadata: Mapping[str, str]) -> Reading:
        """Return a frame as `DirectReader.read`, once every block is copied. Raises Ended if a block has stopped."""
        if self._next is None:
            self._next = asyncio.create_task(self._make_snapshot(), name="snapshot")
        snapshot = await asyncio.shield(self._next)
        frame = FrameCopy(self._shard.layout.find_places(names), metadata, self._pool)
        await self._compute.run(frame.fill, snapshot.values)
        return Reading(frame, PulledState(snapshot.versions, snapshot.values if self._keep_values else None))

    async def _make_snapshot(self) -> Snapshot:
        async with self._one_at_a_time:
            self._next = None  # later reads need a newer snapshot than this one
            failures = [self._closed, *(queue.failure for queue in self._queues.values())]
            if (failure := next(filter(None, failures), None)) is not None:
                raise copy.copy(failure)
            self._current = snapshot = Snapshot(self._shard, self._compute, len(self._queues))
            for queue in self._queues.values():
                queue.put_snapshot(snapshot)
            await snapshot.done
            return snapshot

    def close(self, reason: GradpostError) -> None:
        """End waiting reads with this reason, and refuse later ones with it: the queues are closed, too."""
        self._closed = reason
        if self._current is not None:
            self._current.fail(reason)


Reader: TypeAlias = DirectReader | SnapshotReader


def make_reader(
    consistency: ReadConsistency,
    shard: Shard,
    compute: ComputeExecutor,
    pool: BufferPool,
    queues: Mapping[str, BlockQueue],
    *,
    keep_values: bool,
) -> Reader:
    """Return the reader for this consistency."""
    if consistency == "none":
        return DirectReader(shard, ComputeExecutor(), pool, keep_values=keep_values, owns_thread=True)
    if consistency == "block":
        return DirectReader(shard, compute, pool, keep_values=keep_values, owns_thread=False)
    return SnapshotReader(shard, compute, pool, queues, keep_values=keep_values)
