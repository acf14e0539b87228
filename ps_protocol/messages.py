"""Control messages: small JSON bodies between trainers, pservers and the coordinator.

Unknown members are refused, so that a misspelt one is noticed.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from .fields import (
    MAX_MEMBERS,
    MAX_TENSORS,
    BaseUrl,
    ByOrdinal,
    CheckedConsistency,
    Count,
    Flag,
    Identifier,
    Incarnation,
    Integer,
    Label,
    LocalName,
    Message,
    Name,
    Note,
    Number,
    Object,
    Ordinal,
    Ordinals,
    OriginUrl,
    Positive,
    PserverIndex,
    Rank,
    Real,
    Reason,
    Results,
    Round,
    Text,
)
from .membership import Membership, MembershipMessage
from .vocabulary import MAX_DIMENSIONS, PROTOCOL_VERSION, Durability, Mode, NonfinitePolicy, Placement
from .wire_types import PullType, PushType

PROGRESS = "loss"  # the reported number that shows how training goes; the others are results

MAX_HEARTBEAT_PERIOD_SECONDS = 1.0  # progress and reported numbers travel with heartbeats; people watch them

Protocol = Annotated[Integer, Field(json_schema_extra={"const": PROTOCOL_VERSION})]
Instance = Annotated[str, Field(min_length=8, max_length=64)]
Shape = Annotated[tuple[Integer, ...], Field(max_length=MAX_DIMENSIONS)]

RunState = Literal["gathering", "training", "finished", "failed"]


class Software(Message):
    """Versions of what a process runs on."""

    gradpost: Label
    python: Label
    torch: Label


class Traffic(Message):
    """What went of late between a trainer and a pserver in one direction, and for how long something was on its way."""

    num_requests: Count = 0
    num_bytes: Count = 0
    seconds: Real = 0.0


class Link(Message):
    """A trainer's way to one pserver, as it has measured it.

    A push lasts until it is acknowledged, which in asynchronous modes may be a wait for room in a queue; a pull from
    the first byte of the answer to its last.
    """

    is_local: Flag = Field(default=False, description="over a Unix socket, on the host that both are on")
    round_trip_seconds: Real | None = Field(default=None, description="of a small request, when it was connected")
    pushes: Traffic = Traffic()
    pulls: Traffic = Traffic()


class ShardFile(Message):
    """One shard's file of a checkpoint, as its pserver wrote it; `digest` is the XXH3-128 of its bytes, in hex."""

    pserver: PserverIndex
    name: Label
    num_bytes: Count
    digest: Label
    round: Round
    attempt: Ordinal
    torch: Label
    cpu: Label
    steps: ByOrdinal[Round] = Field(default={}, description="asynchronous modes: the newest step of each rank in it")


class FrozenRounds(Message):
    """Where a pserver stands while members change: what is applied, and who is how far in the rounds after it.

    `participants` are those whose contributions are in the newest applied rounds; `complete` those of whom a round's
    whole contribution is here, `counted` those whose batch barrier is in, `verdicts` those whose barrier said that
    their gradient holds NaN or infinity.
    """

    applied: Round
    is_short: Flag = Field(default=False, description="later rounds were logged here, and cannot be read any more")
    is_readable: Flag = Field(default=True, description="whether the initial values are complete")
    participants: ByOrdinal[Ordinals] = Field(default={})
    complete: ByOrdinal[Ordinals] = Field(default={})
    counted: ByOrdinal[Ordinals] = Field(default={})
    verdicts: ByOrdinal[Ordinals] = Field(default={})
    opens: ByOrdinal[Round] = Field(default={}, description="asynchronous modes: the step that each would push next")


class HeldRun(Message):
    """What a pserver has found in its folder: a run, as far as it could be restored."""

    run: Identifier
    attempt: Ordinal
    plan: Identifier = Field(description="digest of the slice plan")
    rounds: FrozenRounds
    restorable: tuple[tuple[Round, Round], ...] = Field(
        max_length=MAX_MEMBERS, description="ranges of rounds, first and last"
    )


class RegisterPserver(Message):
    """A pserver offers itself. `instance` is the process's own random id, so that a retry gets the same answer."""

    protocol: Protocol
    instance: Instance
    address: BaseUrl = Field(description="base URL under which trainers reach it")
    http2: Flag = Field(description="whether trainers are to send it tensors over HTTP/2, with prior knowledge")
    local: LocalName | None = Field(default=None, description="abstract Unix socket for trainers on its host")
    index: PserverIndex | None = Field(default=None, description="None: the coordinator chooses")
    previous: Incarnation = Field(default=0, description="the life that it follows, whose folder it has locked")
    held: HeldRun | None = None


class PserverRegistered(Message):
    """Who the pserver is now, and how often it must say so."""

    index: PserverIndex
    incarnation: Incarnation
    lease_seconds: Number


class PserverLoad(Message):
    """Where a pserver stands and what it has done for its run, counted since it took up this attempt of it.

    `participants` are those whose contributions are in the newest applied round. Sums of seconds are over as many
    cases as the number beside them; `staleness` has pairs of an upper bound, None for the last, and how many were
    beyond the bound before it.
    """

    batch_barriers: Ordinals = Field(default=(), description="whose are in, of the open round")
    participants: Ordinals = ()
    clocks: ByOrdinal[Round] = Field(default={}, description="asynchronous modes: completed steps of each trainer")
    num_blocks: Count
    shard_bytes: Count
    pushed_bytes: Count
    pulled_bytes: Count
    num_queued: Count = Field(description="gradients in the queues of blocks, and pushes that wait for room there")
    num_applies: Count
    apply_seconds: Real
    num_waits: Count
    wait_seconds: Real = Field(description="from when the first trainer waits to the last one's arrival")
    staleness: tuple[tuple[Real | None, Count], ...] = Field(default=(), max_length=100)


class PserverHeartbeat(Message):
    """A pserver is alive and this far."""

    incarnation: Incarnation
    run: Identifier | None
    attempt: Ordinal = 0
    round: Round
    missing: Ordinals = Field(default=(), description="whom its open batch barrier waits for")
    waiting_seconds: Real = 0.0
    failure: Object | None = Field(default=None, description="what has ended the run here")
    checkpoints: tuple[ShardFile, ...] = Field(
        default=(), max_length=MAX_MEMBERS, description="its shards of checkpoints that are whole"
    )
    coming_checkpoints: Ordinals = Field(
        default=(), description="rounds that were named for checkpoints, and of which its shards are not written yet"
    )
    is_stopping: Flag = Field(default=False, description="it writes down what it holds, ends, and will be back")
    load: PserverLoad | None = Field(default=None, description="for those who watch; nothing is decided by it")
    software: Software | None = None


class PserverHeartbeatReply(Message):
    """`stop` asks a pserver that was started with --exit-when-done to exit; `exit_code` tells how.

    `complete` are the newest rounds of which there is a checkpoint of the whole model; `notice` says what will become
    of those who are being waited for.
    """

    complete: Ordinals | None = Field(default=None, description="null: not known yet, so nothing is news")
    notice: Note = ""
    stop: Flag = False
    exit_code: Count = 0


class PserverInfo(Message):
    """One pserver as trainers need it."""

    index: PserverIndex
    address: BaseUrl
    incarnation: Incarnation
    http2: Flag
    local: LocalName | None = Field(default=None, description="to be tried first, if `address` is without TLS")


class JoinTrainer(Message):
    """A trainer asks to take part. What is None is for the coordinator to decide."""

    protocol: Protocol
    instance: Instance
    rank: Rank | None = None
    world_size: Positive | None = None
    expects: dict[Label, Label | Integer | Real | Flag] = Field(
        default_factory=dict, max_length=100, description="settings of the mode that the trainer was started for"
    )
    metrics_address: OriginUrl | None = Field(
        default=None,
        description="scheme, host and port at which the trainer serves `/metrics`; a host other than the join's sender "
        "is ignored, unless the coordinator has it in `allowed_hosts`",
    )


class TrainerJoined(Message):
    """A trainer's place in the run."""

    run: Identifier
    rank: Rank
    world_size: Count
    incarnation: Incarnation
    consistency: CheckedConsistency
    lease_seconds: Number
    round_timeout_seconds: Number


class DeclareModel(Message):
    """What a trainer is about to train; all trainers of a run must declare the same.

    `parameters` are (name, shape, dtype, group), `buffers` (name, shape, dtype); None leaves a setting to the
    coordinator.
    """

    run: Identifier
    incarnation: Incarnation
    parameters: tuple[tuple[Name, Shape, Label, Integer], ...] = Field(max_length=MAX_TENSORS)
    buffers: tuple[tuple[Name, Shape, Label], ...] = Field(default=(), max_length=MAX_TENSORS)
    optimizer: Label
    group_flags: tuple[Annotated[dict[Label, Flag], Field(max_length=100)], ...] = Field(max_length=MAX_MEMBERS)
    min_block_size: Positive | None = None
    placement: Placement | None = None
    slice_parameters: Flag | None = None
    nonfinite: NonfinitePolicy | None = None
    push_type: PushType | None = Field(default=None, description="what gradients are on the wire")
    pull_type: PullType | None = Field(default=None, description="what values are on the wire to trainers")
    topk: Real | None = Field(default=None, gt=0, le=1, description="share of a block's elements that `topk` pushes")
    local_steps: Count = Field(default=0, description="steps of the trainers' own optimizers between pushes")
    max_grad_norm: Real | None = Field(
        default=None, gt=0, allow_inf_nan=False, description="clip the aggregated gradient to this norm"
    )
    aliases: dict[Name, Name] = Field(
        default={}, max_length=MAX_TENSORS, description="further names of tied tensors, for exported models"
    )
    rendezvous: Text | None = Field(
        default=None, max_length=300, description="strategy ring, rank 0: where the trainers meet; its own affair"
    )

    @model_validator(mode="before")
    @classmethod
    def _accept_earlier(cls, value: Any) -> Any:
        match value:
            case {"average_buffers": 0, **rest}:
                return rest
            case {"average_buffers": _}:
                raise ValueError("average_buffers is a setting of earlier versions; buffers are averaged by default")
        return value


class PlanReady(Message):
    """The run is complete: everybody is here and agrees. `uploader` pushes the initial values."""

    run: Identifier
    attempt: Ordinal
    plan: Object
    pservers: tuple[PserverInfo, ...] = Field(max_length=MAX_MEMBERS)
    uploader: Rank
    start: Round = Field(default=1, description="the first round, or step, that this trainer pushes for")
    nonfinite: NonfinitePolicy = Field(default="reject", description="what becomes of a gradient with NaN or infinity")
    rendezvous: Text | None = Field(default=None, max_length=300, description="strategy ring: what rank 0 has declared")
    max_grad_norm: Real | None = Field(default=None, description="gets bring the global norm of the gradient")


class TrainerHeartbeat(Message):
    """A trainer is alive and this far; `results` are its latest reported numbers (loss, accuracy)."""

    run: Identifier
    incarnation: Incarnation
    round: Round = Field(
        description="the newest round whose version this trainer has received from every pserver, 0 before the first; "
        "in asynchronous modes its newest step whose parameters it has received"
    )
    attempt: Ordinal = Field(default=0, description="the attempt that `round` belongs to: the one this trainer acts on")
    results: Results = Field(default_factory=dict)
    unreachable: ByOrdinal[tuple[Incarnation, Real]] = Field(
        default={}, description="pservers that do not answer this trainer, and for how many seconds"
    )
    ahead_of: ByOrdinal[Incarnation] = Field(
        default={},
        description="pservers, with their incarnation, that have lost a round which this trainer has received",
    )
    software: Software | None = None
    links: ByOrdinal[Link] = Field(default={})
    waiting_seconds: Real = Field(default=0.0, ge=0, description="strategy ring: for the others, in the next round")
    is_done: Flag = Field(default=False, description="strategy ring: no batches are left; it accompanies the others")


class TrainerHeartbeatReply(Message):
    """How the run stands; `failure` is the problem document that every waiter gets.

    `attempt` goes up when the run is rolled back, to the round `resume` (the version to pull); `pservers` are those
    that are here now.
    """

    state: RunState
    failure: Object | None = None
    attempt: Ordinal = 0
    resume: Round = 0
    uploader: Rank | None = Field(default=None, description="who pushes initial values, once more; None: nobody")
    pservers: tuple[PserverInfo, ...] = Field(default=(), max_length=MAX_MEMBERS)
    notice: Note = ""


class Leave(Message):
    """A trainer goes: `done` after its last round, or `failed` with the reason."""

    run: Identifier
    incarnation: Incarnation
    outcome: Literal["done", "failed"]
    round: Round = Field(default=0, description="as in `TrainerHeartbeat`")
    attempt: Ordinal | None = Field(default=None, description="as in `TrainerHeartbeat`; null: not known")
    reason: Reason = ""


class InstallRun(MembershipMessage):
    """The order to serve a run.

    `restore` is the round that the shard is restored to, None if the run begins with initial values.
    """

    run: Identifier
    attempt: Ordinal
    plan: Object
    incarnation: Incarnation = Field(description="of the pserver that is meant")
    consistency: CheckedConsistency
    nonfinite: NonfinitePolicy
    max_grad_norm: Real | None = Field(default=None, description="rounds are stepped once a get brings their norm")
    round_timeout_seconds: Number = Field(description="after which those who wait are told who is missing, and fail")
    durability: Durability = "none"
    checkpoint_rounds: Count = Field(
        default=0, description="rounds after which it writes a checkpoint of its own if none was named; 0: never"
    )
    keep_checkpoints: Positive = 2
    restore: Round | None = None
    began: ByOrdinal[Round | None] = Field(
        default={}, description="the round after which each attempt has begun; null: with initial values"
    )
    source: Identifier | None = Field(default=None, description="run whose checkpoint is restored, if it is another")
    uploader: Rank
    number: Count
    membership: Membership


class WantCheckpoint(Message):
    """The coordinator names the round after which every pserver is to write a checkpoint.

    In asynchronous modes it is a number of contributions, and every pserver's first so many are in it; if the run
    `is_over`, nobody will push any more, and each writes what it has.
    """

    run: Identifier
    round: Round
    is_over: Flag = False


class CheckpointCreated(Message):
    """There is a checkpoint of the whole model."""

    run: Identifier
    round: Round
    place: Text


class Freeze(Message):
    """The coordinator is about to change the members: from now on no barrier counts until they are installed."""

    run: Identifier
    attempt: Ordinal
    number: Count


class InstallMembers(MembershipMessage):
    """A numbered change of the membership. An older number changes nothing. `failure` ends every wait."""

    run: Identifier
    attempt: Ordinal = 0
    number: Count
    membership: Membership
    failure: Object | None = None


class PserverState(Message):
    """What a pserver tells about itself; `digest` covers values, slots, steps and the staged contributions."""

    index: PserverIndex | None
    incarnation: Incarnation | None
    run: Identifier | None
    round: Round
    members: Ordinals
    batch_barriers: Ordinals = Field(default=(), description="whose are in, of the open round")
    fetch_barriers: Ordinals = Field(default=(), description="whose are in, of the applied round")
    participants: Ordinals = Field(default=(), description="whose contributions are in the applied round")
    clocks: ByOrdinal[Round] = Field(default={}, description="asynchronous modes: completed steps of each trainer")
    missing: Ordinals
    waiting_seconds: Real
    num_blocks: Count
    shard_bytes: Count
    pushed_bytes: Count
    pulled_bytes: Count
    transports: tuple[Label, ...] = Field(max_length=100)
    digest: Label | None
    failure: Object | None


class PserverStatus(Message):
    """A pserver as the coordinator sees it."""

    index: PserverIndex
    address: BaseUrl
    http2: Flag = Field(default=True, description="whether trainers send it tensors over HTTP/2")
    incarnation: Incarnation
    round: Round
    missing: Ordinals
    waiting_seconds: Real
    heartbeat_age_seconds: Real
    software: Software | None = Field(default=None, description="null until its next heartbeat")


class TrainerStatus(Message):
    """A trainer as the coordinator sees it."""

    rank: Rank
    incarnation: Incarnation
    round: Round
    state: Literal["joined", "declared", "done", "failed", "lost"]
    heartbeat_age_seconds: Real
    metrics_address: BaseUrl | None
    results: Results
    software: Software | None = Field(default=None, description="null until its next heartbeat")
    links: ByOrdinal[Link] = Field(default={}, description="its way to each pserver, as it has measured it")
    unreachable: ByOrdinal[Real] = Field(
        default={}, description="pservers that do not answer it, and for how many seconds"
    )
    waiting_seconds: Real = Field(default=0.0, description="strategy ring: for the others, when it was last heard")
    is_done: Flag = Field(default=False, description="strategy ring: no batches are left; it accompanies the others")


class ClusterStatus(Message):
    """The answer of `gradpost status`."""

    run: Identifier
    state: RunState
    mode: Mode
    num_pservers: Count
    num_trainers: Count
    waiting_for: tuple[Note, ...] = Field(max_length=MAX_TENSORS)
    prospects: tuple[Note, ...] = Field(
        default=(), max_length=MAX_TENSORS, description="a pause; who was lost, and when the run fails"
    )
    failure: Object | None
    plan_digest: Label | None
    num_parameters: Count
    parameter_bytes: Count
    round: Round
    pservers: tuple[PserverStatus, ...] = Field(max_length=MAX_MEMBERS)
    trainers: tuple[TrainerStatus, ...] = Field(max_length=MAX_MEMBERS)
    software: Software | None = Field(default=None, description="of the coordinator")


class ShardSummary(Message):
    """One pserver's share of a run."""

    pserver: PserverIndex
    shard_bytes: Count
    pushed_bytes: Count
    pulled_bytes: Count


class RunSummary(Message):
    """A run in a few numbers, as the servers saw it; `line()` is what ends a training script's output."""

    run: Identifier
    state: RunState
    mode: Mode
    transport: Label = Field(description="HTTP versions of the data requests, as the servers saw them; or `ring`")
    num_trainers: Count
    rounds: Count
    seconds: Real
    shards: tuple[ShardSummary, ...] = Field(max_length=MAX_MEMBERS)
    results: dict[Name, Number] = Field(max_length=MAX_TENSORS)

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
    staged: Count = 0
    duplicates: Count = 0
    complete: Flag = False
    finite: Flag = Field(default=True, description="policy skip_round: whether it holds neither NaN nor infinity")


class BarrierAnswer(Message):
    """What became of a barrier: the open round and whom its batch barrier still waits for.

    `notice` says what will become of those who were lost.
    """

    round: Round
    missing: Ordinals = ()
    notice: Note = ""


class NormAnswer(Message):
    """The sum of squares of a pserver's part of a round's gradient, and a digest of whose it is made of.

    None if the round was applied without: it stepped nothing, or was restored from a disk.
    """

    contributions: Label = ""
    sum_of_squares: Number | None = None


def heartbeat_period(lease_seconds: float) -> float:
    """How often a member says that it lives: three times in a lease, and once a second at least.

    >>> heartbeat_period(1.5), heartbeat_period(10.0)
    (0.5, 1.0)
    """
    return min(lease_seconds / 3, MAX_HEARTBEAT_PERIOD_SECONDS)
