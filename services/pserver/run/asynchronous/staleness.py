"""Staleness in the asynchronous modes, as each trainer's pulls measure it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from ps_protocol.consistency import oldest_start
from ps_protocol.errors import StaleRound
from ps_protocol.vocabulary import Rank, Round


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
