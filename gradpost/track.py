"""`gradpost tensorboard`, `mlflow` and `wandb`: the curves of a run, from the coordinator's API to a tracker."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ps_protocol.errors import NotFound, Unreachable
from ps_protocol.messages import ClusterStatus
from ps_protocol.routes import CURVES
from ps_protocol.vocabulary import Round
from services.coordinator.history import RunHistory
from trainer_client.client.inspection import ClusterView, Object

from .output import EXIT_FAILED, CommandError, count, print_line, warn
from .runs import asking, history_folder, named_root

POLL_SECONDS = 2.0
RECONNECT_SECONDS = 60.0  # for a coordinator that has been reached before
MAX_METRICS = 1000  # of one request, see MLflow's REST API
_SETTINGS = {"mode", "num_pservers", "num_trainers"}  # that trackers show


class Point(NamedTuple):
    """A value that the coordinator received from a trainer `at` a time, in seconds since 1970."""

    at: float
    source: str  # `trainer-0`, …
    round: Round
    name: str
    value: float

    def metric(self, run: ClusterStatus) -> str:
        """Return the name in a tracker in which all trainers share one list of names."""
        return self.name if run.num_trainers == 1 else f"{self.source}/{self.name}"


class Tracker(Protocol):
    """An open run of a tracker."""

    def write(self, points: list[Point]) -> None:
        """Write points, in the order of their times."""

    def end(self, *, is_failed: bool) -> None:
        """End the run."""


class EventFiles:
    """Event files for TensorBoard: DIR/RUN/trainer-0 and so on."""

    def __init__(self, folder: Path, run: ClusterStatus) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._folder, self._open = folder / run.run, SummaryWriter
        self._writers: dict[str, SummaryWriter] = {}

    def write(self, points: list[Point]) -> None:
        """Write one scalar for each point. The first round of a file hides what an earlier command has written."""
        for point in points:
            if point.source not in self._writers:
                self._writers[point.source] = self._open(str(self._folder / point.source), purge_step=point.round)
            self._writers[point.source].add_scalar(point.name, point.value, point.round, walltime=point.at)
        for writer in self._writers.values():
            writer.flush()

    def end(self, *, is_failed: bool) -> None:
        """Close the files."""
        for writer in self._writers.values():
            writer.close()


class MlflowRun:
    """A run of MLflow: the settings are its parameters, and a round is a step of its metrics."""

    def __init__(self, tracking_uri: str, experiment: str, run: ClusterStatus) -> None:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # newer versions refuse the file store without it
        import mlflow

        self._run, self._mlflow, self._client = run, mlflow, mlflow.MlflowClient(tracking_uri)
        found = self._client.get_experiment_by_name(experiment)
        experiment_id = found.experiment_id if found else self._client.create_experiment(experiment)
        self._id = self._client.create_run(experiment_id, run_name=run.run).info.run_id
        for name, value in run.model_dump(include=_SETTINGS).items():
            self._client.log_param(self._id, name, value)

    def write(self, points: list[Point]) -> None:
        """Log one metric for each point. A character that MLflow does not allow in its name becomes `_`."""
        metrics = []
        for point in points:
            name = re.sub(r"[^\w./ -]", "_", point.metric(self._run))
            metrics.append(self._mlflow.entities.Metric(name, point.value, int(point.at * 1000), point.round))
        for i in range(0, len(metrics), MAX_METRICS):
            self._client.log_batch(self._id, metrics[i : i + MAX_METRICS])

    def end(self, *, is_failed: bool) -> None:
        """End MLflow's run."""
        self._client.set_terminated(self._id, "FAILED" if is_failed else "FINISHED")


class WandbRun:
    """A run of W&B, uploaded or, with WANDB_MODE=offline, in local files. `round` is the x axis of its charts."""

    def __init__(self, project: str, run: ClusterStatus) -> None:
        import wandb

        # W&B would add the console and the load of this process, which does not train.
        settings, config = wandb.Settings(console="off", x_disable_stats=True), run.model_dump(include=_SETTINGS)
        self._run, self._wandb = run, wandb.init(project=project, name=run.run, config=config, settings=settings)
        self._wandb.define_metric("round")
        self._wandb.define_metric("*", step_metric="round")

    def write(self, points: list[Point]) -> None:
        """Write one row for each point."""
        for point in points:
            row = {point.metric(self._run): point.value, "round": point.round, "_timestamp": point.at}
            self._wandb.log(row)

    def end(self, *, is_failed: bool) -> None:
        """End W&B's run, after it is written or uploaded."""
        self._wandb.finish(exit_code=int(is_failed))


def track_run(
    coordinator: str | None,
    token_file: Path | None,
    package: str,
    place: str,
    open_run: Callable[[ClusterStatus], Tracker],
) -> None:
    """Write the curves of the current run until it is over or Ctrl-C. Raises CommandError."""
    with asking(coordinator, token_file) as view:
        status = view.status()
        try:
            tracker = open_run(status)
            print_line(f"run {status.run} goes to {place}", flush=True)
            num_points = _follow(view, status, tracker)
        except ImportError as error:
            raise CommandError(f"this needs {package}: pip install '.[{package}]' ({error})") from None
        except Exception as error:
            if type(error).__module__.partition(".")[0] != package:
                raise
            advice = ". To write local files instead, set WANDB_MODE=offline" if package == "wandb" else ""
            text = f"{package} refuses the run: {str(error).rstrip('.')}{advice}"
            raise CommandError(text, exit_code=EXIT_FAILED) from None
    print_line(count(num_points, "point") + " of curves")


def _follow(view: ClusterView, status: ClusterStatus, tracker: Tracker) -> int:
    """Write points until the run is over, and return their number."""
    run, num_points, newest = status.run, 0, dict[str, float]()
    reached_at, is_over = time.time(), False
    try:
        while not is_over:
            asked_at = time.time()
            try:
                status = view.status()  # before the curves, so that those are complete
                found = view.get(Object, CURVES)
                reached_at = asked_at
            except Unreachable as error:
                if (ended := _find_end(run, reached_at)) is not None:
                    status, found = ended
                elif asked_at - reached_at > RECONNECT_SECONDS:
                    raise
                else:
                    warn(f"{error}; trying again for {RECONNECT_SECONDS:g} s")
                    time.sleep(POLL_SECONDS)
                    continue
            points = find_new_points(found, newest) if found["run"] == run else []
            tracker.write(points)
            num_points += len(points)
            is_over = status.run != run or status.state in ("finished", "failed")
            time.sleep(0 if is_over else POLL_SECONDS)
    except KeyboardInterrupt:
        pass
    finally:
        tracker.end(is_failed=status.run == run and status.state == "failed")
    return num_points


def _find_end(run: str, after: float) -> tuple[ClusterStatus, dict[str, Any]] | None:
    """Return status and curves of a run of `up` in this folder that ended `after` a time, in seconds since 1970."""
    with suppress(NotFound):
        record = RunHistory(history_folder(named_root())).read(run)
        if record.ended_at >= after:  # otherwise it is of the run before it was resumed
            return record.status, record.curves.model_dump()
    return None


def find_new_points(found: Mapping[str, Any], newest: dict[str, float]) -> list[Point]:
    """Return the points in an answer of `/v1/curves` after the `newest` time of their source, which this updates."""
    points = sorted(
        Point(at, f"trainer-{rank}", round_, name, math.nan if value is None else value)
        for name, by_rank in found["curves"].items()
        for rank, curve in by_rank.items()
        for round_, at, value in zip(curve["round"], curve["at"], curve["value"], strict=True)
        if at > newest.get(f"trainer-{rank}", 0.0)
    )
    newest |= {point.source: point.at for point in points}
    return points
