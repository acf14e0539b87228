"""What the coordinator's settings say of every run."""

from __future__ import annotations

from dataclasses import dataclass

from ps_protocol.consistency import Consistency
from ps_protocol.plan import SlicePlan
from ps_protocol.vocabulary import WINDOW, Block, Durability, LossPolicy, NonfinitePolicy, Placement, Round
from ps_protocol.wire_types import DEFAULT_TOPK, PullType, PushType

MASTER_BYTES = 4  # of an element, float32
RECORD_BYTES = 1024  # of a round in the log, beside its gradient
LOG_SHARDS = 4  # between two checkpoints, by default
MIN_LOG_BYTES = 1024 * 1024  # a checkpoint takes some milliseconds, however small the shard
CONTRIBUTIONS = 1000  # between checkpoints in asynchronous modes, if nothing is logged


@dataclass(frozen=True, slots=True)
class RunDefaults:
    """What a run is when its trainers do not say otherwise, and what becomes of it when something is lost."""

    num_trainers: int  # at least
    consistency: Consistency
    min_block_size: int
    placement: Placement
    slice_parameters: bool
    nonfinite: NonfinitePolicy
    round_timeout_seconds: float
    on_trainer_loss: LossPolicy = "fail"
    push_type: PushType = "float32"
    pull_type: PullType = "float32"
    topk: float = DEFAULT_TOPK
    max_trainers: int | None = None  # none: `num_trainers`, no more and no fewer
    last_call_seconds: float = 0.0
    min_trainers: int = 1
    rejoin_timeout_seconds: float = 300.0
    durability: Durability = "none"
    checkpoint_rounds: int | None = None
    max_log_bytes: int | None = None
    keep_checkpoints: int = 2

    def checkpoint_interval(self, plan: SlicePlan) -> Round:
        """Rounds between checkpoints, in asynchronous modes contributions, the same on every pserver; 0 for none.

        Each logs every block once, so that a number of them keeps the log of the largest shard within
        `max_log_bytes`. Without a log an asynchronous pserver goes on from its newest checkpoint.
        """
        if self.durability == "none":
            return self.checkpoint_rounds or (CONTRIBUTIONS if self.consistency.is_async else 0)
        largest = max(sum(map(_count_logged, shard)) for shard in plan.shards) * MASTER_BYTES + RECORD_BYTES
        most = self.max_log_bytes or max(LOG_SHARDS * largest, MIN_LOG_BYTES)
        return max(1, min(self.checkpoint_rounds or most, most // largest))


def _count_logged(block: Block) -> int:
    """Return the number of elements that a block takes in a synchronous log: whole windows of its parameter."""
    return (-(-block.end // WINDOW) - block.begin // WINDOW) * WINDOW
