"""`gradpost tensorboard`: live event files with the trainers' results and histograms of the parameters.

DIR/RUN/trainer-0    the curves that trainer 0 reports
DIR/RUN/parameters   a histogram of each parameter, its norm, and the relative size of its newest update
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ps_protocol.errors import NotFound, TryAgain, Unreachable
from ps_protocol.vocabulary import Round
from trainer_client.client.inspection import ClusterView

from .output import CommandError, count, print_line, warn
from .status import asking

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

POLL_SECONDS = 2.0
RECONNECT_SECONDS = 60.0  # for a coordinator that has been reached before
NUM_CONCURRENT = 4  # requests, each of which may wait for the parameter's next update


def export_events(coordinator: str | None, token_file: Path | None, folder: Path, every_seconds: float) -> None:
    """Write until the run is over or Ctrl-C, with histograms every so many seconds (0: none). Raises CommandError."""
    try:
        import torch.utils.tensorboard  # noqa: F401 - fails before anything is requested or written
    except ImportError as error:
        raise CommandError(f'this needs TensorBoard: pip install "gradpost[tensorboard]" ({error})') from None
    with asking(coordinator, token_file) as view:
        files = EventFiles(folder)
        print_line(f"run {view.status().run} goes to {folder}; to see it: tensorboard --logdir {folder}", flush=True)
        try:
            with suppress(KeyboardInterrupt):
                _export(view, files, every_seconds)
        finally:
            files.close()
        points, histograms = count(files.num_points, "point"), count(files.num_histograms, "histogram")
        print_line(f"{folder}: {points} of curves and {histograms}")


def _export(view: ClusterView, files: EventFiles, every_seconds: float) -> None:
    next_histograms, reached_at, is_unreachable = time.monotonic(), time.monotonic(), False
    while True:
        try:
            is_over = view.status().state in ("finished", "failed")  # requested first, so that the curves are complete
            files.add_curves(view.curves())
            if every_seconds and (is_over or time.monotonic() >= next_histograms):
                next_histograms = time.monotonic() + every_seconds
                files.add_parameters(_read_parameters(view))
            files.flush()
            if is_over:
                return
            reached_at, is_unreachable = time.monotonic(), False
        except Unreachable as error:
            if time.monotonic() - reached_at > RECONNECT_SECONDS:
                raise
            if not is_unreachable:
                warn(f"{error}; trying again for {RECONNECT_SECONDS:g} s")
            is_unreachable = True
        time.sleep(POLL_SECONDS)


def _read_parameters(view: ClusterView) -> list[dict[str, Any]]:
    """Return the statistics of each parameter; an empty list before the run has a model."""

    def read(name: str) -> dict[str, Any] | None:
        with suppress(TryAgain, NotFound):  # members change, or another run has begun
            return view.statistics(name)
        return None

    with suppress(TryAgain), ThreadPoolExecutor(NUM_CONCURRENT) as threads:
        names = [one["name"] for one in view.parameters()["parameters"]]
        return [found for found in threads.map(read, names) if found is not None]
    return []


class EventFiles:
    """The event files in one folder. A value of an earlier round removes the values of later rounds."""

    def __init__(self, folder: Path) -> None:
        self.num_points = 0
        self.num_histograms = 0
        self._folder = folder
        self._writers: dict[Path, SummaryWriter] = {}
        self._points: dict[
            tuple[Path, str], tuple[float, Round]
        ] = {}  # newest of each curve: the coordinator's time, and the round
        self._versions: dict[tuple[Path, str], Round] = {}  # newest of each parameter

    def add_curves(self, found: dict[str, Any]) -> None:
        """Write the new points in a response of `/v1/curves`."""
        fresh = sorted(
            (at, round_, self._folder / found["run"] / f"trainer-{rank}", name, value)
            for name, by_rank in found["curves"].items()
            for rank, curve in by_rank.items()
            for round_, at, value in zip(curve["round"], curve["at"], curve["value"], strict=True)
        )
        for at, round_, place, name, value in fresh:
            newest_at, newest = self._points.get((place, name), (0.0, -1))
            if at > newest_at:
                writer = self._writer(place, round_, is_rollback=round_ < newest)
                writer.add_scalar(name, math.nan if value is None else value, round_, walltime=at)
                self._points[place, name] = at, round_
                self.num_points += 1

    def add_parameters(self, found: Sequence[dict[str, Any]]) -> None:
        """Write the new statistics in responses of `/v1/statistics`, one response for each parameter."""
        for one in sorted(found, key=lambda one: int(one["version"])):
            name, round_, place = one["name"], one["version"], self._folder / one["run"] / "parameters"
            newest = self._versions.get((place, name), -1)
            if newest == round_:
                continue
            writer = self._writer(place, round_, is_rollback=round_ < newest)
            self._versions[place, name] = round_
            writer.add_scalar(f"norm/{name}", one["norm"], round_)
            if one["update_ratio"] is not None:
                writer.add_scalar(f"update_ratio/{name}", one["update_ratio"], round_)
            if one["minimum"] is not None:  # there are finite values
                _add_histogram(writer, one)
                self.num_histograms += 1

    def flush(self) -> None:
        """Write buffered events to the files."""
        for writer in self._writers.values():
            writer.flush()

    def close(self) -> None:
        """Close the files."""
        for writer in self._writers.values():
            writer.close()

    def _writer(self, place: Path, round_: Round, *, is_rollback: bool) -> SummaryWriter:
        from torch.utils.tensorboard import SummaryWriter

        writer = self._writers.get(place)
        if writer is not None and not is_rollback:
            return writer
        if writer is not None:
            writer.close()
            for versions in (self._points, self._versions):
                for key in [key for key in versions if key[0] == place]:
                    del versions[key]  # the rollback concerns all of them, and is handled once
        # TensorBoard hides what an earlier export, or the run before its rollback, has written from this round on.
        self._writers[place] = SummaryWriter(str(place), purge_step=round_)
        return self._writers[place]


def _add_histogram(writer: SummaryWriter, one: dict[str, Any]) -> None:
    histogram = one["histogram"]
    begin, width, counts = histogram["begin"], histogram["width"], histogram["counts"]
    num_finite = sum(counts)
    writer.add_histogram_raw(
        one["name"],
        min=one["minimum"],
        max=one["maximum"],
        num=num_finite,
        sum=one["mean"] * num_finite,
        sum_squares=one["norm"] ** 2,
        bucket_limits=[begin + (i + 1) * width for i in range(len(counts))],  # TensorBoard wants the upper edges
        bucket_counts=counts,
        global_step=one["version"],
    )
