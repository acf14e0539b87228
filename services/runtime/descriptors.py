"""How many files this process may have open: each connection is one, and so is each file of a log."""

from __future__ import annotations

import resource

from .logs import get_logger

log = get_logger()

RESERVED = 128  # for logs, checkpoints, connections to others and what Python needs
_MOST = 1 << 16  # more are of no use here, and some systems name a billion


def allow_many_files() -> None:
    """Raise the process's own limit as far as the system lets it: often 1,024 is what it begins with."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def bound_connections(wanted: int) -> int:
    """As many connections as are wanted, or fewer if there could not be files for them; that is said."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(1, soft - RESERVED) if soft != resource.RLIM_INFINITY else wanted
    if most < wanted:
        log.warning("fewer connections than max_connections: raise the limit of open files (ulimit -n)", most=most)
    return min(wanted, most)
