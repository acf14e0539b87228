"""Facts of a process that its heartbeats carry for people; the state of the run does not depend on them."""

from __future__ import annotations

from pydantic import Field

from .fields import Count, Flag, Label, Message, Note, Real


class Software(Message):
    """The software versions of a process."""

    gradpost: Label
    python: Label
    torch: Label


class ScriptInfo(Message):
    """The script of a trainer, for its readers."""

    command: Note = Field(description="command line, as the script sees it")
    host: Label = Field(description="name of the host")
    run_name: Label | None = Field(default=None, description="name that the script gave to the run")
    optimizer: Note = Field(default="", description="optimizer with the hyperparameters that are not its defaults")
    total_rounds: Count | None = Field(
        default=None, description="rounds, or steps of the trainer, after which the script ends, if it is known"
    )


class Traffic(Message):
    """The recent traffic between a trainer and a pserver in one direction, with the seconds of transfer."""

    num_requests: Count = 0
    num_bytes: Count = 0
    seconds: Real = 0.0


class Link(Message):
    """A trainer's connection to one pserver, as the trainer measured it.

    A push lasts until it is acknowledged, which in asynchronous modes may include waiting for a queue. A pull lasts
    from the first byte of the answer to its last.
    """

    is_local: Flag = Field(default=False, description="whether the connection is a Unix socket, on the same host")
    round_trip_seconds: Real | None = Field(
        default=None, description="round-trip time of a small request after connecting"
    )
    pushes: Traffic = Traffic()
    pulls: Traffic = Traffic()
