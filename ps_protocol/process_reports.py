"""The reports of a process about itself, which travel with its heartbeats."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from .fields import Count, Label, Message, Note, Real

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
