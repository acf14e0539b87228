"""`gradpost doctor`: what is wrong with this machine or its settings, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable

from ..output import EXIT_FAILED, print_json
from . import local, network, probes
from .finding import Finding, print_findings

CHECKS: tuple[Callable[[], Finding], ...] = (
    local.check_python,
    local.check_packages,
    probes.check_torch,
    local.check_memory,
    local.check_open_files,
    local.check_allocator,
    local.check_settings,
    network.check_proxies,
    network.check_loopback,
    network.check_port,
    probes.check_http2,
    network.check_coordinator,
)


def show_checks(*, as_json: bool) -> int:
    """Run all checks and print what they found; 1 if something is broken, 0 if all is well but for warnings."""
    probes.start_all()  # they take seconds, the other checks do not
    findings = [_run(check) for check in CHECKS]
    is_broken = any(finding.level == "broken" for finding in findings)
    if as_json:
        print_json({"ok": not is_broken, "checks": [finding.to_json() for finding in findings]})
    else:
        print_findings(findings)
    return EXIT_FAILED if is_broken else 0


def _run(check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except Exception as error:  # one check that stumbles must not hide what the others found
        name = check.__name__.removeprefix("check_").replace("_", " ")
        return Finding(name, "broken", f"this check failed itself: {error!r}", "please report it")
