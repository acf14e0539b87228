"""`gradpost doctor`: check the settings, the token, the coordinator and each pserver, and advise on each problem."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import httpx

from ps_config.certificates import client_context
from ps_config.control_client import BearerAuth, raise_for_problem
from ps_config.environment import SettingsError
from ps_config.tokens import TokenFile, TokenPair
from ps_http2.polled_client import PolledTransport
from ps_protocol.errors import GradpostError
from ps_protocol.messages import PserverState, PserverStatus
from ps_protocol.routes import STATE

from .output import EXIT_FAILED, CommandError, count, print_json, print_line
from .runs import Connection, asking, find_connection

REACH_SECONDS = 5.0  # for the answer of a pserver


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check; `advice` says what to do."""

    check: str
    level: Literal["ok", "skipped", "warning", "broken"]
    detail: str
    advice: str = ""


def show_checks(coordinator: str | None, token_file: Path | None, *, strict: bool, as_json: bool) -> int:
    """Run all checks and print the findings; return 1 if one is broken (or, with `strict`, a warning), else 0."""
    findings = list(check_all(coordinator, token_file))
    failed = [one for one in findings if one.level == "broken" or (strict and one.level == "warning")]
    if as_json:
        print_json({"ok": not failed, "checks": [asdict(finding) for finding in findings]})
        return EXIT_FAILED if failed else 0
    for finding in findings:
        print_line(f"{finding.level:8} {finding.check:11} {finding.detail}")
        if finding.advice:
            print_line(f"{'':20} -> {finding.advice}")
    print_line(f"{count(len(failed), 'check')} failed" if failed else "all is well")
    return EXIT_FAILED if failed else 0


def check_all(coordinator: str | None, token_file: Path | None) -> Iterator[Finding]:
    """Yield the findings; a check that needs what is broken is omitted."""
    try:
        connection = find_connection(coordinator, token_file)
    except (CommandError, SettingsError) as error:
        yield Finding("settings", "broken", str(error), "unset it, or write it as suggested")
        return
    yield Finding("settings", "ok", "all GRADPOST_* variables are known")
    yield check_token(connection.token_file)
    try:
        with asking(coordinator, token_file) as view:
            status = view.status()
    except (CommandError, SettingsError, GradpostError) as error:
        yield Finding("coordinator", "broken" if connection.is_named else "skipped", str(error))
        return
    yield Finding("coordinator", "ok", f"{connection.address}: run {status.run} is {status.state}")
    with ThreadPoolExecutor() as threads:
        yield from threads.map(partial(check_pserver, connection), status.pservers)


def check_token(path: Path | None) -> Finding:
    """Check that the token which commands on this machine send is valid, and that other users cannot read it."""
    if path is None:
        return Finding("token", "ok", "no token is set")
    file = TokenFile(path)
    if file.read() is None:
        detail = file.problem or f"there is no token file {path}"
        return Finding("token", "broken", detail, "write one with gradpost token create, or correct the path")
    if file.problem:
        return Finding("token", "warning", file.problem, "other users can use the cluster: chmod 400")
    return Finding("token", "ok", str(path))


def check_pserver(connection: Connection, pserver: PserverStatus) -> Finding:
    """Check that this machine reaches the pserver as a trainer does, and that it is the expected process."""
    name, protocol = f"pserver {pserver.index}", "HTTP/2" if pserver.http2 else "HTTP/1.1"
    tls, token_file = connection.tls, connection.token_file
    transport = PolledTransport(tls) if pserver.http2 else httpx.HTTPTransport(verify=client_context(tls))
    auth = None if token_file is None else BearerAuth(TokenPair(token_file))
    try:
        with httpx.Client(transport=transport, auth=auth, timeout=REACH_SECONDS) as http:
            response = http.get(pserver.address + STATE)
            raise_for_problem(response)
            state = PserverState.from_answer(response.content)
    except (httpx.TransportError, GradpostError, SettingsError, OSError, ValueError) as error:
        detail = f"{pserver.address} cannot be reached from here over {protocol}: {error or type(error).__name__}"
        advice = "check that it runs, --advertise-address, any firewall or proxy, and the token and certificates here"
        return Finding(name, "broken", detail, advice)
    if (state.index, state.incarnation) != (pserver.index, pserver.heartbeat.incarnation):
        detail = f"pserver {state.index} of incarnation {state.incarnation} answers at {pserver.address}"
        return Finding(name, "broken", detail, "correct --advertise-address or the proxy, or try again after a restart")
    return Finding(name, "ok", f"{pserver.address} answers over {protocol}")
