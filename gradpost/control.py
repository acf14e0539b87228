"""The commands that change a run while it trains: `gradpost pause`, `resume`, `rate`, `freeze`, `evict`, `stop`, ….

Each waits until every pserver has the change, and prints the round from which it applies.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import quote

import typer

from ps_protocol.routes import EVICT, FROZEN, PAUSE, RATE, RESUME, STOP

from .options import Coordinator, Json, ParameterName, TokenPath
from .output import CommandError, print_line

app = typer.Typer()


@app.command()
def pause(coordinator: Coordinator = None, token_file: TokenPath = None, as_json: Json = False) -> None:
    """Pause the run: pservers apply no further round, trainers wait, and no time-out counts."""
    _change_run(coordinator, token_file, as_json, "POST", PAUSE, "is paused")


@app.command()
def resume(coordinator: Coordinator = None, token_file: TokenPath = None, as_json: Json = False) -> None:
    """Resume a paused run."""
    _change_run(coordinator, token_file, as_json, "POST", RESUME, "continues")


@app.command()
def rate(
    value: Annotated[float | None, typer.Argument(metavar="RATE", min=0, help="The learning rate.")] = None,
    group: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="The index of the parameter group [default: all].")
    ] = None,
    optimizer: Annotated[
        str | None, typer.Option(metavar="NAME", help="The name of the optimizer, if the script has several.")
    ] = None,
    reset: Annotated[bool, typer.Option("--reset", help="Use the script's own learning rate again.")] = False,
    coordinator: Coordinator = None,
    token_file: TokenPath = None,
    as_json: Json = False,
) -> None:
    """Set a learning rate, which replaces the script's."""
    if (value is None) != reset:
        raise CommandError("give a learning rate, or --reset to use the script's own again")
    rates = "the script's learning rate" if reset else f"learning rate {value:g}"
    groups = "all parameter groups" if group is None else f"parameter group {group}"
    if optimizer is not None:
        groups += f" of optimizer {optimizer}"
    body = {"rate": value, "group": group, "optimizer": optimizer}
    _change_run(coordinator, token_file, as_json, "PUT", RATE, f"uses {rates} for {groups}", body)


@app.command()
def freeze(
    name: ParameterName, coordinator: Coordinator = None, token_file: TokenPath = None, as_json: Json = False
) -> None:
    """Freeze a parameter: it does not change, as if it had no gradient."""
    _change_run(coordinator, token_file, as_json, "PUT", _frozen_path(name), f"does not change parameter {name}")


@app.command()
def unfreeze(
    name: ParameterName, coordinator: Coordinator = None, token_file: TokenPath = None, as_json: Json = False
) -> None:
    """Unfreeze a parameter."""
    _change_run(coordinator, token_file, as_json, "DELETE", _frozen_path(name), f"changes parameter {name}")


@app.command()
def evict(
    rank: Annotated[int, typer.Argument(metavar="RANK", min=0, help="The rank of the trainer.")],
    coordinator: Coordinator = None,
    token_file: TokenPath = None,
    as_json: Json = False,
) -> None:
    """Continue without a trainer. Another process may take its rank."""
    _change_run(coordinator, token_file, as_json, "POST", EVICT.format(rank=rank), f"trains without trainer {rank}")


@app.command()
def stop(
    fail: Annotated[
        bool, typer.Option("--fail", help="End the run immediately and as failed, without a checkpoint.")
    ] = False,
    coordinator: Coordinator = None,
    token_file: TokenPath = None,
    as_json: Json = False,
) -> None:
    """End the run after a checkpoint; the scripts get the error run_stopped. The next trainers begin a new run."""
    outcome = "failed" if fail else "stopped"
    _change_run(coordinator, token_file, as_json, "POST", STOP, outcome, {"fail": fail}, "after round")


def _frozen_path(name: str) -> str:
    return FROZEN.replace("{name:path}", quote(name))


def _change_run(
    coordinator: str | None,
    token_file: Path | None,
    as_json: bool,
    method: str,
    path: str,
    outcome: str,
    message: dict[str, Any] | None = None,
    since: Literal["from round", "after round"] = "from round",
) -> None:
    from .runs import print_answer

    def show(done: dict[str, Any]) -> None:
        end = " on" if since == "from round" else ""
        print_line(f"run {done['run']} {outcome} {since} {done['round']:,}{end}")

    print_answer(
        coordinator,
        token_file,
        lambda view: view.change_run(method, path, message),
        show,
        as_json=as_json,
        scope="admin",
    )
