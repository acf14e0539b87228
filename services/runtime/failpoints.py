"""Named places in the code at which a test can kill, stop or fail the process, as FreeBSD's fail(9) does.

The setting `failpoints` arms them: `log.append.before=kill@3,checkpoint.rename=enospc` names an action for each, and
the passage at which it happens (the first by default). `make chaos` and tests use it.
"""

from __future__ import annotations

import errno
import os
import signal
from dataclasses import dataclass

from .logs import get_logger

log = get_logger()

NAMES = frozenset(
    {
        "log.append.before",
        "log.append.after",
        "apply.before",
        "apply.after",
        "checkpoint.rename",
        "checkpoint.shard",
        "checkpoint.manifest",
        "checkpoint.manifest.after",
        "freeze.before",
        "freeze.after",
        "begin.before",
        "begin.after",
        "decide.before",
        "decide.after",
        "fence.before",
        "promote.before",
        "promote.after",
        "open.before",
        "open.after",
        "install.before",
        "install.after",
    }
)
_ERRORS = {"enospc": errno.ENOSPC, "eio": errno.EIO, "erofs": errno.EROFS}


@dataclass
class _Armed:
    action: str
    countdown: int


_armed: dict[str, _Armed] = {}


def parse_failpoints(text: str) -> dict[str, _Armed]:
    """Return the armed failpoints by name. Raises ValueError for unknown names and actions.

    >>> parse_failpoints("apply.before=kill@3")
    {'apply.before': _Armed(action='kill', countdown=3)}
    """
    armed = {}
    for item in filter(None, text.split(",")):
        name, _, what = item.partition("=")
        action, _, count = what.partition("@")
        if name not in NAMES or action not in ("kill", "stop", *_ERRORS) or not (count or "1").isdigit():
            expected = f"NAME=kill|stop|enospc|eio|erofs[@N], NAME one of {', '.join(sorted(NAMES))}"
            raise ValueError(f"{item!r} is not a failpoint; expected {expected}")
        armed[name] = _Armed(action, int(count or 1))
    return armed


def arm_failpoints(text: str) -> None:
    """Arm the named failpoints, and disarm all others."""
    armed = parse_failpoints(text)
    _armed.clear()
    _armed.update(armed)
    if armed:
        log.warning("failpoints are armed; this process will fail on purpose", failpoints=text)


def reach_failpoint(name: str) -> None:
    """Perform the action that is armed for this place, if any. Raises OSError for an error of the disk."""
    if not _armed or (armed := _armed.get(name)) is None:
        return
    armed.countdown -= 1
    if armed.countdown != 0:
        return
    if armed.action in _ERRORS:
        number = _ERRORS[armed.action]
        raise OSError(number, f"{os.strerror(number)} (failpoint {name})")
    # Sent to this thread, which therefore does not run on before the process has stopped.
    signal.raise_signal(signal.SIGKILL if armed.action == "kill" else signal.SIGSTOP)
