"""Settings of the coordinator and of its runs."""

from __future__ import annotations

from dataclasses import fields
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from ps_protocol.consistency import Compensation, Consistency, ReadConsistency, declare_setting
from ps_protocol.errors import BadModel
from ps_protocol.plan import DEFAULT_MIN_BLOCK_SIZE, DEFAULT_PLACEMENT, SlicePlan
from ps_protocol.vocabulary import (
    DEFAULT_PSERVERS,
    DEFAULT_TRAINERS,
    WINDOW,
    Block,
    Durability,
    LossPolicy,
    Mode,
    NonfinitePolicy,
    Placement,
    ReplicaLoss,
    Round,
    Strategy,
)
from ps_protocol.wire_types import DEFAULT_TOPK, PullType, PushType, WireTypes
from services.runtime.settings import ServiceSettings

MASTER_BYTES = 4  # of an element, float32
RECORD_BYTES = 1024  # of a round in the log, beside its gradient
LOG_SHARDS = 4  # between two checkpoints, by default
MIN_LOG_BYTES = 1024 * 1024  # a checkpoint takes some milliseconds, however small the shard
CONTRIBUTIONS = 1000  # between checkpoints in asynchronous modes

_DEFAULTS = {field.name: field.default for field in fields(Consistency)}


def _declared(name: str) -> Any:
    return declare_setting(name, default=_DEFAULTS[name])


_OF_PSERVERS = {  # settings that need pservers
    *("num_pservers", "min_block_size", "placement", "slice_parameters", "push_type", "pull_type", "topk"),
    *("on_trainer_loss", "min_trainers", "rejoin_timeout_seconds", "standbys"),
    *("durability", "replica_loss", "checkpoint_rounds", "max_log_bytes", "keep_checkpoints", "checkpoints", "resume"),
}
_WITHOUT = {"on_trainer_loss": "fail", "durability": "none"}  # their values without pservers


class CoordinatorSettings(ServiceSettings, frozen=True):
    """The settings that every run of a coordinator starts with; its trainers may override those of the plan."""

    num_trainers: int = Field(default=DEFAULT_TRAINERS, ge=1, description="number of trainers of a complete cluster")
    strategy: Strategy = _declared("strategy")
    mode: Mode = _declared("mode")
    max_delay: int = _declared("max_delay")
    max_staleness: int | None = _declared("max_staleness")
    wait_for_apply: bool = _declared("wait_for_apply")
    read_consistency: ReadConsistency = _declared("read_consistency")
    max_queued: int = _declared("max_queued")
    compensation: Compensation = _declared("compensation")
    dc_lambda: float = _declared("dc_lambda")
    min_block_size: int = Field(
        default=DEFAULT_MIN_BLOCK_SIZE,
        ge=1,
        description="limit of ceil(elements / min_block_size) blocks per parameter",
    )
    placement: Placement = Field(default=DEFAULT_PLACEMENT, description="rule for the placement of blocks on pservers")
    slice_parameters: bool = Field(
        default=True, description="whether parameters are cut into blocks; if not, each stays on one pserver"
    )
    nonfinite: NonfinitePolicy = Field(
        default="reject",
        description="policy for gradients with NaN or infinity: `reject` the step, `skip_round` on all pservers "
        "(synchronous mode; required by `torch.amp.GradScaler`), or `allow` them",
    )
    push_type: PushType = Field(
        default="float32",
        description="type of the gradients of float32 parameters on the wire: `float32`, `bfloat16`, `float16`, `int8` "
        "(groups of 256 share a scale) or `topk` (the largest elements of each block); trainers push the error of "
        "`int8` and `topk` later",
    )
    pull_type: PullType = Field(
        default="float32",
        description="type of float32 parameters on the wire to trainers: `float32`, `bfloat16`, `float16` or `int8` "
        "(synchronous mode without `max_delay`: the delta to the round before, in groups of 256 that share a "
        "scale); pservers hold float32, and send the error of `int8` later",
    )
    topk: float = Field(default=DEFAULT_TOPK, gt=0, le=1, description="share of a block's elements that `topk` pushes")
    round_timeout_seconds: float = Field(
        default=300.0, gt=0, description="time that trainers wait for a trainer that is alive and does not progress"
    )
    on_trainer_loss: LossPolicy = Field(
        default="wait",
        description="policy for a lost trainer: `wait` for its next process, `continue` without it, or `fail`. "
        "`gradpost up` without `--max-restarts` sets `fail`",
    )
    min_trainers: int = Field(
        default=1,
        ge=1,
        description="least number of trainers with `continue`; a run with fewer waits for lost trainers",
    )
    rejoin_timeout_seconds: float = Field(
        default=300.0, gt=0, description="time for which the run waits for a lost trainer or pserver"
    )
    durability: Durability | None = Field(
        default=None,
        description="data that a pserver writes before a round counts: `none`; `log`, which survives a crash of the "
        "process; `fsync`, which survives a crash of the machine; `replicated`, a log that the standbys in "
        "sync hold as well. Default: `replicated` with `standbys`, else `log`; the asynchronous modes have `none`",
    )
    replica_loss: ReplicaLoss = Field(
        default="continue",
        description="policy if the last standby in sync is lost, with durability `replicated`: `continue` without it, "
        "or `wait` for another one",
    )
    standbys: int = Field(
        default=0,
        ge=0,
        description="number of standbys that each pserver should have, with durability `replicated`. A process whose "
        "`pserver_index` is `num_pservers` or larger is one of them, and follows pserver `pserver_index` modulo "
        "`num_pservers`",
    )
    checkpoint_rounds: int | None = Field(
        default=None,
        ge=1,
        description="number of rounds (in the asynchronous modes contributions) between checkpoints, if the disks are "
        "fast enough; a log limits it by `max_log_bytes`; none: as many as the log allows; without a log no "
        "checkpoints, in the asynchronous modes one every 1,000 contributions",
    )
    max_log_bytes: int | None = Field(
        default=None,
        ge=1,
        description="size of a pserver's log at which the next checkpoint is due; none: four shards, and at least "
        "1 MiB",
    )
    keep_checkpoints: int = Field(
        default=2,
        ge=1,
        description="number of complete checkpoints that are kept; a pserver's log reaches back over the same number",
    )

    history_dir: Path | None = Field(
        default=None,
        description="folder of the history of runs, which several coordinators may share; none: `history` in "
        "`state_dir`",
    )
    port: int = Field(default=7070, ge=0, le=65535, description="port to listen on; 0 for a free port")
    num_pservers: int = Field(default=DEFAULT_PSERVERS, ge=1, description="number of pservers of a complete cluster")
    resume: bool = Field(
        default=False,
        description="resume the run in `state_dir`, or else the newest checkpoint, with new processes",
    )

    @cached_property
    def consistency(self) -> Consistency:
        """The mode and its bounds. Raises BadModel for a setting that could have no effect in it."""
        return Consistency(**{name: getattr(self, name) for name in _DEFAULTS})

    @property
    def loss_policy(self) -> LossPolicy:
        """The policy for lost trainers; always `fail` with strategy ring."""
        return "fail" if self.consistency.is_ring else self.on_trainer_loss

    @property
    def log_durability(self) -> Durability:
        """The durability, with the default of the mode and of the standbys."""
        has_log = not (self.consistency.is_async or self.consistency.is_ring)
        return self.durability or ("replicated" if self.standbys else "log" if has_log else "none")

    @property
    def is_replicated(self) -> bool:
        """True if pservers wait for their standbys."""
        return self.log_durability == "replicated"

    @property
    def patience_seconds(self) -> float:
        """The time after which a pserver ends a run that waits. The coordinator detects most causes before that."""
        return self.round_timeout_seconds + self.rejoin_timeout_seconds + self.lease_seconds

    @property
    def history_folder(self) -> Path:
        """The folder of the history of runs."""
        return self.history_dir or self.state_dir / "history"

    def checkpoint_interval(self, plan: SlicePlan) -> Round:
        """Return the rounds (in asynchronous modes contributions) between checkpoints on every pserver; 0 for none.

        Each round logs every dense block once, so that a number of rounds keeps the log of the largest shard within
        `limit_log`. With sparse parameters, whose rows are not known before, pservers also measure their logs. An
        asynchronous pserver has no log, and continues from its newest checkpoint.
        """
        if self.log_durability == "none":
            return self.checkpoint_rounds or (CONTRIBUTIONS if self.consistency.is_async else 0)
        most = self.limit_log(plan)
        return max(1, min(self.checkpoint_rounds or most, most // _measure_largest(plan, counts_sparse=False)))

    def limit_log(self, plan: SlicePlan) -> int:
        """Return the bytes of a pserver's log at which the next checkpoint is due."""
        return self.max_log_bytes or max(LOG_SHARDS * _measure_largest(plan, counts_sparse=True), MIN_LOG_BYTES)

    @property
    def wanted_pservers(self) -> int:
        """The number of pservers of a complete cluster; 0 with strategy ring."""
        return 0 if self.consistency.is_ring else self.num_pservers

    @model_validator(mode="after")
    def _check_settings(self) -> Self:
        try:
            WireTypes(pull=self.pull_type).check_mode(self.consistency)
            if self.durability not in (None, "none"):
                self.consistency.check_log(f"durability {self.durability}")
            if self.standbys:
                self.consistency.check_log("standbys")
        except BadModel as error:
            raise ValueError(error.detail) from None
        if self.mode != "sync" and self.nonfinite == "skip_round":
            raise ValueError("nonfinite skip_round needs the synchronous mode: the other modes have no rounds")
        if self.standbys and not self.is_replicated:
            raise ValueError(
                f"a standby replaces its pserver with durability replicated only, and not with {self.durability}: omit "
                "durability, or start standbys that only serve reads with: gradpost serve pserver --follow"
            )
        return self

    @model_validator(mode="after")
    def _check_ring(self) -> Self:
        """Raise ValueError for explicit settings that could have no effect without pservers."""
        if not self.consistency.is_ring:
            return self
        given = {name: getattr(self, name) for name in _OF_PSERVERS & self.model_fields_set}
        if given.get("on_trainer_loss", "fail") != "fail":
            raise ValueError(
                f"on_trainer_loss {self.on_trainer_loss}: a ring cannot continue without a trainer; only fail"
            )
        useless = [
            name
            for name, value in sorted(given.items())
            if name == "num_pservers" or value not in (type(self).model_fields[name].default, _WITHOUT.get(name))
        ]
        if useless:
            raise ValueError(f"{', '.join(useless)} would have no effect with strategy ring, which has no pservers")
        return self


def _measure_largest(plan: SlicePlan, *, counts_sparse: bool) -> int:
    """Return the bytes that a round takes in the log of the largest shard, if it changes all rows, or none."""
    shards = (
        [block for block in shard if counts_sparse or not plan.parameter[block.parameter].is_sparse]
        for shard in plan.shards
    )
    return max(sum(map(_count_logged, shard)) for shard in shards) * MASTER_BYTES + RECORD_BYTES


def _count_logged(block: Block) -> int:
    """Return the number of elements that a block takes in a synchronous log: whole windows of its parameter."""
    return (-(-block.end // WINDOW) - block.begin // WINDOW) * WINDOW
