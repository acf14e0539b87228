"""How gets read a shard that is being updated all the time: three answers to the second question of seed 000."""

from __future__ import annotations

import asyncio
import copy
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from ps_protocol.consistency import ReadConsistency
from ps_protocol.errors import GradpostError
from services.runtime.compute import ComputeExecutor

from .block_queue import BlockQueue
from .pulls import Pull
from .reply_chunks import ChunkEncoder
from .shard import Shard


@dataclass(frozen=True, slots=True)
class Reading:
    """A frame of some blocks, and the state of the whole shard that it shows."""

    chunks: list[bytes]
    pull: Pull


class Reader(ABC):
    """Reads frames of a shard. With `keep_values` each reading holds a copy of the shard."""

    def __init__(self, shard: Shard, compute: ComputeExecutor, *, keep_values: bool) -> None:
        self._shard = shard
        self._compute = compute
        self._keep_values = keep_values
        self._closed: GradpostError | None = None

    @abstractmethod
    async def read(self, names: Collection[str] | None, metadata: Mapping[str, str]) -> Reading:
        """A frame of these blocks, or of all."""

    def close(self, reason: GradpostError) -> None:
        """End readings that wait with this reason, and refuse others with it."""
        self._closed = reason

    def _encode(
        self, names: Collection[str] | None, metadata: Mapping[str, str], encoder: ChunkEncoder | None = None
    ) -> Reading:
        # Versions first: what is read may be newer than it says, never older.
        versions = dict(self._shard.versions)
        values = self._shard.values.clone() if self._keep_values else None
        return Reading(self._shard.encode(names, metadata, encoder=encoder, pulled=True), Pull(versions, values))


class UnsynchronizedReader(Reader):
    """`none`: a thread of its own reads while updates are written, so that even a block may be half old, half new."""

    def __init__(self, shard: Shard, compute: ComputeExecutor, *, keep_values: bool) -> None:
        super().__init__(shard, compute, keep_values=keep_values)
        self._thread = ComputeExecutor()
        self._encoder = ChunkEncoder(shard.values)

    async def read(self, names: Collection[str] | None, metadata: Mapping[str, str]) -> Reading:
        """Does not wait for updates."""
        return await self._thread.run(self._encode, names, metadata, self._encoder)

    def close(self, reason: GradpostError) -> None:
        """End the thread, too."""
        super().close(reason)
        self._thread.close()


class BlockReader(Reader):
    """`block`: one job of the compute thread, which is in no update; but other blocks' updates may be queued yet."""

    async def read(self, names: Collection[str] | None, metadata: Mapping[str, str]) -> Reading:
        """Waits for the jobs before it."""
        return await self._compute.run(self._encode, names, metadata)


class SnapshotReader(Reader):
    """`shard`: a marker in all queues at once; each block is copied when its worker gets there.

    A contribution is put into all queues at once too, so that it is before the marker in all of them or in none. One
    marker is under way at a time, for all who ask meanwhile: they wait for the next one together.
    """

    def __init__(
        self, shard: Shard, compute: ComputeExecutor, queues: Mapping[str, BlockQueue], *, keep_values: bool
    ) -> None:
        super().__init__(shard, compute, keep_values=keep_values)
        self._queues = queues
        self._one_at_a_time = asyncio.Lock()
        self._next: asyncio.Task[_Snapshot] | None = None
        self._current: _Snapshot | None = None

    async def read(self, names: Collection[str] | None, metadata: Mapping[str, str]) -> Reading:
        """Waits until every block's queue has got to the marker; raises Ended if a block has stopped."""
        if self._next is None:
            self._next = asyncio.create_task(self._take_next(), name="snapshot")
        snapshot = await asyncio.shield(self._next)
        return await self._compute.run(self._encode_snapshot, snapshot, names, metadata)

    async def _take_next(self) -> _Snapshot:
        async with self._one_at_a_time:
            self._next = None  # who asks from now on might be too late for this one
            if (failure := self._closed or self._stopped_block()) is not None:
                raise copy.copy(failure)
            self._current = snapshot = _Snapshot(self._shard, self._compute, len(self._queues))
            for queue in self._queues.values():
                queue.put_marker(snapshot)
            await snapshot.done
            return snapshot

    def _stopped_block(self) -> GradpostError | None:
        return next((queue.failure for queue in self._queues.values() if queue.failure is not None), None)

    def close(self, reason: GradpostError) -> None:
        """The queues are closed, too, so that no marker in them will be reached."""
        super().close(reason)
        if self._current is not None:
            self._current.fail(reason)

    def _encode_snapshot(
        self, snapshot: _Snapshot, names: Collection[str] | None, metadata: Mapping[str, str]
    ) -> Reading:
        chunks = self._shard.encode(names, metadata, encoder=ChunkEncoder(snapshot.values), pulled=True)
        return Reading(chunks, Pull(snapshot.versions, snapshot.values if self._keep_values else None))


class _Snapshot:
    """A copy of the shard that is made block by block; `done` when the last one is copied."""

    def __init__(self, shard: Shard, compute: ComputeExecutor, num_blocks: int) -> None:
        self.values = torch.empty_like(shard.values)
        self.versions: dict[str, int] = {}
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._shard = shard
        self._compute = compute
        self._num_blocks = num_blocks
        if num_blocks == 0:
            self.done.set_result(None)

    async def reached(self, name: str) -> None:
        """Copy this block."""
        await self._compute.run(self._copy, name)
        if len(self.versions) == self._num_blocks and not self.done.done():
            self.done.set_result(None)

    def _copy(self, name: str) -> None:
        place = self._shard.layout.place[name]
        self.values[place.begin : place.end] = self._shard.values[place.begin : place.end]
        self.versions[name] = self._shard.versions[name]

    def fail(self, error: GradpostError) -> None:
        """A block has stopped."""
        if not self.done.done():
            self.done.set_exception(error)


def make_reader(
    consistency: ReadConsistency,
    shard: Shard,
    compute: ComputeExecutor,
    queues: Mapping[str, BlockQueue],
    *,
    keep_values: bool,
) -> Reader:
    """The reader that keeps to what the run asks for."""
    if consistency == "none":
        return UnsynchronizedReader(shard, compute, keep_values=keep_values)
    if consistency == "block":
        return BlockReader(shard, compute, keep_values=keep_values)
    return SnapshotReader(shard, compute, queues, keep_values=keep_values)
