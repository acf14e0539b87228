"""Settings of the coordinator."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Self

from pydantic import Field, model_validator

from ps_protocol.consistency import Compensation, Consistency, ReadConsistency
from ps_protocol.errors import BadModel
from ps_protocol.placement import DEFAULT_MIN_BLOCK_SIZE
from ps_protocol.plan import DEFAULT_PLACEMENT
from ps_protocol.vocabulary import Durability, LossPolicy, Mode, NonfinitePolicy, Placement, Strategy
from ps_protocol.wire_types import DEFAULT_TOPK, PullType, PushType, WireTypes
from services.runtime.settings import ServiceSettings

from .defaults import RunDefaults

_OF_PSERVERS = {  # what only they have, or do
    *("num_pservers", "min_block_size", "placement", "slice_parameters", "push_type", "pull_type", "topk"),
    *("on_trainer_loss", "min_trainers", "rejoin_timeout_seconds"),
    *("durability", "checkpoint_rounds", "max_log_bytes", "keep_checkpoints", "checkpoints", "resume"),
}
_WITHOUT = {"on_trainer_loss": "fail", "durability": "none"}  # what they are without pservers


class CoordinatorSettings(ServiceSettings):
    """Settings of the coordinator."""

    port: int = Field(default=7070, ge=0, le=65535, description="port to listen on; 0: a free one")
    num_pservers: int = Field(default=1, ge=1, description="how many pservers make the cluster complete")
    num_trainers: int = Field(default=1, ge=1, description="how many trainers make the cluster complete")
    max_trainers: int | None = Field(
        default=None,
        ge=1,
        description="a run takes as many trainers as come, `num_trainers` to so many; none: `num_trainers`, no more "
        "and no fewer",
    )
    last_call_seconds: float = Field(
        default=5.0,
        ge=0,
        description="with `max_trainers`: once there are enough, a run waits until nobody has joined for so long. A "
        "trainer with `WORLD_SIZE` settles it at once",
    )
    strategy: Strategy = Field(
        default="ps",
        description="who adds gradients up: pservers (`ps`), or the trainers among themselves, on `torch.distributed` "
        "(`ring`)",
    )
    mode: Mode = Field(default="sync", description="how trainers wait for each other")
    max_delay: int = Field(
        default=0,
        ge=0,
        description="so many steps may a trainer's pushes and pulls run behind its computation, in every mode",
    )
    max_staleness: int | None = Field(
        default=None,
        ge=0,
        description="`ssp`: so many steps may the fastest trainer be ahead of the slowest; none: 4",
    )
    wait_for_apply: bool = Field(
        default=True, description="asynchronous modes: a get waits until the trainer's own gradients are applied"
    )
    read_consistency: ReadConsistency = Field(
        default="block",
        description="asynchronous modes: what a get sees whole: nothing (`none`), each `block`, or the `shard`",
    )
    max_queued: int = Field(
        default=16,
        ge=1,
        description="asynchronous modes: so many gradients wait for each block; a full queue holds pushes back",
    )
    compensation: Compensation = Field(
        default="none",
        description="asynchronous modes, what is done about staleness: `none`; `divide` the rate by it; or `dc`, "
        "DC-ASGD",
    )
    dc_lambda: float = Field(default=0.04, ge=0, description="λ of DC-ASGD")
    min_block_size: int = Field(
        default=DEFAULT_MIN_BLOCK_SIZE, ge=1, description="a parameter is cut into ceil(elements / this) blocks at most"
    )
    placement: Placement = Field(default=DEFAULT_PLACEMENT, description="how blocks are dealt to pservers")
    slice_parameters: bool = Field(default=True, description="false: each parameter stays whole on one pserver")
    nonfinite: NonfinitePolicy = Field(
        default="reject",
        description="what becomes of a gradient with NaN or infinity: `reject` it, `skip_round` on all pservers alike "
        "(synchronous mode; what a `torch.amp.GradScaler` needs), or `allow` it",
    )
    push_type: PushType = Field(
        default="float32",
        description="what gradients of float32 parameters are on the wire: `float32`, `bfloat16`, `float16`, `int8` "
        "(groups of 256 share a scale) or `topk` (the largest of each block); trainers push later what the last two "
        "left out",
    )
    pull_type: PullType = Field(
        default="float32",
        description="what float32 parameters are on the wire to trainers: `float32`, `bfloat16`, `float16` or `int8` "
        "(synchronous mode without `max_delay`: the difference to the round before, of which groups of 256 share a "
        "scale); pservers keep float32, and send later what the last one left out",
    )
    topk: float = Field(default=DEFAULT_TOPK, gt=0, le=1, description="share of a block's elements that `topk` pushes")
    round_timeout_seconds: float = Field(
        default=300.0, gt=0, description="how long trainers wait for one that is alive and does not come"
    )
    on_trainer_loss: LossPolicy = Field(
        default="wait",
        description="what becomes of the run when a trainer is lost: `wait` for another life of it, `continue` without "
        "it, or `fail`. `gradpost up` without `--max-restarts` says `fail`",
    )
    min_trainers: int = Field(
        default=1,
        ge=1,
        description="with `continue`: when fewer would be left, the run waits for those who were lost",
    )
    rejoin_timeout_seconds: float = Field(
        default=300.0, gt=0, description="how long a lost trainer or pserver is waited for"
    )
    durability: Durability | None = Field(
        default=None,
        description="what a pserver writes before a round counts: `none`; `log`, which outlives the process; `fsync`, "
        "which outlives the machine. None given: `log`, in the asynchronous modes `none`",
    )
    checkpoint_rounds: int | None = Field(
        default=None,
        ge=1,
        description="rounds, in the asynchronous modes contributions, from one checkpoint to the next, if the disks "
        "are fast enough; with a log at most as many as `max_log_bytes` allows. Without either there are none, in the "
        "asynchronous modes one every 1,000",
    )
    max_log_bytes: int | None = Field(
        default=None,
        ge=1,
        description="size of a pserver's log at which the next checkpoint is due; none: four shards, and 1 MiB at "
        "least",
    )
    keep_checkpoints: int = Field(
        default=2,
        ge=1,
        description="so many complete checkpoints are kept; a pserver's log reaches back over as many of those that it "
        "can restore from",
    )
    resume: bool = Field(
        default=False,
        description="go on with the run that `state_dir` knows, or else from the newest checkpoint, with new processes",
    )

    @property
    def consistency(self) -> Consistency:
        """The mode and its bounds. Raises BadModel for a setting that could have no effect in it."""
        return Consistency(**{field.name: getattr(self, field.name) for field in fields(Consistency)})

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        try:
            WireTypes(pull=self.pull_type).check_mode(self.consistency)
        except BadModel as error:
            raise ValueError(error.detail) from None
        if self.mode != "sync" and self.nonfinite == "skip_round":
            raise ValueError("nonfinite skip_round belongs to the synchronous mode: there are no rounds in the others")
        if self.max_trainers is not None and self.max_trainers < self.num_trainers:
            raise ValueError(f"max_trainers {self.max_trainers} is less than num_trainers {self.num_trainers}")
        if self.consistency.is_ring:
            self._check_ring()
        return self

    def _check_ring(self) -> None:
        """Raise ValueError for what is given explicitly, and could have no effect without pservers."""
        given = {name: getattr(self, name) for name in _OF_PSERVERS & self.model_fields_set}
        if given.get("on_trainer_loss", "fail") != "fail":
            raise ValueError(
                f"on_trainer_loss {self.on_trainer_loss}: a ring cannot go on without a trainer; only fail"
            )
        useless = [
            name
            for name, value in sorted(given.items())
            if name == "num_pservers" or value not in (type(self).model_fields[name].default, _WITHOUT.get(name))
        ]
        if useless:
            raise ValueError(f"{', '.join(useless)} would have no effect with strategy ring, which has no pservers")

    @property
    def wanted_pservers(self) -> int:
        """How many pservers make the cluster complete; with strategy ring none."""
        return 0 if self.consistency.is_ring else self.num_pservers

    @property
    def run_defaults(self) -> RunDefaults:
        """The settings that a run needs, with those resolved that depend on the mode and strategy."""
        is_ring = self.consistency.is_ring
        copied: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(RunDefaults)}
        copied["on_trainer_loss"] = "fail" if is_ring else self.on_trainer_loss
        copied["durability"] = self.durability or ("none" if self.consistency.is_async or is_ring else "log")
        return RunDefaults(**copied)
