"""Control messages: small JSON bodies between trainers, pservers and the coordinator.

Unknown members are refused, so that a misspelt one is noticed.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .consistency import Consistency
from .fields import (
    MAX_MEMBERS,
    MAX_TENSORS,
    BaseUrl,
    ByOrdinal,
    Count,
    Flag,
    Identifier,
    Incarnation,
    Instance,
    Integer,
    Label,
    LocalName,
    Means,
    Message,
    Name,
    Note,
    Number,
    Object,
    Ordinal,
    Ordinals,
    OriginUrl,
    Positive,
    ProcessFigures,
    Protocol,
    PserverIndex,
    Rank,
    Real,
    Reason,
    Results,
    Round,
    ScriptInfo,
    Software,
    Text,
)
from .membership import Plan, RequiredStandbys
from .standbys import SeenStandbys, StandbyStatus
from .vocabulary import MAX_DIMENSIONS, Mode, NonfinitePolicy
from .wire_types import PullType, PushType

PROGRESS = "loss"  # the result that measures training progress

Shape = Annotated[tuple[Integer, ...], Field(max_length=MAX_DIMENSIONS)]

RunState = Literal["gathering", "training", "finished", "failed"]


class ShardFile(Message):
    """A shard's file of a checkpoint; `digest` is the XXH3-128 of its bytes, in hex."""

    pserver: PserverIndex
    name: Label
    num_bytes: Count
    digest: Label
    round: Round
    attempt: Ordinal
    torch: Label
    cpu: Label
    steps: ByOrdinal[Round] = Field(
        default={}, description="asynchronous modes: the newest contained step of each rank"
    )


class PserverHeartbeat(Message):
    """The heartbeat of a pserver: its run, its progress and its work.

    Bytes are counted since the pserver installed this attempt of the run; applies, waits and updates since its process
    began. Sums of seconds belong to the count beside them.
    """

    incarnation: Incarnation
    run: Identifier | None
    attempt: Ordinal = 0
    round: Round = Field(description="newest applied round; in asynchronous modes the number of applied contributions")
    missing: Ordinals = Field(default=(), description="trainers that the open batch barrier waits for")
    waiting_seconds: Real = 0.0
    failure: Object | None = Field(default=None, description="the failure of the run on this pserver")
    published: ShardFile | None = Field(
        default=None, description="the newest shard that this incarnation has published in this attempt"
    )
    coming_checkpoints: Ordinals = Field(default=(), description="named rounds whose shard is not published yet")
    is_stopping: Flag = Field(
        default=False, description="whether the pserver persists its state, exits, and will return"
    )
    is_stalled: Flag = Field(
        default=False, description="whether an update takes longer to be logged and stepped than a working disk needs"
    )
    is_log_long: Flag = Field(
        default=False, description="whether the log has reached half of `InstallRun.max_log_bytes`"
    )
    standbys: SeenStandbys | None = None
    # for inspection only
    batch_barriers: Ordinals = Field(
        default=(), description="trainers whose batch barrier of the open round is complete"
    )
    fetch_barriers: Ordinals = Field(default=(), description="trainers that have read the applied round")
    participants: Ordinals = Field(default=(), description="trainers in the newest applied round")
    clocks: ByOrdinal[Round] = Field(default={}, description="asynchronous modes: completed steps of each trainer")
    num_blocks: Count = 0
    shard_bytes: Count = 0
    pushed_bytes: Count = 0
    pulled_bytes: Count = 0
    num_queued: Count = Field(default=0, description="gradients in the queues of blocks")
    num_applies: Count = 0
    apply_seconds: Real = 0.0
    num_waits: Count = 0
    wait_seconds: Real = Field(
        default=0.0, description="total time from the first trainer's batch barrier of a round to the last trainer's"
    )
    staleness: ByOrdinal[Count] = Field(
        default={},
        description="asynchronous modes: updates by the binary length of their staleness: 0, 1, 2 to 3, …",
    )
    software: Software | None = None
    process: ProcessFigures | None = None


class PserverHeartbeatReply(Message):
    """The answer to a pserver's heartbeat.

    `stop` asks a pserver with --exit-when-done to exit with `exit_code`. `complete` lists the rounds with a
    checkpoint of the whole model, newest first. `notice` is for trainers that wait.
    """

    complete: Ordinals = ()
    notice: Note = ""
    stop: Flag = False
    exit_code: Count = 0
    required: RequiredStandbys = RequiredStandbys()


class PserverInfo(Message):
    """One pserver as trainers need it."""

    index: PserverIndex
    address: BaseUrl
    incarnation: Incarnation
    http2: Flag
    local: LocalName | None = Field(
        default=None, description="abstract Unix socket, which is tried first if `address` is without TLS"
    )


class JoinTrainer(Message):
    """The request of a trainer to join. The coordinator decides what is None."""

    protocol: Protocol
    instance: Instance
    rank: Rank | None = None
    world_size: Positive | None = None
    expects: dict[Label, Label | Integer | Real | Flag] = Field(
        default_factory=dict, max_length=100, description="the mode settings that the trainer expects"
    )
    metrics_address: OriginUrl | None = Field(
        default=None,
        description="scheme, host and port at which the trainer serves `/metrics`; a host other than the join's sender "
        "is ignored, unless the coordinator has it in `allowed_hosts`",
    )


class TrainerJoined(Message):
    """The place of a trainer in the run."""

    run: Identifier
    rank: Rank
    world_size: Count
    incarnation: Incarnation
    consistency: Consistency
    lease_seconds: Number
    round_timeout_seconds: Number


class DeclareModel(Message):
    """The model of a trainer, which must be the same for all trainers of a run.

    `parameters` are (name, shape, dtype, group), `buffers` (name, shape, dtype). A setting that is None is the
    coordinator's.
    """

    run: Identifier
    incarnation: Incarnation
    parameters: tuple[tuple[Name, Shape, Label, Integer], ...] = Field(max_length=MAX_TENSORS)
    buffers: tuple[tuple[Name, Shape, Label], ...] = Field(default=(), max_length=MAX_TENSORS)
    sparse: tuple[Name, ...] = Field(
        default=(), max_length=MAX_TENSORS, description="the parameters whose gradients name the rows that they touch"
    )
    optimizer: Label
    group_flags: tuple[Annotated[dict[Label, Flag], Field(max_length=100)], ...] = Field(max_length=MAX_MEMBERS)
    members: tuple[tuple[Label, Label, Positive], ...] = Field(
        default=(), max_length=MAX_MEMBERS, description="several optimizers: name, class name and number of groups"
    )
    nonfinite: NonfinitePolicy | None = None
    push_type: PushType | None = Field(default=None, description="type of gradients on the wire")
    pull_type: PullType | None = Field(default=None, description="type of values on the wire to trainers")
    local_steps: Count = Field(default=0, description="steps of the trainers' own optimizers between pushes")
    max_grad_norm: Real | None = Field(
        default=None, gt=0, allow_inf_nan=False, description="norm to which the aggregated gradient is clipped"
    )
    aliases: dict[Name, Name] = Field(
        default={}, max_length=MAX_TENSORS, description="further names of tied tensors, for exported models"
    )
    rendezvous: Text | None = Field(
        default=None, max_length=300, description="strategy ring, rank 0: the rendezvous of the trainers"
    )


class PlanReady(Message):
    """The start of a complete run. `uploader` pushes the initial values."""

    run: Identifier
    attempt: Ordinal
    plan: Plan
    digest: Identifier = Field(description="digest of the plan, for the fence")
    pservers: tuple[PserverInfo, ...] = Field(max_length=MAX_MEMBERS)
    uploader: Rank
    start: Round = Field(default=1, description="the first round, or step, that this trainer pushes for")
    nonfinite: NonfinitePolicy = Field(default="reject", description="treatment of a gradient with NaN or infinity")
    rendezvous: Text | None = Field(
        default=None, max_length=300, description="strategy ring: the rendezvous that rank 0 declared"
    )
    max_grad_norm: Real | None = Field(
        default=None, description="norm to clip to: gets carry the global norm of the gradient"
    )


class TrainerHeartbeat(Message):
    """The heartbeat of a trainer; `results` are its newest reported numbers (loss, accuracy)."""

    run: Identifier
    incarnation: Incarnation
    round: Round = Field(
        description="the newest round whose version this trainer has received from every pserver, 0 before the first; "
        "in asynchronous modes the newest step of this trainer whose parameters it has received"
    )
    results: Results = Field(default_factory=dict)
    software: Software | None = None
    script: ScriptInfo | None = None
    process: ProcessFigures | None = None
    waiting_seconds: Real = Field(
        default=0.0,
        ge=0,
        description="strategy ring: time for which the trainer has waited for the others; 0: it does not wait",
    )
    is_done: Flag = Field(
        default=False,
        description="strategy ring: whether the trainer has no batches left and joins the others' collectives",
    )
    means: Means | None = Field(
        default=None,
        description="means of the values that were reported since the last answered heartbeat; null: of `results`",
    )
    attempt: Ordinal = Field(default=0, description="attempt that `round` belongs to")
    unreachable: ByOrdinal[tuple[Incarnation, Real]] = Field(
        default={}, description="pservers that do not answer this trainer: incarnation and seconds"
    )
    ahead_of: ByOrdinal[Incarnation] = Field(
        default={},
        description="pservers, with their incarnation, that have lost a round which this trainer has received",
    )


class TrainerHeartbeatReply(Message):
    """The state of the run; `failure` is the problem document of a failed one.

    A rollback raises `attempt`, and `resume` is its round (the version to pull). `pservers` hold the run.
    """

    state: RunState
    failure: Object | None = None
    attempt: Ordinal = 0
    resume: Round = 0
    uploader: Rank | None = Field(default=None, description="the trainer that pushes initial values again, if any")
    pservers: tuple[PserverInfo, ...] = Field(default=(), max_length=MAX_MEMBERS)
    notice: Note = ""


class Leave(Message):
    """The end of a trainer: `done` after its last round, or `failed` with the reason."""

    run: Identifier
    incarnation: Incarnation
    outcome: Literal["done", "failed"]
    round: Round = Field(default=0, description="the newest received round, as in `TrainerHeartbeat`")
    attempt: Ordinal | None = Field(default=None, description="attempt that `round` belongs to; null: not known")
    reason: Reason = ""
    code: Label | None = Field(
        default=None, description="code of the error that the trainer failed with, if it has one"
    )


class CheckpointCreated(Message):
    """A complete checkpoint of the whole model."""

    run: Identifier
    round: Round
    place: Text


class PserverState(PserverHeartbeat):
    """The heartbeat of a pserver, or of a standby, now, with what only its readers need.

    `digest` covers values, slots, steps and the staged contributions.
    """

    index: PserverIndex | None
    members: Ordinals = ()
    transports: tuple[Label, ...] = Field(default=(), max_length=100)
    digest: Label | None = None
    leader: BaseUrl | None = Field(default=None, description="of a standby: the pserver that it follows")


class PserverStatus(Message):
    """A pserver as the coordinator knows it, with its newest heartbeat."""

    index: PserverIndex
    address: BaseUrl
    http2: Flag = Field(default=True, description="whether trainers send tensors to the pserver over HTTP/2")
    heartbeat_age_seconds: Real
    heartbeat: PserverHeartbeat


class TrainerStatus(Message):
    """A trainer as the coordinator knows it, with its newest heartbeat."""

    rank: Rank
    state: Literal["joined", "declared", "done", "failed", "lost"]
    metrics_address: BaseUrl | None
    heartbeat_age_seconds: Real
    heartbeat: TrainerHeartbeat


class ClusterStatus(Message):
    """The state of the cluster at one moment: what the dashboard and `gradpost status` show.

    A rate is the difference of two answers.
    """

    at: Real = Field(description="time of the answer, in seconds since 1970, by the coordinator's clock")
    run: Identifier
    attempt: Ordinal
    state: RunState
    mode: Mode
    num_pservers: Count
    num_trainers: Count
    waiting_for: tuple[Note, ...] = Field(max_length=MAX_TENSORS)
    is_paused: bool = False
    overrides: tuple[Note, ...] = Field(
        default=(), max_length=MAX_TENSORS, description="learning rates and frozen parameters that an administrator set"
    )
    elapsed_seconds: Real | None = Field(default=None, description="time since the training began, until its end")
    prospects: tuple[Note, ...] = Field(
        default=(), max_length=MAX_TENSORS, description="lost members and the time when the run fails"
    )
    failure: Object | None
    plan_digest: Label | None
    num_parameters: Count
    parameter_bytes: Count
    round: Round
    pservers: tuple[PserverStatus, ...] = Field(max_length=MAX_MEMBERS)
    trainers: tuple[TrainerStatus, ...] = Field(max_length=MAX_MEMBERS)
    standbys: tuple[StandbyStatus, ...] = Field(default=(), max_length=MAX_MEMBERS)
    software: Software | None = Field(default=None, description="software versions of the coordinator")
    process: ProcessFigures | None = Field(default=None, description="figures of the coordinator")


class RunSummary(Message):
    """A run in a few numbers; `line()` is the last line of a training script's output."""

    run: Identifier
    state: RunState
    is_stopped: Flag = Field(default=False, description="whether an administrator ended the run")
    mode: Mode
    transport: Label = Field(description="HTTP versions of the data requests, as the servers saw them; or `ring`")
    num_trainers: Count
    rounds: Count
    earlier_rounds: Count = Field(default=0, description="rounds before the run was resumed, which `seconds` excludes")
    seconds: Real
    shards: tuple[PserverState, ...] = Field(max_length=MAX_MEMBERS, description="the pservers that answered")
    results: dict[Name, Number] = Field(max_length=MAX_TENSORS)
    warning: Reason = Field(default="", description="trainers that left before the last round, if there are any")

    @property
    def new_rounds(self) -> int:
        """The rounds since the run was started or resumed."""
        return max(0, self.rounds - self.earlier_rounds)

    def line(self, outcome: str | None = None) -> str:
        """`trained: mode=sync transport=HTTP/2 accuracy=0.98 rounds=120 seconds=8.1`.

        By default the state decides on the outcome. The line of a resumed run has `new_rounds=` before the seconds. The
        warning follows, if there is one.
        """
        final = (item for item in sorted(self.results.items()) if item[0] != PROGRESS)
        results = "".join(f" {key}={value:.4g}" for key, value in final)
        outcome = outcome or ("failed" if self.state == "failed" else "stopped" if self.is_stopped else "trained")
        new_rounds = f" new_rounds={self.new_rounds}" if self.earlier_rounds else ""
        return (
            f"{outcome}: mode={self.mode} transport={self.transport}{results} "
            f"rounds={self.rounds}{new_rounds} seconds={self.seconds:.1f}{self.warning and f'; {self.warning}'}"
        )
