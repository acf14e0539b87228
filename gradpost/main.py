"""The command line: one function for each command, with its options and help.

To add a command, add a function here that imports its module when it is called. CommandError, GradpostError and
SettingsError end a command with one line on stderr (see `output`); `--json` prints with `output.print_json`.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ps_config.environment import SettingsError
from ps_protocol.errors import GradpostError
from ps_protocol.vocabulary import DEFAULT_PSERVERS, DEFAULT_TRAINERS

from .control import app as control_app
from .options import Coordinator, Json, SettingsCommand, TokenPath, complete_parameter
from .output import CommandError, exit_with
from .plan import plan
from .tokens import app as tokens_app

app = typer.Typer(
    name="gradpost",
    help="A parameter server for PyTorch over plain HTTP.",
    add_completion=True,
    rich_markup_mode=None,  # plain text takes half the time, and is the same in a pipe
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


app.command()(plan)

serve_app = typer.Typer(
    help="Run one service of a cluster in this process.", rich_markup_mode=None, no_args_is_help=True
)
app.add_typer(serve_app, name="serve")


@serve_app.command(cls=SettingsCommand)
def coordinator(ctx: typer.Context) -> None:
    """Run the coordinator: membership, the slice plan and the inspection API.

    An option takes precedence over its GRADPOST_* variable, that over the file GRADPOST_SETTINGS_FILE.
    """
    from .settings import serve

    serve("coordinator", ctx.obj)


@serve_app.command(cls=SettingsCommand)
def pserver(ctx: typer.Context) -> None:
    """Run a pserver: it stores a shard of the model and applies the optimizer.

    An option takes precedence over its GRADPOST_* variable, that over the file GRADPOST_SETTINGS_FILE.
    """
    from .settings import serve

    serve("pserver", ctx.obj)


@app.command(cls=SettingsCommand, context_settings={"allow_interspersed_args": False})
def up(
    ctx: typer.Context,
    command: Annotated[
        list[str], typer.Argument(metavar="COMMAND", help="The training script, such as: -- python train.py --epochs 3")
    ],
    pservers: Annotated[
        int | None,
        typer.Option(
            metavar="M",
            min=1,
            envvar="GRADPOST_NUM_PSERVERS",
            help=f"Number of pservers [default: {DEFAULT_PSERVERS}; none with --strategy ring].",
        ),
    ] = None,
    trainers: Annotated[
        int, typer.Option(metavar="N", min=1, envvar="GRADPOST_NUM_TRAINERS", help="Number of trainers.")
    ] = DEFAULT_TRAINERS,
    run_name: Annotated[
        str | None,
        typer.Option(metavar="TEXT", envvar="GRADPOST_RUN_NAME", help="A name of the run for people [default: none]."),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(metavar="N", help="The port of the dashboard; 0: any [default: 7070 if it is free, else 0]."),
    ] = None,
    whole: Annotated[
        bool,
        typer.Option("--whole", help="Keep each parameter whole, on one pserver.", rich_help_panel="Slice plan"),
    ] = False,
    max_restarts: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            help="The number of times that each failed process is restarted.",
            rich_help_panel="Failures",
        ),
    ] = 0,
    standbys: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            help="The number of standbys of each pserver, one of which replaces it when it fails. Durability is "
            "replicated.",
            rich_help_panel="Failures",
        ),
    ] = 0,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show all log lines of the services, and all frames of errors.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the summary as JSON on stdout, and everything else on stderr.")
    ] = False,
) -> None:
    """Run a training script on a local cluster: one coordinator, M pservers and N trainers, all on loopback.

    Each trainer runs COMMAND with its own RANK. A single trainer reads this terminal, so that breakpoint() works.
    Other settings come from GRADPOST_* variables. The exit code is that of the first script that fails, 128 + n if
    signal n ended it, 1 if no script trained, or 0. With --on-trainer-loss continue it is 0 if the remaining trainers
    finish the run.
    """
    from .up import run_up
    from .up.run import UpOptions

    settings = {**ctx.obj, **({} if port is None else {"port": port}), **({"slice_parameters": False} if whole else {})}
    options = UpOptions(
        max_restarts=max_restarts,
        standbys=standbys,
        run_name=run_name,
        verbose=verbose,
        as_json=as_json,
    )
    sys.exit(run_up(command, pservers, trainers, settings, options))


@app.command()
def dashboard(
    state_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="The folder of `up` or of a coordinator [default: GRADPOST_STATE_DIR, else .gradpost]."
        ),
    ] = None,
    host: Annotated[str, typer.Option(metavar="HOST", help="The loopback address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", min=0, max=65535, help="The port; 0: any.")] = 7080,
) -> None:
    """Show the runs that have ended, with their curves, in a browser without a cluster, until Ctrl-C."""
    from .show import show_dashboard

    show_dashboard(state_dir, host, port)


checkpoint_app = typer.Typer(
    help="Make, list, restore and export checkpoints.", rich_markup_mode=None, no_args_is_help=True
)
app.add_typer(checkpoint_app, name="checkpoint")
Place = Annotated[
    str | None,
    typer.Option(
        "--checkpoints", metavar="URL", help="The place of the checkpoints [default: that of the newest `up`]."
    ),
]


@checkpoint_app.command()
def create(coordinator: Coordinator = None, token_file: TokenPath = None, as_json: Json = False) -> None:
    """Make a checkpoint while the run trains, and wait until it is complete."""
    from .checkpoint import create_checkpoint

    create_checkpoint(coordinator, token_file, as_json=as_json)


@checkpoint_app.command()
def restore(
    round_: Annotated[int, typer.Option("--round", metavar="N", min=0, help="The round of a complete checkpoint.")],
    coordinator: Coordinator = None,
    token_file: TokenPath = None,
    as_json: Json = False,
) -> None:
    """Roll the run that trains back to a checkpoint, from which its trainers continue."""
    from .checkpoint import restore_checkpoint

    restore_checkpoint(coordinator, token_file, round_, as_json=as_json)


@checkpoint_app.command("list")
def list_(
    checkpoints: Place = None,
    coordinator: Annotated[
        str | None,
        typer.Option(metavar="URL", help="List the checkpoints of the coordinator's run instead of a place."),
    ] = None,
    token_file: TokenPath = None,
    as_json: Json = False,
) -> None:
    """List complete checkpoints, newest first.

    They are read from --checkpoints or from the run of --coordinator; else from GRADPOST_CHECKPOINTS, the run of
    GRADPOST_COORDINATOR, or the newest `up` in this folder. Reading a place needs no service.
    """
    from .checkpoint import list_checkpoints

    list_checkpoints(checkpoints, coordinator, token_file, as_json=as_json)


@checkpoint_app.command()
def export(
    file: Annotated[Path, typer.Argument(metavar="MODEL.safetensors", help="The file to write.")],
    checkpoints: Place = None,
    run: Annotated[str | None, typer.Option(metavar="NAME", help="The run [default: any].")] = None,
    round_: Annotated[int | None, typer.Option("--round", metavar="N", help="The round [default: the newest].")] = None,
) -> None:
    """Write the model for `safetensors.torch.load_file`: whole tensors, buffers and tied names.

    The model is that of a complete checkpoint. It needs no service. To export the current model of a run that trains:
    gradpost params -o MODEL.safetensors
    """
    from .checkpoint import export_model

    export_model(file, checkpoints, run, round_)


@app.command()
def status(
    coordinator: Coordinator = None,
    token_file: TokenPath = None,
    as_json: Json = False,
) -> None:
    """Show the members of the run, their rounds, and the members that it waits for."""
    from .show import show_status

    show_status(coordinator, token_file, as_json=as_json)


@app.command()
def params(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", help="Show the statistics of this parameter.", autocompletion=complete_parameter
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Write the parameter to a .safetensors file; without NAME, write the model.",
        ),
    ] = None,
    coordinator: Coordinator = None,
    token_file: TokenPath = None,
    as_json: Json = False,
) -> None:
    """List the parameters of the run that trains, show one with a histogram, or download one or all."""
    from .show import show_parameters

    show_parameters(coordinator, token_file, name, output, as_json=as_json)


@app.command()
def events(
    follow: Annotated[
        bool,
        typer.Option("--follow", "-f", help="Show further events until Ctrl-C, over restarts of the coordinator."),
    ] = False,
    coordinator: Coordinator = None,
    token_file: TokenPath = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document per line.")] = False,
) -> None:
    """Show events: changes of membership, checkpoints, rollbacks, and actions of administrators."""
    from .show import show_events

    show_events(coordinator, token_file, follow=follow, as_json=as_json)


app.add_typer(control_app)


@app.command()
def tensorboard(
    logdir: Annotated[Path, typer.Option(metavar="DIR", help="The folder to write to, in a subfolder for the run.")],
    coordinator: Coordinator = None,
    token_file: TokenPath = None,
) -> None:
    """Write the trainers' results for TensorBoard, until the run is over or Ctrl-C."""
    from .track import EventFiles, track_run

    place = f"{logdir}; to see it: tensorboard --logdir {logdir}"
    track_run(coordinator, token_file, "tensorboard", place, partial(EventFiles, logdir))


@app.command()
def mlflow(
    tracking_uri: Annotated[
        str, typer.Option(metavar="URI", envvar="MLFLOW_TRACKING_URI", help="A folder, or the address of a server.")
    ] = "mlruns",
    experiment: Annotated[
        str, typer.Option(metavar="NAME", envvar="MLFLOW_EXPERIMENT_NAME", help="The experiment of MLflow.")
    ] = "gradpost",
    coordinator: Coordinator = None,
    token_file: TokenPath = None,
) -> None:
    """Log the trainers' results with MLflow, until the run is over or Ctrl-C."""
    from .track import MlflowRun, track_run

    track_run(coordinator, token_file, "mlflow", tracking_uri, partial(MlflowRun, tracking_uri, experiment))


@app.command()
def wandb(
    project: Annotated[
        str, typer.Option(metavar="NAME", envvar="WANDB_PROJECT", help="The project of W&B.")
    ] = "gradpost",
    coordinator: Coordinator = None,
    token_file: TokenPath = None,
) -> None:
    """Log the trainers' results with W&B, until the run is over or Ctrl-C.

    With WANDB_MODE=offline it writes files for `wandb sync`, and needs neither a network nor an account.
    """
    from .track import WandbRun, track_run

    track_run(coordinator, token_file, "wandb", f"project {project} of W&B", partial(WandbRun, project))


app.add_typer(tokens_app, name="token")


@app.command()
def doctor(
    coordinator: Coordinator = None,
    token_file: TokenPath = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 for a warning, too.")] = False,
    as_json: Json = False,
) -> None:
    """Check the settings, the token and the services, with advice for each problem; exit with 1 if one is broken.

    Run it on the machine of a trainer.
    """
    from .doctor import show_checks

    sys.exit(show_checks(coordinator, token_file, strict=strict, as_json=as_json))


def main() -> None:
    """Run the command line; never returns."""
    try:
        app(prog_name="gradpost")
    except (CommandError, GradpostError, SettingsError) as error:
        exit_with(error)
