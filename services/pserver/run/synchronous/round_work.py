"""The tensor work of a synchronous round, as jobs of `ComputeExecutor`; `RoundsExecutor` decides and waits.

clipped:    measure ──► the trainers agree on the norm ──► clip ──► step
otherwise:  step, which aggregates
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import xxhash
from torch import Tensor

from ps_protocol.membership import Controls
from ps_protocol.norms import ShardNorm
from ps_protocol.vocabulary import Round
from services.runtime.failpoints import reach_failpoint

from ...durable.storage import RunStorage
from ...durable.update_log import LoggedUpdate
from ...shard.captures import Captures
from ...shard.optimizer_blocks import find_loaded
from ...shard.reply import Reply, VersionedBlocks
from ...shard.shard import Shard
from ...shard.tensors import StagedBlock
from .rounds import Apply


@dataclass(frozen=True, slots=True)
class Measured:
    """A complete round, aggregated, that is stepped once the trainers send its global norm.

    `gradient` is the aggregator's flat float32 tensor: `RoundWork.clip` scales it, and the next aggregation overwrites
    it. `present` are the blocks in it.
    """

    apply: Apply[StagedBlock]
    gradient: Tensor
    present: tuple[str, ...]
    norm: ShardNorm


class RoundWork:
    """The aggregation, measurement, log, step and encoding of the rounds of one shard; each method is a job."""

    def __init__(self, shard: Shard, storage: RunStorage | None, identity: Mapping[str, str], *, borrows: bool) -> None:
        """`identity` is in a reply's metadata. With `borrows` replies contain views of the values, and are revoked."""
        self.captures = Captures()
        self._shard = shard
        self._storage = storage
        self._identity = identity
        self._borrows = borrows
        self._pulled = shard.view_pulled()
        self._changed = dict.fromkeys(shard.layout.place, shard.version)  # the round in which each block changed last

    def measure(self, apply: Apply[StagedBlock], controls: Controls) -> Measured:
        """Aggregate the contributions in rank order, and compute the norm of the blocks that will be stepped."""
        gradient, present = self._aggregate(apply, controls)
        norm = ShardNorm(_name_contributions(apply, controls), self._shard.aggregator.sum_of_squares(present))
        return Measured(apply, gradient, present, norm)

    def clip(self, coefficient: float) -> None:
        """Multiply the newest aggregated gradient, to which `Measured.gradient` refers, by this coefficient."""
        self._shard.aggregator.scale(coefficient)

    def step(
        self, apply: Apply[StagedBlock], controls: Controls, measured: Measured | None, outcome: Mapping[str, str]
    ) -> Reply:
        """Aggregate the contributions in rank order unless done, log, step, and encode the reply with `outcome`.

        Raises OSError before anything has changed.
        """
        gradient, present = (measured.gradient, measured.present) if measured else self._aggregate(apply, controls)
        hyper_parameters = controls.override_rates(apply.hyper_parameters)
        loaded = find_loaded([contribution.slots for contribution in apply.contributions])
        if self._storage is not None:
            logged = None if len(present) == len(self._shard.layout.places) else present
            update = LoggedUpdate(
                apply.round, apply.ranks, hyper_parameters, logged, apply.nonfinite,
                norm=measured.norm if measured else None,
            )  # fmt: skip
            self._storage.append(update, self._shard.aggregator.encode(logged), loaded)
        reach_failpoint("apply.before")
        changed = self._shard.apply(gradient, present, hyper_parameters, loaded)
        self._changed.update(dict.fromkeys(changed, apply.round))
        reach_failpoint("apply.after")
        self.captures.capture_round(apply.round)
        return self.encode(apply.round, outcome)

    def _aggregate(self, apply: Apply[StagedBlock], controls: Controls) -> tuple[Tensor, tuple[str, ...]]:
        """Return the gradient, and the blocks that are stepped with it: none of frozen parameters."""
        contributions = () if apply.nonfinite else apply.contributions
        parts = [{name: block.part for name, block in staged.blocks.items()} for staged in contributions]
        gradient, present = self._shard.aggregator.aggregate(parts)
        if frozen := frozenset(controls.frozen):
            place = self._shard.layout.place
            present = tuple(name for name in present if place[name].block.parameter not in frozen)
        return gradient, present

    def encode(self, round_: Round, outcome: Mapping[str, str]) -> Reply:
        """Return the shard's version as the reply for all trainers; `outcome` is added to its metadata."""
        pulled = self._pulled.read(copied=not self._borrows)
        metadata = {**self._identity, "round": str(round_), **outcome}
        versioned = VersionedBlocks(pulled, dict(self._changed), metadata, round_ - 1, self._shard.borrow_deltas())
        versioned.parts(round_ - 1)  # the frame for most trainers, made on this thread
        return Reply(round_, versioned.parts(), versioned)


def _name_contributions(apply: Apply[StagedBlock], controls: Controls) -> str:
    """Return a digest of the contributions and parameters that a norm is made of: the same on every pserver.

    The parameters keep a trainer from adding norms from before and after a change that freezes one of them.
    """
    return xxhash.xxh3_64_hexdigest(repr((apply.identity, sorted(controls.frozen))).encode())
