"""Control messages: small JSON bodies between trainers, pservers and the coordinator.

Unknown members are refused, so that a misspelt one is noticed.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from .consistency import Consistency
from .local_sockets import NAME_PATTERN
from .vocabulary import (
    Durability,
    Incarnation,
    Mode,
    NonfinitePolicy,
    Placement,
    PserverIndex,
    Rank,
    Round,
)
from .wire_types import PullType, PushType

PROGRESS = "loss"  # the reported number that shows how training goes; the others are results

MAX_HEARTBEAT_PERIOD_SECONDS = 1.0  # progress and reported numbers travel with heartbeats; people watch them


def _check_base_url(value: str) -> str:
    url = urlsplit(value)  # raises ValueError, as `port` does
    if url.scheme not in ("http", "https") or not url.hostname or url.query or url.fragment or url.port == 0:
        raise ValueError("not a base URL such as http://10.0.0.7:7071")
    if any(character.isspace() for character in value):
        raise ValueError("a URL has no spaces")
    return value


BaseUrl = Annotated[str, AfterValidator(_check_base_url)]
LocalName = Annotated[str, Field(pattern=NAME_PATTERN)]  # nobody is sent to another program's socket

RunState = Literal["gathering", "training", "finished", "failed"]


class Message(BaseModel):
    """Base of all control messages: frozen and closed.

    A loss may well be NaN, for which JSON has no word: it travels as the string "NaN" and comes back as the number.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class Software(Message):
    """Versions of what a process runs on."""

    gradpost: str
    python: str
    torch: str


class Traffic(Message):
    """What went of late between a trainer and a pserver in one direction, and for how long something was on its way."""

    num_requests: int = 0
    num_bytes: int = 0
    seconds: float = 0.0


class Link(Message):
    """A trainer's way to one pserver, as it has measured it.

    A push lasts until it is acknowledged, which in asynchronous modes may be a wait for room in a queue; a pull from
    the first byte of the answer to its last.
    """

    is_local: bool = Field(default=False, description="over a Unix socket, on the host that both are on")
    round_trip_seconds: float | None = Field(default=None, description="of a small request, when it was connected")
    pushes: Traffic = Traffic()
    pulls: Traffic = Traffic()


class ShardFile(Message):
    """One shard's file of a checkpoint, as its pserver wrote it; `digest` is the XXH3-128 of its bytes, in hex."""

    pserver: PserverIndex
    name: str
    num_bytes: int
    digest: str
    round: Round
    attempt: int
    torch: str
    cpu: str
    steps: dict[Rank, Round] = Field(default={}, description="asynchronous modes: the newest step of each rank in it")


class FrozenRounds(Message):
    """Where a pserver stands while members change: what is applied, and who is how far in the rounds after it.

    `participants` are those whose contributions are in the newest applied rounds; `complete` those of whom a round's
    whole contribution is here, `counted` those whose batch barrier is in, `verdicts` those whose barrier said that
    their gradient holds NaN or infinity.
    """

    applied: Round
    is_short: bool = Field(default=False, description="later rounds were logged here, and cannot be read any more")
    is_readable: bool = Field(default=True, description="whether the initial values are complete")
    participants: dict[Round, tuple[Rank, ...]] = {}
    complete: dict[Round, tuple[Rank, ...]] = {}
    counted: dict[Round, tuple[Rank, ...]] = {}
    verdicts: dict[Round, tuple[Rank, ...]] = {}
    opens: dict[Rank, Round] = Field(default={}, description="asynchronous modes: the step that each would push next")


class HeldRun(Message):
    """What a pserver has found in its folder: a run, as far as it could be restored."""

    run: str
    attempt: int
    plan: str = Field(description="digest of the slice plan")
    rounds: FrozenRounds
    restorable: tuple[tuple[Round, Round], ...] = Field(description="ranges of rounds, first and last")


class RegisterPserver(Message):
    """A pserver offers itself. `instance` is the process's own random id, so that a retry gets the same answer."""

    protocol: int
    instance: str = Field(min_length=8, max_length=64)
    address: BaseUrl = Field(description="base URL under which trainers reach it")
    http2: bool = Field(description="whether trainers are to send it tensors over HTTP/2, with prior knowledge")
    local: LocalName | None = Field(default=None, description="abstract Unix socket for trainers on its host")
    index: PserverIndex | None = Field(default=None, ge=0, description="None: the coordinator chooses")
    previous: Incarnation = Field(default=0, description="the life that it follows, whose folder it has locked")
    held: HeldRun | None = None


class PserverRegistered(Message):
    """Who the pserver is now, and how often it must say so."""

    index: PserverIndex
    incarnation: Incarnation
    lease_seconds: float


class PserverLoad(Message):
    """Where a pserver stands and what it has done for its run, counted since it took up this attempt of it.

    `participants` are those whose contributions are in the newest applied round. Sums of seconds are over as many
    cases as the number beside them; `staleness` has pairs of an upper bound, None for the last, and how many were
    beyond the bound before it.
    """

    batch_barriers: tuple[Rank, ...] = Field(default=(), description="whose are in, of the open round")
    participants: tuple[Rank, ...] = ()
    clocks: dict[Rank, Round] = Field(default={}, description="asynchronous modes: completed steps of each trainer")
    num_blocks: int
    shard_bytes: int
    pushed_bytes: int
    pulled_bytes: int
    num_queued: int = Field(description="gradients in the queues of blocks, and pushes that wait for room there")
    num_applies: int
    apply_seconds: float
    num_waits: int
    wait_seconds: float = Field(description="from when the first trainer waits to the last one's arrival")
    staleness: tuple[tuple[float | None, int], ...] = ()


class PserverHeartbeat(Message):
    """A pserver is alive and this far."""

    incarnation: Incarnation
    run: str | None
    attempt: int = 0
    round: Round
    missing: tuple[Rank, ...] = Field(default=(), description="whom its open batch barrier waits for")
    waiting_seconds: float = 0.0
    failure: dict[str, Any] | None = Field(default=None, description="what has ended the run here")
    checkpoints: tuple[ShardFile, ...] = Field(default=(), description="its shards of checkpoints that are whole")
    coming_checkpoints: tuple[Round, ...] = Field(
        default=(), description="rounds that were named for checkpoints, and of which its shards are not written yet"
    )
    is_stopping: bool = Field(default=False, description="it writes down what it holds, ends, and will be back")
    load: PserverLoad | None = Field(default=None, description="for those who watch; nothing is decided by it")
    software: Software | None = None


class PserverHeartbeatReply(Message):
    """`stop` asks a pserver that was started with --exit-when-done to exit; `exit_code` tells how.

    `complete` are the newest rounds of which there is a checkpoint of the whole model; `notice` says what will become
    of those who are being waited for.
    """

    complete: tuple[Round, ...] | None = Field(default=None, description="null: not known yet, so nothing is news")
    notice: str = ""
    stop: bool = False
    exit_code: int = 0


class PserverInfo(Message):
    """One pserver as trainers need it."""

    index: PserverIndex
    address: str
    incarnation: Incarnation
    http2: bool
    local: LocalName | None = Field(default=None, description="to be tried first, if `address` is without TLS")


class JoinTrainer(Message):
    """A trainer asks to take part. What is None is for the coordinator to decide."""

    protocol: int
    instance: str = Field(min_length=8, max_length=64)
    rank: Rank | None = Field(default=None, ge=0)
    world_size: int | None = Field(default=None, ge=1)
    expects: dict[str, str | int | float | bool] = Field(
        default_factory=dict, description="settings of the mode that the trainer was started for"
    )
    metrics_address: BaseUrl | None = None


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
    push_type: PushType | None = Field(default=None, description="what gradients are on the wire")
    pull_type: PullType | None = Field(default=None, description="what values are on the wire to trainers")
    topk: float | None = Field(default=None, gt=0, le=1, description="share of a block's elements that `topk` pushes")
    local_steps: int = Field(default=0, ge=0, description="steps of the trainers' own optimizers between pushes")
    max_grad_norm: float | None = Field(
        default=None, gt=0, allow_inf_nan=False, description="clip the aggregated gradient to this norm"
    )
    average_buffers: int = Field(default=0, ge=0, description="rounds from one mean of what is averaged to the next")
    aliases: dict[str, str] = Field(default={}, description="further names of tied tensors, for exported models")
    rendezvous: str | None = Field(
        default=None, max_length=300, description="strategy ring, rank 0: where the trainers meet; its own affair"
    )


class PlanReady(Message):
    """The run is complete: everybody is here and agrees. `uploader` pushes the initial values."""

    run: str
    attempt: int
    plan: dict[str, Any]
    pservers: tuple[PserverInfo, ...]
    uploader: Rank
    start: Round = Field(default=1, description="the first round, or step, that this trainer pushes for")
    nonfinite: NonfinitePolicy = Field(default="reject", description="what becomes of a gradient with NaN or infinity")
    rendezvous: str | None = Field(default=None, description="strategy ring: what rank 0 has declared")
    max_grad_norm: float | None = Field(default=None, description="gets bring the global norm of the gradient")


class TrainerHeartbeat(Message):
    """A trainer is alive and this far; `results` are its latest reported numbers (loss, accuracy)."""

    run: str
    incarnation: Incarnation
    round: Round = Field(
        description="the newest round whose version this trainer has received from every pserver, 0 before the first; "
        "in asynchronous modes its newest step whose parameters it has received"
    )
    attempt: int = Field(default=0, description="the attempt that `round` belongs to: the one this trainer acts on")
    results: dict[str, float] = Field(default_factory=dict)
    unreachable: dict[PserverIndex, tuple[Incarnation, float]] = Field(
        default={}, description="pservers that do not answer this trainer, and for how many seconds"
    )
    ahead_of: dict[PserverIndex, Incarnation] = Field(
        default={},
        description="pservers, with their incarnation, that have lost a round which this trainer has received",
    )
    software: Software | None = None
    links: dict[PserverIndex, Link] = {}
    waiting_seconds: float = Field(default=0.0, ge=0, description="strategy ring: for the others, in the next round")
    is_done: bool = Field(default=False, description="strategy ring: no batches are left; it accompanies the others")


class TrainerHeartbeatReply(Message):
    """How the run stands; `failure` is the problem document that every waiter gets.

    `attempt` goes up when the run is rolled back, to the round `resume` (the version to pull); `pservers` are those
    that are here now.
    """

    state: RunState
    failure: dict[str, Any] | None = None
    attempt: int = 0
    resume: Round = 0
    uploader: Rank | None = Field(default=None, description="who pushes initial values, once more; None: nobody")
    pservers: tuple[PserverInfo, ...] = ()
    notice: str = ""


class Leave(Message):
    """A trainer goes: `done` after its last round, or `failed` with the reason."""

    run: str
    incarnation: Incarnation
    outcome: Literal["done", "failed"]
    round: Round = Field(default=0, description="as in `TrainerHeartbeat`")
    reason: str = Field(default="", max_length=2000)


class Controls(Message):
    """What an administrator has set, from round `since` on, until the controls of a later round."""

    since: Round = 0
    rates: dict[int, float] = Field(default={}, description="learning rate by parameter group")
    frozen: tuple[str, ...] = Field(default=(), description="parameters that are not stepped, as if without a gradient")
    is_paused: bool = Field(default=False, description="no such round is applied")

    @model_validator(mode="before")
    @classmethod
    def _accept_earlier(cls, given: Any) -> Any:
        """Earlier versions also said of which parameters the values are replaced: only of none is accepted."""
        if isinstance(given, dict) and given.get("replaced") == {}:
            return {name: value for name, value in given.items() if name != "replaced"}
        return given


class InstallRun(Message):
    """The coordinator starts a run on a pserver: what it will hold, and for whom.

    `restore` is the round that the shard is restored to, None if it begins with initial values. `starts` is the first
    round of those members who have not been here from round 1; `sets` are, for open rounds, those whose contributions
    are applied, where that is not simply every member who has started; `verdicts` those of them whose gradients are not
    finite.
    """

    run: str
    attempt: int
    plan: dict[str, Any]
    incarnation: Incarnation = Field(description="of the pserver that is meant")
    consistency: Consistency
    nonfinite: NonfinitePolicy
    max_grad_norm: float | None = Field(default=None, description="rounds are stepped once a get brings their norm")
    round_timeout_seconds: float = Field(description="after which those who wait are told who is missing, and fail")
    durability: Durability = "none"
    checkpoint_rounds: int = Field(
        default=0, ge=0, description="rounds after which it writes a checkpoint of its own if none was named; 0: never"
    )
    keep_checkpoints: int = Field(default=2, ge=1)
    restore: Round | None = None
    began: dict[int, Round | None] = Field(
        default={}, description="the round after which each attempt has begun; null: with initial values"
    )
    source: str | None = Field(default=None, description="run whose checkpoint is restored, if it is another")
    uploader: Rank
    number: int
    members: dict[Rank, Incarnation]
    starts: dict[Rank, Round] = {}
    sets: dict[Round, tuple[Rank, ...]] = {}
    verdicts: dict[Round, tuple[Rank, ...]] = {}
    controls: tuple[Controls, ...] = Field(default=(), description="what an administrator has set, oldest first")


class WantCheckpoint(Message):
    """The coordinator names the round after which every pserver is to write a checkpoint.

    In asynchronous modes it is a number of contributions, and every pserver's first so many are in it; if the run
    `is_over`, nobody will push any more, and each writes what it has.
    """

    run: str
    round: Round
    is_over: bool = False


class CheckpointCreated(Message):
    """There is a checkpoint of the whole model."""

    run: str
    round: Round
    place: str


class Freeze(Message):
    """The coordinator is about to change the members: from now on no barrier counts until they are installed."""

    run: str
    attempt: int
    number: int


class InstallMembers(Message):
    """A numbered change of members; an older number changes nothing. `failure` ends every wait.

    `starts`, `sets`, `verdicts` and `controls` are those of InstallRun.
    """

    run: str
    attempt: int = 0
    number: int
    members: dict[Rank, Incarnation]
    starts: dict[Rank, Round] = {}
    sets: dict[Round, tuple[Rank, ...]] = {}
    verdicts: dict[Round, tuple[Rank, ...]] = {}
    controls: tuple[Controls, ...] = ()
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
    participants: tuple[Rank, ...] = Field(default=(), description="whose contributions are in the applied round")
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
    http2: bool = Field(default=True, description="whether trainers send it tensors over HTTP/2")
    incarnation: Incarnation
    round: Round
    missing: tuple[Rank, ...]
    waiting_seconds: float
    heartbeat_age_seconds: float
    software: Software | None = Field(default=None, description="null until its next heartbeat")


class TrainerStatus(Message):
    """A trainer as the coordinator sees it."""

    rank: Rank
    incarnation: Incarnation
    round: Round
    state: Literal["joined", "declared", "done", "failed", "lost"]
    heartbeat_age_seconds: float
    metrics_address: str | None
    results: dict[str, float]
    software: Software | None = Field(default=None, description="null until its next heartbeat")
    links: dict[PserverIndex, Link] = Field(default={}, description="its way to each pserver, as it has measured it")
    unreachable: dict[PserverIndex, float] = Field(
        default={}, description="pservers that do not answer it, and for how many seconds"
    )
    waiting_seconds: float = Field(default=0.0, description="strategy ring: for the others, when it was last heard")
    is_done: bool = Field(default=False, description="strategy ring: no batches are left; it accompanies the others")


class ClusterStatus(Message):
    """The answer of `gradpost status`."""

    run: str
    state: RunState
    mode: Mode
    num_pservers: int
    num_trainers: int
    waiting_for: tuple[str, ...]
    prospects: tuple[str, ...] = Field(default=(), description="a pause; who was lost, and when the run fails")
    failure: dict[str, Any] | None
    plan_digest: str | None
    num_parameters: int
    parameter_bytes: int
    round: Round
    pservers: tuple[PserverStatus, ...]
    trainers: tuple[TrainerStatus, ...]
    software: Software | None = Field(default=None, description="of the coordinator")


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
    transport: str = Field(description="HTTP versions of the data requests, as the servers saw them; or `ring`")
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
    finite: bool = Field(default=True, description="policy skip_round: whether it holds neither NaN nor infinity")


class BarrierAnswer(Message):
    """What became of a barrier: the open round and whom its batch barrier still waits for.

    `notice` says what will become of those who were lost.
    """

    round: Round
    missing: tuple[Rank, ...] = ()
    notice: str = ""


class NormAnswer(Message):
    """The sum of squares of a pserver's part of a round's gradient, and a digest of whose it is made of.

    None if the round was applied without: it stepped nothing, or was restored from a disk.
    """

    contributions: str = ""
    sum_of_squares: float | None = None


def heartbeat_period(lease_seconds: float) -> float:
    """How often a member says that it lives: three times in a lease, and once a second at least.

    >>> heartbeat_period(1.5), heartbeat_period(10.0)
    (0.5, 1.0)
    """
    return min(lease_seconds / 3, MAX_HEARTBEAT_PERIOD_SECONDS)
