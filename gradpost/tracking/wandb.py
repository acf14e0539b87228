"""A run of Weights & Biases, which uploads it, or with WANDB_MODE=offline writes it to local files."""

from __future__ import annotations

from collections.abc import Mapping

import wandb

from ps_protocol.vocabulary import Round

from .export import TrackedRun


class WandbRun:
    """A run of W&B: the settings are its config, and `round` is the x axis of its charts."""

    def __init__(self, project: str, run: TrackedRun) -> None:
        self._run = run
        # W&B would add the console and the load of this process, which does not train.
        settings = wandb.Settings(console="off", x_disable_stats=True)
        self._wandb = wandb.init(project=project, name=run.name, config=dict(run.settings), settings=settings)
        self._wandb.define_metric("round")
        self._wandb.define_metric("*", step_metric="round")

    def discard(self, source: str, round_: Round) -> None:
        """Keep the values, because W&B cannot remove rows of a run's history."""

    def write_values(self, source: str, round_: Round, at: float, values: Mapping[str, float]) -> None:
        """Write one row with all values."""
        row = {self._run.metric(source, name): value for name, value in values.items()}
        self._wandb.log({**row, "round": round_, "_timestamp": at})

    def flush(self) -> None:
        """Do nothing: W&B writes by itself."""

    def close(self, *, is_failed: bool) -> None:
        """End W&B's run, after it is written or uploaded."""
        self._wandb.finish(exit_code=int(is_failed))
