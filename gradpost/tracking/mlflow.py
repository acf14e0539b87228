"""A run of MLflow, in its file store or on a server."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from ps_protocol.vocabulary import Round

from .export import TrackedRun

MAX_METRICS = 1000  # of one request, see MLflow's REST API
INVALID = re.compile(r"[^\w./ -]")  # in the name of a metric


class MlflowRun:
    """A run of MLflow: the settings are its parameters, and a round is a step of its metrics."""

    def __init__(self, tracking_uri: str, experiment: str, run: TrackedRun) -> None:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # newer versions refuse the file store without it
        self._run = run
        self._metrics: list[Metric] = []
        self._client = MlflowClient(tracking_uri)
        found = self._client.get_experiment_by_name(experiment)
        experiment_id = found.experiment_id if found else self._client.create_experiment(experiment)
        self._id = self._client.create_run(experiment_id, run_name=run.name).info.run_id
        self._client.log_batch(self._id, params=[Param(key, str(value)) for key, value in run.settings.items()])

    def discard(self, source: str, round_: Round) -> None:
        """Keep the values, because MLflow cannot remove points of a metric."""

    def write_values(self, source: str, round_: Round, at: float, values: Mapping[str, float]) -> None:
        """Buffer one metric for each value."""
        for name, value in values.items():
            metric = INVALID.sub("_", self._run.metric(source, name))
            self._metrics.append(Metric(metric, value, int(at * 1000), round_))

    def flush(self) -> None:
        """Log the buffered metrics."""
        for i in range(0, len(self._metrics), MAX_METRICS):
            self._client.log_batch(self._id, self._metrics[i : i + MAX_METRICS])
        self._metrics.clear()

    def close(self, *, is_failed: bool) -> None:
        """Log the buffered metrics, and end MLflow's run."""
        self.flush()
        self._client.set_terminated(self._id, "FAILED" if is_failed else "FINISHED")
