"""The reports of a process about itself, which travel with its heartbeats."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from .fields import Count, Identifier, Label, Message, Note, Rank, Real

MAX_LINE = 500  # characters of a line of output
MAX_LINES = 100  # lines of a message
MAX_KEPT_LINES = 200  # lines of a trainer that the coordinator holds
MAX_TRACEBACK = 20_000  # characters
MAX_STREAMS = 2

Amount = Annotated[Real, Field(ge=0)]


class Software(Message):
    """The software versions of a process."""

    gradpost: Label
    python: Label
    torch: Label


class ScriptInfo(Message):
    """The script of a trainer, for its readers."""

    command: Note = Field(description="command line, as the script sees it")
    run_name: Label | None = Field(default=None, description="name that the script gave to the run")
    optimizer: Note = Field(default="", description="optimizer with the hyperparameters that are not its defaults")
    total_rounds: Count | None = Field(
        default=None, description="rounds, or steps of the trainer, after which the script ends, if it is known"
    )


class ProcessFigures(Message):
    """The resources of the host that a process uses. A figure is null if the platform does not provide it.

    Seconds and bytes are totals of the process, so that a rate is the difference of two reports.
    """

    host: Label
    cpu_seconds: Amount = Field(description="CPU time; one a second is one busy core")
    resident_bytes: Count = Field(description="main memory")
    gpu_bytes: Count | None = Field(default=None, description="memory of tensors on CUDA devices; null without CUDA")
    read_bytes: Count | None = Field(default=None, description="from disks")
    written_bytes: Count | None = Field(default=None, description="to disks")
    sent_bytes: Count | None = Field(
        default=None, description="tensors sent to pservers or, by a pserver, to trainers; null in a ring"
    )
    received_bytes: Count | None = Field(default=None, description="tensors received, likewise")


Line = Annotated[str, Field(max_length=MAX_LINE)]
Traceback = Annotated[str, Field(max_length=MAX_TRACEBACK)]


class OutputLines(Message):
    """Lines of a script's output since the last answered heartbeat. `first` is the number of the first one, from 0.

    `unfinished` lines have no newline yet, such as a progress bar; each message replaces them.
    """

    first: Count = 0
    lines: tuple[Line, ...] = Field(default=(), max_length=MAX_LINES)
    unfinished: tuple[Line, ...] = Field(default=(), max_length=MAX_STREAMS)


class TrainerOutput(Message):
    """The newest lines of a trainer's output, and the traceback of the exception that ended its script."""

    run: Identifier
    rank: Rank
    lines: tuple[Line, ...] = Field(max_length=MAX_KEPT_LINES + MAX_STREAMS)
    traceback: Traceback | None = None
