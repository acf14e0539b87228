"""A small vector of counts and facts, whose sum lets all processes of a group decide alike about a round."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from ps_protocol.vocabulary import Rank


@dataclass(frozen=True)
class Tally:
    """The reduced facts of all ranks, which are trainers of a ring or processes of a host, about a round."""

    present: list[str]  # parameters with a gradient on any rank
    nonfinite: list[Rank]  # ranks whose gradients hold NaN or infinity
    lowest: Rank | None  # the lowest rank that had a batch
    num_active: int  # ranks that had a batch; the mean is theirs
    has_same_terms: bool  # on all ranks that had a batch
    source: Rank | None  # the lowest rank that has written parameters on purpose: all continue from its values


FACTS = 4  # of each rank


class TallyVector:
    """A float32 vector with the number of gradients of each parameter, and four facts of each rank as in `fill`."""

    def __init__(self, names: Sequence[str], rank: Rank, size: int, device: torch.device) -> None:
        self._names = names
        self._rank, self._size = rank, size
        self.vector = torch.zeros(len(names) + FACTS * size, dtype=torch.float32, device=device)

    def fill(
        self,
        present: Collection[str],
        *,
        is_finite: bool = True,
        is_active: bool = True,
        terms: object = None,
        has_written: bool = False,
    ) -> None:
        """Fill the vector with the facts of this rank about the next round. An all_reduce sums it.

        `terms` are what must be the same on all ranks.
        """
        facts = [[0.0] * self._size for _ in range(FACTS)]
        values = (not is_finite, is_active, _digest(terms), has_written)
        for fact, value in zip(facts, values, strict=True):
            fact[self._rank] = float(value)
        counts = [float(name in present) for name in self._names]
        flat = [*counts, *(value for fact in facts for value in fact)]
        self.vector.copy_(torch.tensor(flat, dtype=torch.float32, device="cpu"))

    def read(self) -> Tally:
        """Return the facts of all ranks from the summed vector."""
        counts, of_ranks = torch.split(self.vector.cpu(), [len(self._names), FACTS * self._size])
        not_finite, active, digests, written = of_ranks.view(FACTS, self._size).tolist()
        return Tally(
            present=[name for name, count in zip(self._names, counts.tolist(), strict=True) if count > 0],
            nonfinite=[rank for rank, count in enumerate(not_finite) if count > 0],
            lowest=next((rank for rank, is_active in enumerate(active) if is_active), None),
            num_active=int(sum(active)),
            has_same_terms=len({digest for digest, is_active in zip(digests, active, strict=True) if is_active}) <= 1,
            source=next((rank for rank, has_written in enumerate(written) if has_written), None),
        )


def _digest(terms: object) -> int:
    """Return 24 bits that differ for other terms; a float32 holds them exactly."""
    return zlib.crc32(repr(terms).encode()) >> 8
