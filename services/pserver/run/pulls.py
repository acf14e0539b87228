"""Pulls in the asynchronous modes: how the shard is read, and what a trainer has read, which measures staleness."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import Tensor

from ps_protocol.consistency import oldest_start
from ps_protocol.errors import StaleRound
from ps_protocol.vocabulary import Rank, Round
from services.runtime.compute import ComputeExecutor

from ..shard.bodies import BufferPool
from ..shard.reply import FrameCopy
from ..shard.shard import Shard


@dataclass(frozen=True, slots=True)
class PulledState:
    """The state of the shard that a trainer pulled."""

    versions: Mapping[str, int]  # the number of updates of each block
    values: Tensor | None = None  # flat float32 copy of the shard, where it is needed (DC-ASGD)


class Pulls:
    """The pulls of every trainer, by its completed step; a pull too old to be computed on is dropped.

    With DC-ASGD each pull contains a copy of the shard: at most (max_delay + 2) float32 shards for each trainer,
    besides the pulls that queued updates were computed on. A restored pserver does not know the pulls of its earlier
    incarnation: until a trainer pulls again, they count as `restored`, the state that the pserver began with.
    """

    def __init__(self, max_delay: int, restored: PulledState | None = None) -> None:
        self._max_delay = max_delay
        self._restored = restored
        self._pulls: dict[Rank, dict[Round, PulledState]] = {}

    def __repr__(self) -> str:
        kept = ", ".join(f"trainer {rank}: {sorted(pulls)}" for rank, pulls in sorted(self._pulls.items()))
        return f"<Pulls [{kept}]>"

    def record_pull(self, rank: Rank, step: Round, pull: PulledState) -> None:
        """Record the pull after `step`, in place of an earlier one after that step."""
        pulls = self._pulls.setdefault(rank, {})
        pulls[step] = pull
        oldest = oldest_start(step + 1, self._max_delay)  # the oldest pull that the next step may be computed on
        for old_step in [known for known in pulls if known < oldest]:
            del pulls[old_step]

    def find_pull(self, rank: Rank, step: Round) -> PulledState:
        """Return the trainer's pull after `step`. Raises StaleRound if there is none."""
        known = self._pulls.get(rank, {})
        pull = known.get(step)
        if pull is None and self._restored is not None and step < min(known, default=step + 1):
            return self._restored
        if pull is None:
            raise StaleRound(f"trainer {rank} has no recorded pull after its step {step}", current=sorted(known))
        return pull

    def forget_trainer(self, rank: Rank) -> None:
        """Drop the pulls of a trainer that left."""
        self._pulls.pop(rank, None)


@dataclass(frozen=True, slots=True)
class Reading:
    """A frame of some blocks, and the state of the whole shard that it shows."""

    frame: FrameCopy
    pull: PulledState


class Reader:
    """The reader of a shard, on one thread: the compute thread, which then runs no update, or one of its own.

    A thread of its own reads while updates are written, so that even one block may be half old and half new.
    """

    def __init__(
        self, shard: Shard, compute: ComputeExecutor, pool: BufferPool, *, keep_values: bool, owns_thread: bool
    ) -> None:
        """With `keep_values` each reading holds a copy of the shard's values."""
        self._shard = shard
        self._compute = ComputeExecutor() if owns_thread else compute
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

    def close(self) -> None:
        """Close the thread."""
        if self._owns_thread:
            self._compute.close()
