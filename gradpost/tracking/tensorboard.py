"""Event files for TensorBoard.

DIR/RUN/trainer-0    the curves that trainer 0 reports
DIR/RUN/parameters   a histogram of each parameter, its norm, and the relative size of its newest update
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from ps_protocol.vocabulary import Round

from .export import PARAMETERS, TrackedRun


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

    def write_histogram(self, statistics: Mapping[str, Any]) -> bool:
        """Write a histogram with the parameter's name."""
        histogram = statistics["histogram"]
        begin, width, counts = histogram["begin"], histogram["width"], histogram["counts"]
        num_finite = sum(counts)
        self._writers[PARAMETERS].add_histogram_raw(
            statistics["name"],
            min=statistics["minimum"],
            max=statistics["maximum"],
            num=num_finite,
            sum=statistics["mean"] * num_finite,
            sum_squares=statistics["norm"] ** 2,
            bucket_limits=[begin + (i + 1) * width for i in range(len(counts))],  # TensorBoard wants the upper edges
            bucket_counts=counts,
            global_step=statistics["version"],
        )
        return True

    def flush(self) -> None:
        """Write buffered events to the files."""
        for writer in self._writers.values():
            writer.flush()

    def close(self, *, is_failed: bool) -> None:
        """Close the files."""
        for writer in self._writers.values():
            writer.close()
