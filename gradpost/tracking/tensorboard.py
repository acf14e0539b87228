"""Event files for TensorBoard.

DIR/RUN/trainer-0    the curves that trainer 0 reports
DIR/RUN/parameters   the norm of each parameter, and the relative size of its newest update
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from ps_protocol.vocabulary import Round

from .export import TrackedRun


class EventFiles:
    """The event files of a run in one folder, which has a subfolder for each source."""

    def __init__(self, folder: Path, run: TrackedRun) -> None:
        self._folder = folder / run.name
        self._writers: dict[str, SummaryWriter] = {}

    def discard(self, source: str, round_: Round) -> None:
        """Begin a file, which hides what an earlier export, or the run before its rollback, has written."""
        if source in self._writers:
            self._writers[source].close()
        self._writers[source] = SummaryWriter(str(self._folder / source), purge_step=round_)

    def write_values(self, source: str, round_: Round, at: float, values: Mapping[str, float]) -> None:
        """Write one scalar for each value."""
        for name, value in values.items():
            self._writers[source].add_scalar(name, value, round_, walltime=at)

    def flush(self) -> None:
        """Write buffered events to the files."""
        for writer in self._writers.values():
            writer.flush()

    def close(self, *, is_failed: bool) -> None:
        """Close the files."""
        for writer in self._writers.values():
            writer.close()
