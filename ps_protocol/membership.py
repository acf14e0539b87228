"""The membership of a run: its trainers, the contributions to its open rounds, and what an administrator has set.

The coordinator decides it as one value, persists it, and installs it on all pservers under a number, so that every
pserver applies a change from the same round on. The messages that register pservers and install runs follow it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

from pydantic import Field, PlainSerializer, PlainValidator, WithJsonSchema

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
    LocalName,
    Message,
    Name,
    Number,
    Object,
    Ordinal,
    Ordinals,
    Positive,
    Protocol,
    PserverIndex,
    Rank,
    Real,
    Round,
)
from .optimizers import HyperParameters
from .plan import SlicePlan
from .vocabulary import Durability, NonfinitePolicy

Plan = Annotated[
    SlicePlan,
    PlainValidator(lambda given: given if isinstance(given, SlicePlan) else SlicePlan.from_json(given)),
    PlainSerializer(lambda plan: plan.as_json),
    WithJsonSchema({"type": "object", "maxProperties": 100}),
]


class Controls(Message):
    """The settings of an administrator from round `since` on, until the controls of a later round."""

    since: Round = 0
    rates: ByOrdinal[Real] = Field(default={}, description="learning rate by parameter group")
    frozen: tuple[Name, ...] = Field(
        default=(), max_length=MAX_TENSORS, description="parameters that are not stepped, as if without a gradient"
    )
    is_paused: Flag = Field(default=False, description="whether this round and later rounds are not applied")

    def override_rates(self, groups: list[HyperParameters]) -> list[HyperParameters]:
        """Return pushed hyperparameters with the learning rates that these controls set.

        >>> Controls(rates={1: 0.5}).override_rates([{"lr": 0.1}, {"lr": 0.2, "eps": 1e-8}])
        [{'lr': 0.1}, {'lr': 0.5, 'eps': 1e-08}]
        """
        if not self.rates:
            return groups
        rates = self.rates
        return [{**group, "lr": rates[index]} if index in rates else group for index, group in enumerate(groups)]


NO_CONTROLS = Controls()


@dataclass(frozen=True, slots=True)
class Membership:
    """The trainers that take part in a run, as it was decided last.

    Attributes:
        members: the incarnation of each trainer.
        starts: the first round of each trainer that did not begin with round 1.
        sets: for open rounds, the trainers whose contributions are applied, if these are not all started members.
        verdicts: for open rounds, the trainers in `sets` whose gradients hold NaN or infinity.
        controls: what an administrator has set, oldest first.

    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    members: ByOrdinal[Incarnation]
    starts: ByOrdinal[Round] = field(default_factory=dict)
    sets: ByOrdinal[Ordinals] = field(default_factory=dict)
    verdicts: ByOrdinal[Ordinals] = field(default_factory=dict)
    controls: Annotated[tuple[Controls, ...], Field(max_length=MAX_MEMBERS)] = ()

    def has_claim(self, rank: Rank, round_: Round) -> bool:
        """Return whether the trainer's contribution belongs to this round."""
        if round_ in self.sets:
            return rank in self.sets[round_]
        return rank in self.members and self.starts.get(rank, 1) <= round_

    def ranks(self) -> set[Rank]:
        """Return the members and all ranks in `sets`."""
        return set(self.members).union(*self.sets.values())

    @property
    def newest_controls(self) -> Controls:
        return self.controls[-1] if self.controls else NO_CONTROLS

    def controls_at(self, round_: Round) -> Controls:
        """Return the controls of a round.

        >>> Membership({}, controls=(Controls(since=3, is_paused=True), Controls(since=7))).controls_at(6).is_paused
        True
        """
        return next((controls for controls in reversed(self.controls) if controls.since <= round_), NO_CONTROLS)

    def with_controls(self, after: Controls, first: Round) -> Membership:
        """Return the membership once `after` is set, with the controls that rounds from `first` on may still need.

        `after` begins with a round that no pserver has applied. It replaces controls that begin with it or later.

        >>> before = Membership({}, controls=(Controls(since=1), Controls(since=4), Controls(since=9)))
        >>> [controls.since for controls in before.with_controls(Controls(since=8), first=6).controls]
        [4, 8]
        """
        older = [controls for controls in self.controls if controls.since < after.since]
        needed = [c for c, later in zip(older, [*older[1:], after], strict=False) if later.since > first]
        return replace(self, controls=(*needed, after))


class FrozenRounds(Message):
    """The rounds of a frozen pserver: the newest applied one, and the contributions to the rounds after it.

    Each mapping lists trainers by round: `participants` of the newest applied rounds; `complete`, whose whole
    contribution is here; `counted`, whose batch barrier is here; `verdicts`, whose gradient holds NaN or infinity.
    """

    applied: Round
    is_short: Flag = Field(default=False, description="whether later rounds were logged that cannot be read")
    is_readable: Flag = Field(default=True, description="whether the initial values are complete")
    participants: ByOrdinal[Ordinals] = Field(default={})
    complete: ByOrdinal[Ordinals] = Field(default={})
    counted: ByOrdinal[Ordinals] = Field(default={})
    verdicts: ByOrdinal[Ordinals] = Field(default={})
    opens: ByOrdinal[Round] = Field(default={}, description="asynchronous modes: the next step of each trainer")


class HeldRun(Message):
    """The run that a pserver found in its folder, as far as it can be restored."""

    run: Identifier
    attempt: Ordinal
    plan: Identifier = Field(description="digest of the slice plan")
    rounds: FrozenRounds
    has_rebooted: Flag = Field(
        default=False, description="whether its machine was booted since, so that the end of its log may be lost"
    )


class RegisterPserver(Message):
    """The registration of a pserver.

    `instance` is a random id of the process, so that a repeated request gets the same answer.
    """

    protocol: Protocol
    instance: Instance
    address: BaseUrl = Field(description="base URL under which trainers reach the pserver")
    http2: Flag = Field(description="whether trainers send tensors over HTTP/2, with prior knowledge")
    local: LocalName | None = Field(default=None, description="abstract Unix socket for trainers on its host")
    index: PserverIndex | None = Field(default=None, description="requested index; null: the coordinator chooses")
    previous: Incarnation = Field(
        default=0, description="the previous incarnation, whose folder the pserver has locked"
    )
    held: HeldRun | None = None


class PserverRegistered(Message):
    """The identity of the pserver, and its lease."""

    index: PserverIndex
    incarnation: Incarnation
    lease_seconds: Number


class Freeze(Message):
    """The announcement of a change of members: no barrier counts until it is installed."""

    run: Identifier
    attempt: Ordinal
    number: Count


class RequiredStandbys(Message):
    """The standbys that must hold an update before their pserver acknowledges it, with durability `replicated`."""

    number: Count = Field(default=0, description="of the newest change of the set; a set with a lower number is late")
    instances: tuple[Instance, ...] = Field(default=(), max_length=MAX_MEMBERS)


class InstallRun(Message):
    """The order to serve a run.

    `restore` is the round that the shard is restored to, None if the run begins with initial values.
    """

    run: Identifier
    attempt: Ordinal
    plan: Plan
    incarnation: Incarnation = Field(description="incarnation of the addressed pserver")
    membership: Membership
    consistency: Consistency
    nonfinite: NonfinitePolicy
    max_grad_norm: Real | None = Field(
        default=None, description="norm to clip to: a round is applied once a get carries its norm"
    )
    patience_seconds: Number = Field(
        description="time after which waiting requests fail: the sum of round time-out, rejoin time-out and lease"
    )
    durability: Durability = "none"
    checkpoint_rounds: Count = Field(
        default=0,
        description="number of rounds after which the pserver writes a snapshot if none was named; 0: never",
    )
    max_log_bytes: Count = Field(
        default=0,
        description="bytes of a log with rows of sparse parameters after which it also writes one; 0: any number",
    )
    keep_checkpoints: Positive = 2
    restore: Round | None = None
    began: ByOrdinal[Round | None] = Field(
        default={}, description="the round that each attempt began with; null: initial values"
    )
    source: Identifier | None = Field(
        default=None, description="run whose checkpoint is restored, if that is another run"
    )
    uploader: Rank
    number: Count
    required: RequiredStandbys = RequiredStandbys()


class InstallMembers(Message):
    """A numbered change of the membership. An older number changes nothing. `failure` ends every wait."""

    run: Identifier
    attempt: Ordinal
    number: Count
    membership: Membership
    failure: Object | None = None


class WantCheckpoint(Message):
    """The round after which every pserver must publish its shard.

    In asynchronous modes it is a number of contributions, and the checkpoint holds each pserver's first so many. If the
    run `is_over`, nothing more is pushed, and each pserver publishes its current state.
    """

    run: Identifier
    round: Round
    is_over: Flag = False
