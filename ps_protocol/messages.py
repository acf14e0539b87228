"""Control messages: small JSON bodies between trainers, pservers and the coordinator.

Unknown members are refused, so that a misspelt one is noticed.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from .consistency import Consistency
from .vocabulary import Incarnation, Mode, NonfinitePolicy, Placement, PserverIndex, Rank, Round

PROGRESS = "loss"  # the reported number that shows how training goes; the others are results

MAX_HEARTBEAT_PERIOD_SECONDS = 1.0  # progress and reported numbers travel with heartbeats; people watch them

RunState = Literal["gathering", "training", "finished", "failed"]


class Message(BaseModel):
    """Base of all control messages: frozen and closed.

    A loss may well be NaN, for which JSON has no word: it travels as the string "NaN" and comes back as the number.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class RegisterPserver(Message):
    """A pserver offers itself. `instance` is the process's own random id, so that a retry gets the same answer."""

    protocol: int
    instance: str = Field(min_length=8, max_length=64)
    address: str = Field(description="base URL under which trainers reach it")
    http2: bool = Field(description="whether it answers HTTP/2 with prior knowledge")
    index: PserverIndex | None = Field(default=None, ge=0, description="None: the coordinator chooses")


class PserverRegistered(Message):
    """Who the pserver is now, and how often it must say so."""

    index: PserverIndex
    incarnation: Incarnation
    lease_seconds: float


class PserverHeartbeat(Message):
    """A pserver is alive and this far."""

    incarnation: Incarnation
    run: str | None
    round: Round
    missing: tuple[Rank, ...] = Field(default=(), description="whom its open batch barrier waits for")
    waiting_seconds: float = 0.0


class PserverHeartbeatReply(Message):
    """`stop` asks a pserver that was started with --exit-when-done to exit; `exit_code` tells how."""

    members_number: int
    stop: bool = False
    exit_code: int = 0


class PserverInfo(Message):
    """One pserver as trainers need it."""

    index: PserverIndex
    address: str
    incarnation: Incarnation
    http2: bool


class JoinTrainer(Message):
    """A trainer asks to take part. What is None is for the coordinator to decide."""

    protocol: int
    instance: str = Field(min_length=8, max_length=64)
    rank: Rank | None = Field(default=None, ge=0)
    world_size: int | None = Field(default=None, ge=1)
    expects: dict[str, str | int | float | bool] = Field(
        default_factory=dict, description="settings of the mode that the trainer was started for"
    )
    metrics_address: str | None = None


class TrainerJoined(Message):
    """A trainer's place in the run."""

    run: str
    rank: Rank
    world_size: int
    incarnation: Incarnation
    consistency: Consistency
    lease_seconds: float
    round_timeout_seconds: float


class DeclareModel(Message):
    """What a trainer is about to train; all trainers of a run must declare the same.

    `parameters` are (name, shape, dtype, group), `buffers` (name, shape, dtype); None leaves a setting to the
    coordinator.
    """

    run: str
    incarnation: Incarnation
    parameters: tuple[tuple[str, tuple[int, ...], str, int], ...]
    buffers: tuple[tuple[str, tuple[int, ...], str], ...] = ()
    optimizer: str
    group_flags: tuple[dict[str, bool], ...]
    min_block_size: int | None = Field(default=None, ge=1)
    placement: Placement | None = None
    slice_parameters: bool | None = None
    nonfinite: NonfinitePolicy | None = None
    local_steps: int = Field(default=0, ge=0, description="steps of the trainers' own optimizers between pushes")


class PlanReady(Message):
    """The run is complete: everybody is here and agrees. `uploader` pushes the initial values."""

    run: str
    attempt: int
    plan: dict[str, Any]
    pservers: tuple[PserverInfo, ...]
    uploader: Rank


class TrainerHeartbeat(Message):
    """A trainer is alive and this far; `results` are its latest reported numbers (loss, accuracy)."""

    run: str
    incarnation: Incarnation
    round: Round
    results: dict[str, float] = Field(default_factory=dict)


class TrainerHeartbeatReply(Message):
    """How the run stands; `failure` is the problem document that every waiter gets."""

    state: RunState
    failure: dict[str, Any] | None = None


class Leave(Message):
    """A trainer goes: `done` after its last round, or `failed` with the reason."""

    run: str
    incarnation: Incarnation
    outcome: Literal["done", "failed"]
    round: Round = 0
    reason: str = Field(default="", max_length=2000)


class InstallRun(Message):
    """The coordinator starts a run on a pserver: what it will hold, and for whom."""

    run: str
    attempt: int
    plan: dict[str, Any]
    incarnation: Incarnation = Field(description="of the pserver that is meant")
    consistency: Consistency
    nonfinite: NonfinitePolicy
    round_timeout_seconds: float
    uploader: Rank
    number: int
    members: dict[Rank, Incarnation]


class InstallMembers(Message):
    """A numbered change of members; an older number changes nothing. `failure` ends every wait."""

    run: str
    number: int
    members: dict[Rank, Incarnation]
    failure: dict[str, Any] | None = None


class PserverState(Message):
    """What a pserver tells about itself; `digest` covers values, slots, steps and the staged contributions."""

    index: PserverIndex | None
    incarnation: Incarnation | None
    run: str | None
    round: Round
    members: tuple[Rank, ...]
    batch_barriers: tuple[Rank, ...] = Field(default=(), description="whose are in, of the open round")
    fetch_barriers: tuple[Rank, ...] = Field(default=(), description="whose are in, of the applied round")
    clocks: dict[Rank, Round] = Field(default={}, description="asynchronous modes: completed steps of each trainer")
    missing: tuple[Rank, ...]
    waiting_seconds: float
    num_blocks: int
    shard_bytes: int
    pushed_bytes: int
    pulled_bytes: int
    transports: tuple[str, ...]
    digest: str | None
    failure: dict[str, Any] | None


class PserverStatus(Message):
    """A pserver as the coordinator sees it."""

    index: PserverIndex
    address: str
    incarnation: Incarnation
    round: Round
    missing: tuple[Rank, ...]
    waiting_seconds: float
    heartbeat_age_seconds: float


class TrainerStatus(Message):
    """A trainer as the coordinator sees it."""

    rank: Rank
    incarnation: Incarnation
    round: Round
    state: Literal["joined", "declared", "done", "failed", "lost"]
    heartbeat_age_seconds: float
    metrics_address: str | None
    results: dict[str, float]


class ClusterStatus(Message):
    """The answer of `gradpost status`."""

    run: str
    state: RunState
    mode: Mode
    num_pservers: int
    num_trainers: int
    waiting_for: tuple[str, ...]
    failure: dict[str, Any] | None
    plan_digest: str | None
    num_parameters: int
    parameter_bytes: int
    round: Round
    pservers: tuple[PserverStatus, ...]
    trainers: tuple[TrainerStatus, ...]


class ShardSummary(Message):
    """One pserver's share of a run."""

    pserver: PserverIndex
    shard_bytes: int
    pushed_bytes: int
    pulled_bytes: int


class RunSummary(Message):
    """A run in a few numbers, as the servers saw it; `line()` is what ends a training script's output."""

    run: str
    state: RunState
    mode: Mode
    transport: str = Field(description="HTTP versions of the data requests, as the servers saw them")
    num_trainers: int
    rounds: int
    seconds: float
    shards: tuple[ShardSummary, ...]
    results: dict[str, float]

    def line(self) -> str:
        """`trained: mode=sync transport=HTTP/2 accuracy=0.98 rounds=120 seconds=8.1`."""
        final = (item for item in sorted(self.results.items()) if item[0] != PROGRESS)
        results = "".join(f" {key}={value:.4g}" for key, value in final)
        verb = "trained" if self.state != "failed" else "failed"
        return (
            f"{verb}: mode={self.mode} transport={self.transport}{results} "
            f"rounds={self.rounds} seconds={self.seconds:.1f}"
        )


class PushAnswer(Message):
    """What became of a push: how many of its blocks are new, and whether the round was already over."""

    status: Literal["staged", "already_applied"]
    staged: int = 0
    duplicates: int = 0
    complete: bool = False


class BarrierAnswer(Message):
    """What became of a barrier: the open round and whom its batch barrier still waits for."""

    round: Round
    missing: tuple[Rank, ...] = ()


def heartbeat_period(lease_seconds: float) -> float:
    """How often a member says that it lives: three times in a lease, and once a second at least.

    >>> heartbeat_period(1.5), heartbeat_period(10.0)
    (0.5, 1.0)
    """
    return min(lease_seconds / 3, MAX_HEARTBEAT_PERIOD_SECONDS)
