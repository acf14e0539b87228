"""A small vector that is reduced after the gradients, from which all trainers compute the same outcome of a round."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from ps_protocol.vocabulary import Rank


@dataclass(frozen=True)
class Tally:
    """The reduced facts of all trainers about a round."""

    present: list[str]  # parameters with a gradient on any trainer
    nonfinite: list[Rank]  # trainers whose gradients hold NaN or infinity
    is_void: bool  # the gradients of a trainer are incomplete; all send theirs again
    num_active: int  # trainers that had a batch; the mean is theirs
    has_same_numbers: bool  # in the optimizers and GradScalers of the trainers that had a batch
    source: Rank | None  # the lowest rank that has written parameters on purpose: all continue from its values


FACTS = 5  # of each rank


class TallyVector:
    """Counts of gradients, and five facts of each rank, in the order of `fill`. Float32, kept."""

    def __init__(self, names: Sequence[str], rank: Rank, size: int, device: torch.device) -> None:
        self._names = names
        self._rank, self._size = rank, size
        self.vector = torch.zeros(len(names) + FACTS * size, dtype=torch.float32, device=device)

    def fill(
        self,
        present: Collection[str],
        *,
        is_finite: bool = True,
        is_void: bool = False,
        is_active: bool = True,
        numbers: int = 0,
        has_written: bool = False,
    ) -> None:
        """Fill the vector with the facts of this trainer about the next round. An all_reduce sums it."""
        facts = [[0.0] * self._size for _ in range(FACTS)]
        values = (not is_finite, is_void, is_active, numbers, has_written)
        for fact, value in zip(facts, values, strict=True):
            fact[self._rank] = float(value)
        counts = [float(name in present) for name in self._names]
        flat = [*counts, *(value for fact in facts for value in fact)]
        self.vector.copy_(torch.tensor(flat, dtype=torch.float32, device="cpu"))

    def read(self) -> Tally:
        """Return the facts of all trainers from the summed vector."""
        counts, of_ranks = torch.split(self.vector.cpu(), [len(self._names), FACTS * self._size])
        not_finite, void, active, digests, written = of_ranks.view(FACTS, self._size).tolist()
        return Tally(
            present=[name for name, count in zip(self._names, counts.tolist(), strict=True) if count > 0],
            nonfinite=[rank for rank, count in enumerate(not_finite) if count > 0],
            is_void=any(void),
            num_active=int(sum(active)),
            has_same_numbers=len({digest for digest, is_active in zip(digests, active, strict=True) if is_active}) <= 1,
            source=next((rank for rank, has_written in enumerate(written) if has_written), None),
        )
