"""The commands that follow a run with a tracker: `gradpost tensorboard`, `mlflow` and `wandb`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ..options import Coordinator, TokenPath
from ..output import EXIT_FAILED, CommandError

app = typer.Typer()
Every = Annotated[
    float,
    typer.Option("--every-seconds", metavar="X", min=0, help="The time between statistics of parameters; 0: none."),
]


@app.command()
def tensorboard(
    logdir: Annotated[Path, typer.Option(metavar="DIR", help="The folder to write to, in a subfolder for the run.")],
    every: Every = 30.0,
    coordinator: Coordinator = None,
    token_file: TokenPath = None,
) -> None:
    """Write the trainers' results and norms of the parameters for TensorBoard, until the run is over or Ctrl-C.

    It begins with the results that the coordinator still has. It needs TensorBoard: pip install '.[tensorboard]'
    """
    with _needing("TensorBoard", "tensorboard"):
        from .tensorboard import EventFiles
    from .export import export_run

    hint = f"; to see it: tensorboard --logdir {logdir}"
    export_run(coordinator, token_file, partial(EventFiles, logdir), every, str(logdir), hint)


@app.command()
def mlflow(
    tracking_uri: Annotated[
        str, typer.Option(metavar="URI", envvar="MLFLOW_TRACKING_URI", help="A folder, or the address of a server.")
    ] = "mlruns",
    experiment: Annotated[
        str, typer.Option(metavar="NAME", envvar="MLFLOW_EXPERIMENT_NAME", help="The experiment of MLflow.")
    ] = "gradpost",
    every: Every = 30.0,
    coordinator: Coordinator = None,
    token_file: TokenPath = None,
) -> None:
    """Log the trainers' results and norms of the parameters with MLflow, until the run is over or Ctrl-C.

    It begins with the results that the coordinator still has. It needs MLflow: pip install '.[mlflow]'
    """
    with _needing("MLflow", "mlflow"):
        from mlflow.exceptions import MlflowException

        from .mlflow import MlflowRun
    from .export import export_run

    try:
        export_run(coordinator, token_file, partial(MlflowRun, tracking_uri, experiment), every, tracking_uri)
    except MlflowException as error:
        raise CommandError(f"MLflow refuses the run: {error}", exit_code=EXIT_FAILED) from None


@app.command()
def wandb(
    project: Annotated[
        str, typer.Option(metavar="NAME", envvar="WANDB_PROJECT", help="The project of W&B.")
    ] = "gradpost",
    every: Every = 30.0,
    coordinator: Coordinator = None,
    token_file: TokenPath = None,
) -> None:
    """Log the trainers' results and norms of the parameters with W&B, until the run is over or Ctrl-C.

    It begins with the results that the coordinator still has. With WANDB_MODE=offline it writes files for `wandb sync`,
    and needs neither a network nor an account. It needs W&B: pip install '.[wandb]'
    """
    with _needing("W&B", "wandb"):
        from wandb.errors import Error

        from .wandb import WandbRun
    from .export import export_run

    try:
        export_run(coordinator, token_file, partial(WandbRun, project), every, f"project {project} of W&B")
    except Error as error:
        cause, advice = str(error).rstrip("."), "To write local files instead, set WANDB_MODE=offline"
        raise CommandError(f"W&B refuses the run: {cause}. {advice}", exit_code=EXIT_FAILED) from None


@contextmanager
def _needing(title: str, extra: str) -> Iterator[None]:
    """Convert the ImportError of a missing package, before anything is requested or written."""
    try:
        yield
    except ImportError as error:
        raise CommandError(f"this needs {title}: pip install '.[{extra}]' ({error})") from None
