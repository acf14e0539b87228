"""Checks of the network: loopback, ports, proxies, and the coordinator that the settings name."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from urllib.parse import urlsplit

from ps_protocol.environment import SettingsError
from ps_protocol.errors import Forbidden, GradpostError, Unauthenticated
from ps_protocol.messages import ClusterStatus
from ps_protocol.vocabulary import PROTOCOL_VERSION

from ..output import CommandError
from ..status import DEFAULT_COORDINATOR, named_coordinator, open_view
from .finding import Finding

TIMEOUT_SECONDS = 5.0
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


def check_loopback() -> Finding:
    """Whether this machine can talk to itself."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), TIMEOUT_SECONDS) as client:
                server.settimeout(TIMEOUT_SECONDS)
                accepted, _ = server.accept()
                with accepted:
                    accepted.sendall(b"x")
                    client.recv(1)
    except OSError as error:
        return Finding("loopback", "broken", str(error), "a firewall or sandbox forbids connections to 127.0.0.1")
    return Finding("loopback", "ok", f"127.0.0.1 answers (port {port})")


def check_port() -> Finding:
    """Whether the coordinator's usual port is free, or a coordinator has it."""
    text = os.environ.get("GRADPOST_PORT") or str(urlsplit(DEFAULT_COORDINATOR).port)
    if not text.isdecimal() or int(text) > 65535:
        return Finding("port", "broken", f"GRADPOST_PORT={text}", "a port is a number up to 65535")
    try:
        with socket.create_server(("127.0.0.1", int(text))):
            return Finding("port", "ok", f"{text} is free")
    except OSError as error:
        try:
            with open_view(f"http://127.0.0.1:{text}") as view:
                return Finding("port", "ok", f"{text}: the coordinator of run {view.status().run} serves there")
        except (GradpostError, CommandError, SettingsError):
            advice = "give the coordinator another one: --port or GRADPOST_PORT"
            return Finding("port", "warning", f"{text}: {os.strerror(error.errno or 0).lower()}", advice)


def check_proxies() -> Finding:
    """Whether a proxy might get between other tools and the cluster."""
    found = [name for name in _PROXIES for name in (name, name.lower()) if os.environ.get(name)]
    if not found:
        return Finding("proxies", "ok", "none is set")
    without = os.environ.get("NO_PROXY") or os.environ.get("no_proxy") or ""
    try:
        host = urlsplit(named_coordinator() or DEFAULT_COORDINATOR).hostname or ""
    except SettingsError:
        host = ""
    detail = f"{', '.join(found)}; Gradpost itself goes past them"
    if without == "*" or host in [part.strip() for part in without.split(",")]:
        return Finding("proxies", "ok", f"{detail}, and NO_PROXY holds {host}")
    hosts = ",".join(dict.fromkeys(["127.0.0.1", "localhost", *filter(None, [host])]))
    return Finding("proxies", "warning", detail, f"for curl and the like: export NO_PROXY={hosts}")


def check_coordinator(
    coordinator: str | None = None, token_file: Path | None = None
) -> tuple[Finding, ClusterStatus | None]:
    """Whether the coordinator that the flag or the settings name answers, and speaks our version; and its status.

    If none is named, one at the usual address will do, and none is no fault.
    """
    try:
        is_named = bool(coordinator or named_coordinator())
    except SettingsError:
        return Finding("coordinator", "skipped", "the settings cannot be read"), None
    try:
        with open_view(coordinator, token_file) as view:
            address, version, status = view.coordinator, view.protocol_version(), view.status()
    except (Unauthenticated, Forbidden, CommandError, SettingsError) as error:
        advice = "show a token of scope read (--token-file, GRADPOST_TOKENS_DIR), and certificates if it wants some"
        return Finding("coordinator", "broken", str(error), advice), None
    except GradpostError as error:
        if not is_named:
            detail = f"GRADPOST_COORDINATOR is not set, and {error}"
            return Finding("coordinator", "skipped", detail, "name one with --coordinator to have it looked at"), None
        advice = "start it (gradpost serve coordinator), or correct --coordinator or GRADPOST_COORDINATOR"
        return Finding("coordinator", "broken", str(error), advice, "everybody finds the others by it"), None
    if version != str(PROTOCOL_VERSION):
        return Finding(
            "coordinator", "broken",
            f"{address} speaks version {version} of the protocol, this is version {PROTOCOL_VERSION}",
            "install the same Gradpost here and there", "a trainer from here would be refused",
        ), None  # fmt: skip
    waits = f", waiting for {', '.join(status.waiting_for)}" if status.waiting_for else ""
    return Finding("coordinator", "ok", f"{address}: run {status.run} is {status.state}{waits}"), status
