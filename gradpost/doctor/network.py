"""Checks of the network: loopback, ports, proxies, and the coordinator that the settings name."""

from __future__ import annotations

import os
import socket
from urllib.parse import urlsplit

from ps_protocol.environment import SettingsError
from ps_protocol.errors import GradpostError
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


def check_coordinator() -> Finding:
    """Whether the coordinator that the settings name answers, and speaks our version."""
    try:
        address = named_coordinator()
    except SettingsError:
        return Finding("coordinator", "skipped", "the settings cannot be read")
    if not address:
        return Finding("coordinator", "skipped", "GRADPOST_COORDINATOR is not set")
    try:
        with open_view(address) as view:
            version, status = view.protocol_version(), view.status()
    except (GradpostError, CommandError, SettingsError) as error:
        return Finding(
            "coordinator",
            "broken",
            str(error),
            "start it (gradpost serve coordinator), or correct GRADPOST_COORDINATOR",
        )
    if version != str(PROTOCOL_VERSION):
        return Finding(
            "coordinator", "broken", f"{address} speaks version {version}, this is version {PROTOCOL_VERSION}",
            "install the same Gradpost here and there",
        )  # fmt: skip
    return Finding("coordinator", "ok", f"{address}: run {status.run} is {status.state}")
