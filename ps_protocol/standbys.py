"""The messages of standbys: processes that follow a pserver and repeat its updates. A standby is no member of a run."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .fields import (
    MAX_MEMBERS,
    BaseUrl,
    Count,
    Flag,
    Identifier,
    Incarnation,
    Instance,
    Label,
    Message,
    Number,
    Ordinal,
    ProcessFigures,
    Protocol,
    PserverIndex,
    Real,
    Round,
    Software,
)
from .membership import InstallRun

Instances = Annotated[tuple[Instance, ...], Field(max_length=MAX_MEMBERS)]


class ReportStandby(Message):
    """The registration of a standby, and its heartbeat. `instance` is a random id of the process.

    The lag is the updates of the leader that the replica has not applied. `lost` is the incarnation of the pserver
    that does not answer its requests for updates; 0: none.
    """

    protocol: Protocol
    instance: Instance
    address: BaseUrl = Field(description="base URL under which others read the replica")
    is_stopping: Flag = False
    lost: Incarnation = 0
    follows: PserverIndex
    run: Identifier | None = Field(default=None, description="run of the replica; null: there is none yet")
    attempt: Ordinal = 0
    round: Round = 0
    lag_rounds: Count = 0
    lag_seconds: Real = Field(default=0.0, description="time since the leader reported the first missing round")
    software: Software | None = None
    process: ProcessFigures | None = None


class StandbyAnswer(Message):
    """The pserver to follow, and the lease of the standby.

    `leader` is null while no living pserver serves the run. Then `incarnation` is that of a lost pserver that had been
    promoted, whose folder is the newest, or 0. `round` is the newest one that the leader has reported.
    `stop` asks a standby with --exit-when-done to exit with `exit_code`.
    """

    lease_seconds: Number
    leader: BaseUrl | None = None
    incarnation: Incarnation = 0
    run: Identifier | None = None
    attempt: Ordinal = 0
    round: Round = 0
    is_joining: Flag = Field(
        default=False, description="durability `replicated`: the standby is not in sync yet, and is ready once it is"
    )
    stop: Flag = False
    exit_code: Count = 0


class StandbyStatus(ReportStandby):
    """A standby as the coordinator knows it."""

    heartbeat_age_seconds: Real
    role: Literal["following", "joining", "in_sync"] = Field(
        default="following",
        description="durability `replicated`: the pserver waits for a standby that is `joining`, and one that is "
        "`in_sync` may replace it",
    )


class SeenStandbys(Message):
    """The standbys of a pserver with durability `replicated`, as it sees them: a part of its heartbeat."""

    number: Count = Field(description="number of the newest `RequiredStandbys` that the pserver has received")
    connected: Instances = Field(description="standbys that ask for updates, and confirm them in time")
    caught_up: Instances = Field(description="required standbys that hold every acknowledged update")


class FenceStandby(Message):
    """The request to confirm no update of this incarnation of the pserver, or an earlier one, from now on."""

    run: Identifier
    attempt: Ordinal
    incarnation: Incarnation


class PserverEnded(Message):
    """The report of a supervisor that the process of a pserver at an address has ended."""

    address: BaseUrl


class ServedRun(Message):
    """The run that a pserver serves, with its newest membership, and the versions that decide about its bits."""

    installed: InstallRun
    torch: Label
    cpu: Label = Field(description="`torch.backends.cpu.get_cpu_capability()`")
