"""`gradpost status`, `events` and `params`: a live run. `gradpost dashboard`: the runs that have ended."""

from __future__ import annotations

import json
import math
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import quote

from safetensors import safe_open

from ps_config.hosts import is_loopback
from ps_protocol.errors import Unreachable
from ps_protocol.messages import ClusterStatus, PserverHeartbeat
from ps_protocol.routes import EVENTS, PARAMETERS, STATISTICS
from trainer_client.client.inspection import READ_SECONDS, ClusterView, Object

from .output import CommandError, count, print_line, print_rows, warn, whole_file
from .runs import asking, history_folder, named_root, print_answer

PERIOD_SECONDS = 1.0  # of `events --follow`
MAX_BINS = 20
MAX_BAR = 50
_STATISTICS = ("norm", "mean", "deviation", "minimum", "maximum", "num_nan", "num_infinite", "num_zero")


def show_status(coordinator: str | None, token_file: Path | None, *, as_json: bool) -> None:
    """Print the status of the cluster."""
    print_answer(coordinator, token_file, ClusterView.status, _print_status, as_json=as_json)


def _print_status(status: ClusterStatus) -> None:
    """Print the status as lines and tables."""
    mode = status.mode if status.num_pservers else f"{status.mode} in a ring"
    is_stopped = status.state == "finished" and status.failure is not None
    state = "paused" if status.is_paused else "stopped" if is_stopped else status.state
    scripts = [trainer.heartbeat.script for trainer in status.trainers if trainer.heartbeat.script]
    names = sorted({script.run_name for script in scripts if script.run_name})
    line = f"run {status.run}{f' ({names[0]})' if names else ''}: {state}, mode {mode}, round {status.round:,}"
    if status.plan_digest:
        line += f", {count(status.num_parameters, 'parameter')}, {count(status.parameter_bytes, 'byte')}"
    lines = [line, *(f"command {command}" for command in sorted({script.command for script in scripts})[:3])]
    if status.waiting_for:
        lines.append(f"waiting for {', '.join(status.waiting_for)}")
    lines += [*status.overrides, *status.prospects]
    if status.failure:
        lines.append(f"{state}: {status.failure.get('detail')} ({status.failure.get('code')})")
    for text in [*lines, ""]:
        print_line(text)
    print_rows(
        [
            {
                "pserver": f"{p.index} of {status.num_pservers}",
                "address": p.address,
                "round": p.heartbeat.round,
                "waits for": _describe_wait(p.heartbeat),
                "heartbeat": f"{p.heartbeat_age_seconds:.1f} s ago",
            }
            for p in status.pservers
        ]
    )
    print_rows(
        [
            {
                "standby of": f"pserver {s.follows}",
                "address": s.address,
                "state": s.role.replace("_", " ") if s.run else "no replica yet",
                "round": s.round,
                "lag": f"{count(s.lag_rounds, 'round')}, {s.lag_seconds:.1f} s",
                "heartbeat": f"{s.heartbeat_age_seconds:.1f} s ago",
            }
            for s in status.standbys
        ]
    )
    declared = {"gathering": "ready", "training": state}.get(status.state, "joined")  # of a trainer with its model
    print_rows(
        [
            {
                "trainer": f"{t.rank} of {status.num_trainers}",
                "state": declared if t.state == "declared" else t.state,
                "round": t.heartbeat.round,
                "results": ", ".join(f"{name} {value:.4g}" for name, value in sorted(t.heartbeat.results.items())),
                "heartbeat": f"{t.heartbeat_age_seconds:.1f} s ago",
            }
            for t in status.trainers
        ]
    )


def _describe_wait(pserver: PserverHeartbeat) -> str:
    names = ", ".join(f"trainer {rank}" for rank in pserver.missing)
    return names and f"{names} ({pserver.waiting_seconds:.1f} s)"


# ---------------------------------------------------------------------- events


def show_events(coordinator: str | None, token_file: Path | None, *, follow: bool, as_json: bool) -> None:
    """Print the newest thousand events, and with `follow` the next ones until Ctrl-C, over restarts."""
    newest: int = 0
    events: list[dict[str, Any]] | None = []  # None while the coordinator is unreachable
    with asking(coordinator, token_file) as view, suppress(KeyboardInterrupt) if follow else nullcontext():
        while True:
            try:
                events = view.get(list[Object], f"{EVENTS}?after={newest}&limit=1000")
            except Unreachable:
                if not newest:
                    raise
                if events is not None:
                    warn(f"the coordinator at {view.coordinator} is unreachable; trying again until Ctrl-C")
                events = None
            for event in events or ():
                newest = event["id"]
                at = time.strftime("%H:%M:%S", time.localtime(event["at"]))
                by = f" ({event['by']})" if event["by"] else ""
                text = f"{at}  round {event['round']:>7,}  {event['text']}{by}"
                print_line(json.dumps(event) if as_json else text, flush=True)
            if not follow:
                return
            time.sleep(PERIOD_SECONDS)


# ---------------------------------------------------------------------- parameters


def show_parameters(
    coordinator: str | None, token_file: Path | None, name: str | None, output: Path | None, *, as_json: bool
) -> None:
    """Print a list of all parameters or the statistics of one; or write one or all to a file."""
    if output is not None:
        with asking(coordinator, token_file) as view:
            _write(output, view, name)
    elif name is None:
        print_answer(coordinator, token_file, lambda view: view.get(Object, PARAMETERS), _print_list, as_json=as_json)
    else:
        route = STATISTICS.replace("{name:path}", quote(name))
        print_answer(
            coordinator,
            token_file,
            lambda view: view.get(Object, route, READ_SECONDS),
            _print_statistics,
            as_json=as_json,
        )


def _write(output: Path, view: ClusterView, name: str | None) -> None:
    if output.suffix != ".safetensors":
        raise CommandError(f"--output must end in .safetensors, which is the format; not {output.name!r}")
    with whole_file(output) as partial, partial.open("wb") as file:
        for piece in view.model(name):
            file.write(piece)
    with safe_open(output, framework="np") as model:
        num_tensors, metadata = len(model.keys()), model.metadata()
    what = f"{count(num_tensors, 'tensor')} of round {int(metadata['round']):,} of run {metadata['run']}"
    print_line(f"{output}: {what}, {count(output.stat().st_size, 'byte')}")


def _print_list(listed: dict[str, Any]) -> None:
    parameters = listed["parameters"]
    print_line(f"run {listed['run']}, round {listed['version']:,}: {count(len(parameters), 'parameter')}")
    print_line()
    print_rows(
        [
            {
                "parameter": one["name"],
                "shape": "x".join(map(str, one["shape"])) or "scalar",
                "dtype": one["dtype"],
                "bytes": one["bytes"],
                "on pservers": ", ".join(map(str, sorted({block["pserver"] for block in one["blocks"]}))),
            }
            for one in parameters
        ]
    )


def _print_statistics(found: dict[str, Any]) -> None:
    shape = "x".join(map(str, found["shape"])) or "scalar"
    state = ", frozen" if found["is_frozen"] else ""
    print_line(f"{found['name']}  {shape}  round {found['version']:,} of run {found['run']}{state}")
    print_line()
    rows = [{"statistic": name, "value": "none" if found[name] is None else found[name]} for name in _STATISTICS]
    if found["num_touched"] is not None:
        rows.append({"statistic": "num_touched", "value": found["num_touched"]})
    print_rows(rows)
    print_rows(draw_histogram(found["histogram"]))


def draw_histogram(bins: list[tuple[float, float, int]]) -> list[dict[str, Any]]:
    """Return at most twenty rows, each for one bin or for several neighbours.

    >>> [*map(str, draw_histogram([(-0.5, -0.25, 1), (0, 0, 2), (0.25, 0.5, 100)])[1].values())]
    ['0', '2', '#']
    """
    size = max(1, math.ceil(len(bins) / MAX_BINS))
    sums = [(bins[i][0], sum(number for *_, number in bins[i : i + size])) for i in range(0, len(bins), size)]
    highest = max((number for _, number in sums), default=1)
    return [
        {"from": begin, "values": number, "": "#" * math.ceil(MAX_BAR * number / highest)} for begin, number in sums
    ]


# ---------------------------------------------------------------------- runs that have ended


def show_dashboard(state_dir: Path | None, host: str, port: int) -> NoReturn:
    """Serve the dashboard of the history. Raises CommandError without a run, or if other machines could reach it."""
    from services.coordinator.history import RunHistory
    from services.coordinator.pages import serve_history
    from services.runtime.logs import configure_logs

    if not is_loopback(host):
        raise CommandError(
            f"--host: {host or 'every interface'} can be reached from other machines, and this command checks no "
            "tokens. Omit --host, and forward the port from the other machine: ssh -L 7080:127.0.0.1:7080"
        )
    configure_logs("dashboard", level="warning")
    history = RunHistory(history_folder(state_dir or named_root()))
    if not history.entries():
        raise CommandError(
            f"there is no run in {history.folder}, where a run that has trained is kept when it ends. "
            "Give another folder with --state-dir"
        )
    serve_history(history, host, port, lambda address: print_line(f"dashboard: {address}", flush=True))
