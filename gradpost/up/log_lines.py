"""Log lines of the cluster's processes: JSON as they come, short as they are shown."""

from __future__ import annotations

import json
from dataclasses import dataclass

from ps_protocol.printable import printable

_WARNINGS = ("warning", "error", "critical")
_LEFT_OUT = ("event", "level", "timestamp", "role", "exception")  # said otherwise, or not worth a place
_OF_TRAINERS = ("run", "trainer")  # the prefix says which


@dataclass(frozen=True, slots=True)
class LogLine:
    """One entry of a structured log; `text` has several lines if there is a traceback."""

    level: str
    text: str

    @property
    def is_warning(self) -> bool:
        """Whether it says more than that all is well."""
        return self.level in _WARNINGS


def parse_log_line(line: str) -> LogLine | None:
    """Read what Gradpost's own processes log; None for anything else, such as what a script prints.

    >>> parse_log_line('{"role": "pserver", "event": "no heartbeat", "level": "warning", "error": "a b", "round": 3}')
    LogLine(level='warning', text='no heartbeat error="a b" round=3')
    >>> parse_log_line('{"event": "my own JSON"}') is None
    True
    """
    if not (line.startswith("{") and line.endswith("}")):
        return None
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    if not all(isinstance(entry.get(key), str) for key in ("role", "event", "level")):
        return None
    left_out = _LEFT_OUT + (_OF_TRAINERS if entry["role"] == "trainer" else (entry["role"],))
    facts = [f"{key}={_show(value)}" for key, value in entry.items() if key not in left_out]
    lines = [" ".join([entry["event"], *facts]), *str(entry.get("exception") or "").splitlines()]
    return LogLine(entry["level"], "\n".join(map(printable, lines)))


def _show(value: object) -> str:
    if isinstance(value, str) and value and not any(c.isspace() or c == '"' for c in value):
        return value
    return json.dumps(value, ensure_ascii=False)
