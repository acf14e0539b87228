"""A complete round that is to be clipped: aggregated, and not stepped before somebody brings the global norm."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ps_protocol.errors import NormChanged
from ps_protocol.norms import AgreedNorm, ShardNorm

from .rounds import Apply
from .tensors import StagedBlock


@dataclass(frozen=True, slots=True)
class Measured:
    """`gradient` is the shard's, flat float32, and holds until it aggregates again; `present` are blocks in it."""

    apply: Apply[StagedBlock]
    gradient: Tensor
    present: tuple[str, ...]
    norm: ShardNorm

    def check(self, brought: AgreedNorm) -> None:
        """Raise NormChanged if the norm that a get brings was taken of another gradient."""
        if not brought.own.is_same(self.norm):
            raise NormChanged(
                f"the gradient of round {self.apply.round} is another one since its norm was asked for",
                round=self.apply.round,
            )
