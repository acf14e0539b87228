"""`gradpost doctor`: what is wrong with this machine, its settings or the cluster, why it matters, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from ps_protocol.messages import ClusterStatus

from ..output import EXIT_FAILED, print_json, print_line, print_table
from ..status import find_connection
from . import local, network, probes
from .finding import Finding, print_findings

CHECKS: tuple[Callable[[], Finding], ...] = (
    local.check_python,
    local.check_packages,
    probes.check_torch,
    local.check_memory,
    local.check_disk,
    local.check_open_files,
    local.check_allocator,
    local.check_settings,
    network.check_proxies,
    network.check_loopback,
    network.check_port,
    probes.check_http2,
)


def show_checks(
    coordinator: str | None, token_file: Path | None, *, with_speed: bool, strict: bool, as_json: bool
) -> int:
    """Run all checks and print what they found; 1 if something is broken (or `strict`, and worth a warning), else 0."""
    probes.start_all()  # they take seconds, the other checks do not
    findings = [finding for check in CHECKS for finding in _run(check)]
    found, status = network.check_coordinator(coordinator, token_file)
    findings.append(found)
    if status is not None:
        from .cluster import examine_cluster

        connection = find_connection(coordinator, token_file)
        findings += _run(partial(examine_cluster, connection, status, with_speed=with_speed), "cluster")
    levels = {finding.level for finding in findings}
    is_well = "broken" not in levels and not (strict and "warning" in levels)
    if as_json:
        from .links import describe_links

        links = [] if status is None else describe_links(status)
        print_json({"ok": is_well, "checks": [finding.to_json() for finding in findings], "links": links})
    else:
        if status is not None:
            _print_links(status)
        print_findings(findings)
    return 0 if is_well else EXIT_FAILED


def _print_links(status: ClusterStatus) -> None:
    from .links import links_table

    if table := links_table(status):
        print_line("How the trainers reach the pservers, as they measure it while they train:")
        print_line()
        print_table(table.columns, table.rows)


def _run(check: Callable[[], Finding | list[Finding]], name: str = "") -> list[Finding]:
    try:
        found = check()
    except Exception as error:  # one check that stumbles must not hide what the others found
        name = name or check.__name__.removeprefix("check_").replace("_", " ")
        return [Finding(name, "broken", f"this check failed itself: {error!r}", "please report it")]
    return [found] if isinstance(found, Finding) else found
