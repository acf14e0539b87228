"""`gradpost status` and `gradpost events`, and the connection of every command to the coordinator."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ps_config.certificates import TlsFiles, client_files
from ps_config.environment import check_base_url, check_environment, find_path, find_setting
from ps_config.tokens import Scope
from ps_protocol.errors import Forbidden, Unauthenticated, Unreachable
from ps_protocol.fields import Message
from ps_protocol.messages import ClusterStatus, Override, PserverHeartbeat, TrainerStatus
from ps_protocol.standbys import StandbyStatus
from trainer_client.client.inspection import ClusterView

from .output import EXIT_FAILED, Column, CommandError, count, print_json, print_line, print_table, warn
from .state_folder import named_root, running_address

DEFAULT_COORDINATOR = "http://127.0.0.1:7070"
TIMEOUT_SECONDS = 5.0
PERIOD_SECONDS = 1.0

T = TypeVar("T")


@contextmanager
def asking(coordinator: str | None, token_file: Path | None = None, scope: Scope = "read") -> Iterator[ClusterView]:
    """Yield the view of `open_view`; convert connection errors to CommandError with advice.

    The default address may be that of another user's run, so that the user gets a warning.
    """
    with open_view(coordinator, token_file, scope) as view:
        if _find_address(coordinator) is None:
            warn(f"no `gradpost up` of this folder is running; using the coordinator at {view.coordinator}")
        try:
            yield view
        except (Unauthenticated, Forbidden) as error:
            raise CommandError(
                f"the coordinator refuses the request: {error}. Give a token with --token-file or GRADPOST_TOKENS_DIR",
                exit_code=EXIT_FAILED,
            ) from None
        except Unreachable as error:
            raise CommandError(
                f"no coordinator: {error}. Give its address with --coordinator or GRADPOST_COORDINATOR",
                exit_code=EXIT_FAILED,
            ) from None


def print_answer(
    coordinator: str | None,
    token_file: Path | None,
    fetch: Callable[[ClusterView], T],
    show: Callable[[T], None],
    *,
    as_json: bool,
    scope: Scope = "read",
) -> None:
    """Print the result of `fetch`: as JSON, or with `show`."""
    with asking(coordinator, token_file, scope) as view:
        answer = fetch(view)
    if as_json:
        print_json(json.loads(answer.model_dump_json()) if isinstance(answer, Message) else answer)
    else:
        show(answer)


def open_view(
    coordinator: str | None,
    token_file: Path | None = None,
    scope: Scope = "read",
    *,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> ClusterView:
    """Return a client of the coordinator: of the option, the environment, the settings file or the newest `up`.

    They also name its token and certificates; the default token is that of `scope` in `tokens_dir`, if set.
    """
    found = find_connection(coordinator, token_file, scope)
    return ClusterView(found.address, tls=found.tls, token_file=found.token_file, timeout_seconds=timeout_seconds)


@dataclass(frozen=True, slots=True)
class Connection:
    """The coordinator's address, and the credentials for it and the pservers."""

    address: str
    tls: TlsFiles
    token_file: Path | None


def find_connection(coordinator: str | None, token_file: Path | None = None, scope: Scope = "read") -> Connection:
    """Return the connection for `open_view`. Raises CommandError for a bad address, SettingsError for bad settings."""
    check_environment(os.environ)
    try:
        address = check_base_url(_find_address(coordinator) or DEFAULT_COORDINATOR)
    except ValueError as error:
        raise CommandError(f"the coordinator's address: {error}") from None
    token_file = token_file or find_path("token_file")
    if token_file is None and (folder := find_path("tokens_dir")):
        token_file = folder / scope
    return Connection(address, client_files(), token_file)


def _find_address(coordinator: str | None) -> str | None:
    return coordinator or find_setting("coordinator") or running_address(named_root())


def print_status(status: ClusterStatus) -> None:
    """Print the status as tables."""
    mode = status.mode if status.num_pservers else f"{status.mode} in a ring"
    is_stopped = status.state == "finished" and status.failure is not None
    state = "paused" if status.is_paused else "stopped" if is_stopped else status.state
    scripts = [trainer.heartbeat.script for trainer in status.trainers if trainer.heartbeat.script]
    names = sorted({script.run_name for script in scripts if script.run_name})
    line = f"run {status.run}{f' ({names[0]})' if names else ''}: {state}, mode {mode}, round {status.round:,}"
    if status.plan_digest:
        line += f", {count(status.num_parameters, 'parameter')}, {count(status.parameter_bytes, 'byte')}"
    print_line(line)
    for command in sorted({script.command for script in scripts})[:3]:
        print_line(f"command {command}")
    if status.waiting_for:
        print_line(f"waiting for {', '.join(status.waiting_for)}")
    for override in status.overrides:
        print_line(override.text + _describe_change(override))
    for prospect in status.prospects:
        print_line(prospect)
    if status.failure:
        print_line(f"{state}: {status.failure.get('detail')} ({status.failure.get('code')})")
    print_line()
    declared = {"gathering": "ready", "training": state}.get(status.state, "joined")  # of a trainer with its model
    is_ring = status.num_pservers == 0
    if not is_ring:
        print_table(
            [Column("pserver"), Column("address"), Column("round", "right"), Column("waits for"), Column("heartbeat")],
            [
                (
                    f"{p.index} of {status.num_pservers}",
                    p.address,
                    f"{p.heartbeat.round:,}",
                    _describe_wait(p.heartbeat),
                    f"{p.heartbeat_age_seconds:.1f} s ago",
                )
                for p in status.pservers
            ],
        )
    if status.standbys:
        print_table(
            [
                *(Column("standby of"), Column("address"), Column("state")),
                *(Column("round", "right"), Column("lag"), Column("heartbeat")),
            ],
            [
                (
                    f"pserver {s.follows}",
                    s.address,
                    s.role.replace("_", " "),
                    f"{s.round:,}",
                    _describe_lag(s),
                    f"{s.heartbeat_age_seconds:.1f} s ago",
                )
                for s in status.standbys
            ],
        )
    waits = [Column("in the ring")] if is_ring else []
    print_table(
        [Column("trainer"), Column("state"), Column("round", "right"), *waits, Column("results"), Column("heartbeat")],
        [
            (
                f"{t.rank} of {status.num_trainers}",
                declared if t.state == "declared" else t.state,
                f"{t.heartbeat.round:,}",
                *([_place_in_ring(t)] if is_ring else []),
                ", ".join(f"{name} {value:.4g}" for name, value in sorted(t.heartbeat.results.items())),
                f"{t.heartbeat_age_seconds:.1f} s ago",
            )
            for t in status.trainers
        ],
    )


def _describe_change(override: Override) -> str:
    if override.at is None or override.round is None:
        return ""
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(override.at))
    return f" from round {override.round:,} on, set with {override.by} at {at}"


def _describe_lag(standby: StandbyStatus) -> str:
    if standby.run is None:
        return "no replica yet"
    return f"{count(standby.lag_rounds, 'round')}, {count(standby.lag_bytes, 'byte')}, {standby.lag_seconds:.1f} s"


def _place_in_ring(trainer: TrainerStatus) -> str:
    if trainer.state != "declared":
        return ""
    if trainer.heartbeat.is_done:
        return "no batches left"
    seconds = trainer.heartbeat.waiting_seconds
    return f"waits for others ({seconds:.1f} s)" if seconds else "computes"


def _describe_wait(pserver: PserverHeartbeat) -> str:
    names = ", ".join(f"trainer {rank}" for rank in pserver.missing)
    return f"{names} ({pserver.waiting_seconds:.1f} s)" if names else ""


# ---------------------------------------------------------------------- events


def show_events(coordinator: str | None, token_file: Path | None, *, follow: bool, as_json: bool) -> None:
    """Print the newest thousand events, and with `follow` the next ones until Ctrl-C."""
    with asking(coordinator, token_file) as view, suppress(KeyboardInterrupt) if follow else nullcontext():
        for event in _follow(view) if follow else view.events():
            if as_json:
                print(json.dumps(event), flush=True)
                continue
            at = time.strftime("%H:%M:%S", time.localtime(event["at"]))
            by = f" ({event['by']})" if event["by"] else ""
            print_line(f"{at}  round {event['round']:>7,}  {event['text']}{by}", flush=True)


def _follow(view: ClusterView) -> Iterator[dict[str, Any]]:
    """Yield events indefinitely, over restarts of the coordinator. Raises Unreachable if it is missing at first."""
    view.status()
    newest, is_unreachable = 0, False
    while True:
        try:
            events, is_unreachable = view.events(newest), False
        except Unreachable:
            if not is_unreachable:
                warn(f"the coordinator at {view.coordinator} is unreachable; trying again until Ctrl-C")
            events, is_unreachable = [], True
        for event in events:
            newest = event["id"]
            yield event
        time.sleep(PERIOD_SECONDS)
