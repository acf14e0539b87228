"""`gradpost doctor`: check this machine, its settings and the cluster, and advise on each problem."""

from __future__ import annotations

import asyncio
import os
import socket
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import httpx
from pydantic import ValidationError
from rich.console import Console
from rich.text import Text

from ps_config.control_client import BearerAuth, make_control_client, raise_for_problem
from ps_config.environment import PREFIX, SettingsError, check_environment, find_setting, read_settings_file
from ps_config.hosts import is_loopback
from ps_config.tokens import TokenFile, TokenPair
from ps_config.versions import installed_versions
from ps_protocol.errors import Forbidden, GradpostError, Unauthenticated
from ps_protocol.messages import ClusterStatus, PserverState, PserverStatus
from ps_protocol.printable import printable
from ps_protocol.process_reports import Software
from ps_protocol.routes import STATE
from ps_protocol.vocabulary import PROTOCOL_VERSION
from trainer_client.transport.exchange import make_bulk_client

from .output import EXIT_FAILED, CommandError, count, print_json
from .status import Connection, find_connection, open_view

REACH_SECONDS = 5.0  # for all requests to one service


Level = Literal["ok", "skipped", "warning", "broken"]
_MARKS: dict[Level, tuple[str, str]] = {
    "ok": ("ok", "green"),
    "skipped": ("-", "dim"),
    "warning": ("warning", "yellow"),
    "broken": ("BROKEN", "bold red"),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check; `advice` says what to do, and `why` what happens without it."""

    check: str
    level: Level
    detail: str
    advice: str = ""
    why: str = ""


def show_checks(coordinator: str | None, token_file: Path | None, *, strict: bool, as_json: bool) -> int:
    """Run all checks and print the findings; return 1 if one is broken (or, with `strict`, a warning), else 0."""
    tokens, cluster = partial(check_tokens, token_file), partial(check_cluster, coordinator, token_file)
    findings = [finding for check in (check_settings, tokens, cluster) for finding in _run(check)]
    levels = {finding.level for finding in findings}
    is_well = "broken" not in levels and not (strict and "warning" in levels)
    if as_json:
        print_json({"ok": is_well, "checks": [asdict(finding) for finding in findings]})
    else:
        _print_findings(findings)
    return 0 if is_well else EXIT_FAILED


def _print_findings(findings: Sequence[Finding]) -> None:
    """Print a line for each finding with its reason and advice, and a summary."""
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    width = max(len(finding.check) for finding in findings)
    for finding in findings:
        mark, style = _MARKS[finding.level]
        line = Text.assemble((f"{mark:8}", style), f"{finding.check:{width}}  ", printable(finding.detail))
        console.print(line)
        if finding.why:
            console.print(Text.assemble(" " * (8 + width + 2), printable(finding.why)))
        if finding.advice:
            console.print(Text.assemble(" " * (8 + width + 2), ("-> " + printable(finding.advice), "bold")))
    broken = sum(finding.level == "broken" for finding in findings)
    warnings = sum(finding.level == "warning" for finding in findings)
    verdict = "all is well" if not broken else f"{count(broken, 'check')} failed"
    console.print()
    console.print(verdict + (f", with {count(warnings, 'warning')}" if warnings else ""))


def _run(check: Callable[[], Finding | list[Finding]]) -> list[Finding]:
    try:
        found = check()
    except Exception as error:  # an error in one check must not hide the findings of the others
        function = check.func if isinstance(check, partial) else check
        name = function.__name__.removeprefix("check_")
        return [Finding(name, "broken", f"the check raised {error!r}", "this is a bug, please report it")]
    return [found] if isinstance(found, Finding) else found


# ---------------------------------------------------------------------- this machine


def check_settings() -> Finding:
    """Check that all settings in the environment and the settings file are known."""
    try:
        check_environment(os.environ)
        file = read_settings_file(os.environ)
    except SettingsError as error:
        return Finding("settings", "broken", str(error), "unset it, or write it as suggested")
    found = sorted(name for name in os.environ if name.startswith(PREFIX)) + [f"{key} in the file" for key in file]
    rank, world_size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "")
    if world_size and not (rank.isdecimal() and world_size.isdecimal() and int(rank) < int(world_size)):
        detail = f"RANK={rank} WORLD_SIZE={world_size}"
        return Finding("settings", "broken", detail, "ranks go from 0 to WORLD_SIZE - 1")
    return Finding("settings", "ok", ", ".join(found) or "no GRADPOST_* variable is set")


def check_tokens(token_file: Path | None = None) -> Finding:
    """Check that the token which commands on this machine send is valid, and that other users cannot read it."""
    try:
        path = find_connection(None, token_file).token_file
    except (CommandError, SettingsError):
        return Finding("tokens", "skipped", "the settings cannot be read")
    if path is None:
        return Finding("tokens", "ok", "no token is set")
    file = TokenFile(path)
    if file.read() is None:
        detail = file.problem or f"there is no token file {path}"
        return Finding("tokens", "broken", detail, "write one with gradpost token create, or correct the path")
    if file.problem:
        return Finding("tokens", "warning", file.problem, why="other users of this machine can use the cluster")
    return Finding("tokens", "ok", str(path))


# ---------------------------------------------------------------------- the cluster


def check_cluster(coordinator: str | None = None, token_file: Path | None = None) -> list[Finding]:
    """Check the cluster that the arguments or the settings name; blocks for a few time-outs at most."""
    found, status = check_coordinator(coordinator, token_file)
    if status is None:
        return [found, check_versions()]
    connection = find_connection(coordinator, token_file)
    reached = asyncio.run(_reach_all(connection, status.pservers))
    return [
        found,
        check_versions(status),
        *check_addresses(connection.address, status.pservers),
        *map(check_pserver, status.pservers, reached),
    ]


def check_coordinator(
    coordinator: str | None = None, token_file: Path | None = None
) -> tuple[Finding, ClusterStatus | None]:
    """Check that the coordinator answers and has this version; return its status with the finding.

    If no address is given, the default address is tried, where a missing coordinator is not an error.
    """
    try:
        is_named = bool(coordinator or find_setting("coordinator"))
        with open_view(coordinator, token_file) as view:
            address, version, status = view.coordinator, view.protocol_version(), view.status()
    except (Unauthenticated, Forbidden) as error:
        advice = "give a token of scope read with --token-file or GRADPOST_TOKENS_DIR"
        return Finding("coordinator", "broken", str(error), advice), None
    except (CommandError, SettingsError) as error:
        advice = "correct the address, the token file, the certificates or the setting"
        return Finding("coordinator", "broken", str(error), advice), None
    except GradpostError as error:
        if not is_named:
            detail = f"GRADPOST_COORDINATOR is not set, and {error}"
            return Finding(
                "coordinator", "skipped", detail, "name a coordinator with --coordinator to check its cluster"
            ), None
        advice = "start it (gradpost serve coordinator), or correct --coordinator or GRADPOST_COORDINATOR"
        return Finding("coordinator", "broken", str(error), advice, "trainers and pservers cannot join"), None
    if version != str(PROTOCOL_VERSION):
        return Finding(
            "coordinator", "broken",
            f"{address} speaks version {version} of the protocol, this is version {PROTOCOL_VERSION}",
            "install the same version of Gradpost on both machines", "the coordinator refuses trainers of this machine",
        ), None  # fmt: skip
    return Finding("coordinator", "ok", f"{address}: run {status.run} is {status.state}"), status


def check_versions(status: ClusterStatus | None = None) -> Finding:
    """Check that all members of the cluster and this machine run the same versions."""
    members: dict[str, Software | None] = {"this machine": Software(**installed_versions())}
    if status is not None:
        members["coordinator"] = status.software
        members |= {f"pserver {p.index}": p.heartbeat.software for p in status.pservers}
        members |= {
            f"trainer {t.rank}": t.heartbeat.software for t in status.trainers if t.state in ("joined", "declared")
        }
    found, different = [], []
    for package in ("gradpost", "torch", "python"):
        names: defaultdict[str, list[str]] = defaultdict(list)
        for member, software in members.items():
            if software is not None:
                names[getattr(software, package)].append(member)
        found.append(f"{package} {next(iter(names))}")
        if len(names) > 1:
            different.append(f"{package} " + "; ".join(f"{v} ({', '.join(same)})" for v, same in sorted(names.items())))
    if different:
        return Finding(
            "versions", "warning", ". ".join(different), "install the versions in requirements.lock on all machines",
            "another torch may round differently; another gradpost may lack a feature that the others expect",
        )  # fmt: skip
    number = sum(software is not None for software in members.values())
    return Finding("versions", "ok", f"{', '.join(found)}: the same in {count(number, 'installation')}")


def check_addresses(coordinator: str, pservers: Sequence[PserverStatus]) -> list[Finding]:
    """Check that trainers on other machines can use the addresses that pservers advertise."""
    findings = []
    loopback = [p for p in pservers if is_loopback(urlsplit(p.address).hostname or "")]
    if loopback and not (len(loopback) == len(pservers) and is_loopback(urlsplit(coordinator).hostname or "")):
        named = ", ".join(f"pserver {p.index} ({p.address})" for p in loopback)
        advice = "start it with --host and an address of its machine, or with --advertise-address"
        detail, why = (
            f"{named}: a loopback address, in a cluster of several machines",
            "a trainer on another machine connects to itself",
        )
        findings.append(Finding("addresses", "broken", detail, advice, why))
    indices: defaultdict[str, list[int]] = defaultdict(list)
    for pserver in pservers:
        indices[pserver.address].append(pserver.index)
    for address, same in indices.items():
        if len(same) > 1:
            detail = f"pservers {', '.join(map(str, same))} advertise the same address, {address}"
            advice = "give each pserver its own address with --host, --port or --advertise-address"
            findings.append(
                Finding(
                    "addresses", "broken", detail, advice, "one of the pservers receives no request, and rounds hang"
                )
            )
    if not findings and pservers:
        where = "all on loopback: a cluster on one machine" if loopback else "none is loopback"
        findings.append(Finding("addresses", "ok", f"{count(len(pservers), 'pserver')}, {where}"))
    return findings


@dataclass(slots=True)
class Reached:
    """The responses of a pserver to this machine."""

    trouble: str = ""  # the reason why there is no state
    state: PserverState | None = None
    http2_trouble: str = ""


async def _reach_all(connection: Connection, pservers: Sequence[PserverStatus]) -> list[Reached]:
    """Return the responses of the pservers in their order."""
    tokens = None if connection.token_file is None else TokenPair(connection.token_file)
    auth = None if tokens is None else BearerAuth(tokens)
    async with (
        make_control_client(connection.tls, tokens) as control,
        make_bulk_client(connection.tls, auth, http2=True) as http2,
    ):
        return await asyncio.gather(*(_reach(control, http2, pserver) for pserver in pservers))


async def _reach(control: httpx.AsyncClient, http2: httpx.AsyncClient, pserver: PserverStatus) -> Reached:
    url, one = urlsplit(pserver.address), Reached()
    try:
        async with asyncio.timeout(REACH_SECONDS):
            await asyncio.get_running_loop().getaddrinfo(url.hostname, url.port)  # for an error that names the cause
            one.state = PserverState.from_answer((await _get(control, pserver.address + STATE)).content)
    except TimeoutError:
        one.trouble = f"no answer within {REACH_SECONDS:g} s"
    except socket.gaierror as error:
        one.trouble = f"the name {url.hostname} is not known here: {error.strerror}"
    except ValidationError:
        one.trouble = "the answer is not that of a pserver of this version"
    except (httpx.TransportError, GradpostError, OSError, ValueError) as error:
        one.trouble = str(error) or type(error).__name__
    if one.state is None or not pserver.http2:
        return one
    try:
        async with asyncio.timeout(REACH_SECONDS):
            await _get(http2, pserver.address + STATE)
    except (httpx.TransportError, GradpostError, OSError) as error:
        one.http2_trouble = str(error) or type(error).__name__
    return one


async def _get(http: httpx.AsyncClient, url: str) -> httpx.Response:
    response = await http.get(url)
    raise_for_problem(response)
    return response


def check_pserver(pserver: PserverStatus, one: Reached) -> Finding:
    """Check that this machine reaches the pserver, that it is the expected one, and that HTTP/2 works."""
    name, incarnation = f"pserver {pserver.index}", pserver.heartbeat.incarnation
    if one.state is None:
        return Finding(
            name, "broken", f"{pserver.address} cannot be reached from here: {one.trouble}",
            "check that it runs, its --host and --advertise-address, the firewall, and the token and certificates here",
            "a trainer on this machine could not train",
        )  # fmt: skip
    if (one.state.index, one.state.incarnation) != (pserver.index, incarnation):
        return Finding(
            name, "broken",
            f"{pserver.address} answers as pserver {one.state.index} of incarnation {one.state.incarnation}, not as "
            f"{name} of incarnation {incarnation}",
            "correct --advertise-address or the proxy; a pserver that has just restarted is right a second later",
            "another process receives the tensors and refuses them",
        )  # fmt: skip
    if one.http2_trouble:
        return Finding(
            name, "broken", f"{pserver.address} answers, but not over HTTP/2: {one.http2_trouble}",
            "use a proxy that speaks HTTP/2, or start the pserver with GRADPOST_HTTP2=false",
            "trainers use HTTP/2, as the pserver advertises, and rounds hang",
        )  # fmt: skip
    if not pserver.http2:
        return Finding(
            name, "warning", f"{pserver.address} answers over HTTP/1.1",
            "start it without GRADPOST_HTTP2=false, unless a proxy needs that",
            "over HTTP/1.1 every request that waits holds a connection of its own",
        )  # fmt: skip
    return Finding(name, "ok", f"{pserver.address} answers over HTTP/2")
